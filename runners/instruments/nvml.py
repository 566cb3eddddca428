"""The clocks of a GPU as NVIDIA's management library tells them: whether they are held back. Reads nothing else.

Called through ctypes: the library comes with the driver, so that no package is needed.
"""

import ctypes
from dataclasses import dataclass
from typing import Any

_LIBRARY = "libnvidia-ml.so.1"
# nvmlClocksEventReasons: power cap, slowdowns by hardware, heat and the power brake. Idling, and clocks that a user has
# set, are no throttling.
_THROTTLED = 0x4 | 0x8 | 0x20 | 0x40 | 0x80
_MEMORY_CLOCK = 2
_TEXT_BYTES = 96


class ClocksUnknownError(Exception):
    """The clocks of this device cannot be read. Its message says why."""


@dataclass(frozen=True, slots=True)
class Clocks:
    """One device's clocks; `driver` is the version of the driver."""

    library: Any
    device: ctypes.c_void_p
    driver: str

    def are_throttled(self) -> bool:
        """Whether they are held back now. Raises ClocksUnknownError."""
        reasons = ctypes.c_ulonglong()
        _call(self.library, "nvmlDeviceGetCurrentClocksThrottleReasons", self.device, ctypes.byref(reasons))
        return bool(reasons.value & _THROTTLED)

    def memory_bytes_per_second(self) -> float:
        """The memory's greatest bandwidth: two transfers a clock over the whole bus. Raises ClocksUnknownError."""
        megahertz, bits = ctypes.c_uint(), ctypes.c_uint()
        _call(self.library, "nvmlDeviceGetMaxClockInfo", self.device, _MEMORY_CLOCK, ctypes.byref(megahertz))
        _call(self.library, "nvmlDeviceGetMemoryBusWidth", self.device, ctypes.byref(bits))
        return 2 * megahertz.value * 1e6 * bits.value / 8


def clocks_of(uuid: str, library: Any = None) -> Clocks:
    """The clocks of the device of this UUID (`GPU-...`), whatever its number here. Raises ClocksUnknownError."""
    try:
        library = library or ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise ClocksUnknownError(f"{_LIBRARY} cannot be loaded: {error}") from error
    _call(library, "nvmlInit_v2")
    device = ctypes.c_void_p()
    _call(library, "nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(device))
    driver = ctypes.create_string_buffer(_TEXT_BYTES)
    _call(library, "nvmlSystemGetDriverVersion", driver, ctypes.c_uint(_TEXT_BYTES))
    return Clocks(library, device, driver.value.decode())


def _call(library: Any, name: str, *arguments: Any) -> None:
    function = getattr(library, name, None)
    if function is None:
        raise ClocksUnknownError(f"{_LIBRARY} has no {name}: the driver is too old or too new")
    if status := function(*arguments):
        raise ClocksUnknownError(f"{name} failed with NVML status {status}")
