"""The clocks of a GPU, read from a management library that is played here."""

import ctypes
from typing import Any

import pytest

from runners.instruments.nvml import ClocksUnknownError, clocks_of

NOT_FOUND = 6


class PlayedLibrary:
    """An H200 on driver 580.1; `reasons` are those for which its clocks are held back."""

    def __init__(self, reasons: int = 0) -> None:
        self.reasons = reasons

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, device: Any) -> int:
        device._obj.value = 7
        return 0 if uuid == b"GPU-1234" else NOT_FOUND

    def nvmlSystemGetDriverVersion(self, text: Any, length: ctypes.c_uint) -> int:
        text.value = b"580.1"
        return 0

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, device: Any, reasons: Any) -> int:
        reasons._obj.value = self.reasons
        return 0 if device.value == 7 else NOT_FOUND

    def nvmlDeviceGetMaxClockInfo(self, device: Any, kind: int, megahertz: Any) -> int:
        megahertz._obj.value = {2: 3201}[kind]
        return 0

    def nvmlDeviceGetMemoryBusWidth(self, device: Any, bits: Any) -> int:
        bits._obj.value = 6144
        return 0


def test_the_device_is_found_by_its_uuid_and_not_by_a_number() -> None:
    assert clocks_of("GPU-1234", PlayedLibrary()).driver == "580.1"
    with pytest.raises(ClocksUnknownError, match="nvmlDeviceGetHandleByUUID failed with NVML status 6"):
        clocks_of("GPU-5678", PlayedLibrary())


@pytest.mark.parametrize(
    ("reasons", "wanted"),
    [(0, False), (1, False), (2, False), (4, True), (8, True), (32, True), (64, True), (128, True), (65, True)],
)
def test_heat_and_power_throttle_and_idling_and_set_clocks_do_not(reasons: int, wanted: bool) -> None:
    assert clocks_of("GPU-1234", PlayedLibrary(reasons)).are_throttled() is wanted


def test_the_bandwidth_is_two_transfers_a_clock_over_the_bus() -> None:
    assert clocks_of("GPU-1234", PlayedLibrary()).memory_bytes_per_second() == pytest.approx(4.917e12, rel=1e-3)


def test_a_machine_without_the_library_is_told_in_words() -> None:
    with pytest.raises(ClocksUnknownError, match=r"libnvidia-ml.so.1 (cannot be loaded|has no)|nvmlInit_v2 failed"):
        clocks_of("GPU-1234")


def test_a_function_that_a_driver_lacks_is_told_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(PlayedLibrary, "nvmlDeviceGetMemoryBusWidth")
    with pytest.raises(ClocksUnknownError, match="has no nvmlDeviceGetMemoryBusWidth"):
        clocks_of("GPU-1234", PlayedLibrary()).memory_bytes_per_second()
