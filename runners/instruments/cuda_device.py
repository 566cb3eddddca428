"""A CUDA device as the instruments use it: its cache, its clocks, marks in its streams, and what identifies it."""

import time
from dataclasses import dataclass, field

import torch
from pydantic import JsonValue

from runners.instruments.nvml import Clocks, ClocksUnknownError, clocks_of

# A cache is not emptied by writing its size once: what replaces what is the hardware's choice.
_EVICTING_SIZES = 2


@dataclass(frozen=True, slots=True)
class CudaTimer:
    """Times the current stream of the current device: a cuda_timing.Timer. `doubts` says what it cannot tell."""

    device: torch.device
    cache_bytes: int
    memory_bytes_per_second: float | None
    clocks: Clocks | None
    doubts: dict[str, str] = field(default_factory=dict)
    _evicting: torch.Tensor = field(default_factory=lambda: torch.empty(0))

    @classmethod
    def of(cls, device: torch.device) -> "CudaTimer":
        """The timer of a device."""
        properties = torch.cuda.get_device_properties(device)
        clocks, bandwidth, doubts = None, None, {}
        try:
            found = _clocks(device)
            found.are_throttled()
            clocks, bandwidth = found, found.memory_bytes_per_second()
        except ClocksUnknownError as error:
            doubts["clocks"] = f"not watched: {error}"
        cache_bytes = properties.L2_cache_size
        evicting = torch.empty(_EVICTING_SIZES * cache_bytes, dtype=torch.uint8, device=device)
        return cls(device, cache_bytes, bandwidth, clocks, doubts, evicting)

    def evict(self) -> None:
        self._evicting.zero_()

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def wait(self, mark: torch.cuda.Event) -> None:
        mark.synchronize()

    def wait_for_all(self) -> None:
        torch.cuda.synchronize(self.device)

    def seconds_between(self, one: torch.cuda.Event, other: torch.cuda.Event) -> float:
        return float(one.elapsed_time(other)) / 1e3

    def now(self) -> float:
        return time.perf_counter()

    def is_throttled(self) -> bool | None:
        return None if self.clocks is None else self.clocks.are_throttled()


def device_facts(device: torch.device) -> dict[str, JsonValue]:
    """What identifies a device and what drives it; `driver` is None, with the reason, where it is not told."""
    properties = torch.cuda.get_device_properties(device)
    facts: dict[str, JsonValue] = {
        "device": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "cache_bytes": properties.L2_cache_size,
        "cuda": torch.version.cuda,
    }
    try:
        facts["driver"] = _clocks(device).driver
    except ClocksUnknownError as error:
        facts["driver"] = None
        facts["driver_unknown"] = str(error)
    return facts


def _clocks(device: torch.device) -> Clocks:
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return clocks_of(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
