"""A CUDA device as torch and NVIDIA's library describe it, both played here; its memory is the CPU's."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from runners.instruments import cuda_device
from runners.instruments.cuda_device import CudaTimer, device_facts
from runners.instruments.nvml import ClocksUnknownError

DEVICE = torch.device("cpu")
PROPERTIES = {
    "name": "NVIDIA H200",
    "major": 9,
    "minor": 0,
    "multi_processor_count": 132,
    "total_memory": 150 << 30,
    "L2_cache_size": 60 << 20,
}


class PlayedClocks:
    driver = "580.1"

    def are_throttled(self) -> bool:
        return True

    def memory_bytes_per_second(self) -> float:
        return 4.8e12


def _played(monkeypatch: pytest.MonkeyPatch, uuid: str, clocks: Any = None) -> list[str]:
    """Play a device; the UUIDs that clocks were asked for."""
    asked: list[str] = []

    def clocks_of(wanted: str) -> Any:
        asked.append(wanted)
        if clocks is None:
            raise ClocksUnknownError("no library")
        return clocks

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid=uuid, **PROPERTIES))
    monkeypatch.setattr(cuda_device, "clocks_of", clocks_of)
    return asked


@pytest.mark.parametrize("uuid", ["1234-56", "GPU-1234-56"])
def test_a_timer_knows_its_cache_its_bandwidth_and_its_clocks(uuid: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = _played(monkeypatch, uuid, PlayedClocks())
    timer = CudaTimer.of(DEVICE)
    assert set(asked) == {"GPU-1234-56"}
    assert (timer.cache_bytes, timer.memory_bytes_per_second, timer.doubts) == (60 << 20, 4.8e12, {})
    assert timer.is_throttled() is True
    assert timer._evicting.nbytes == 120 << 20


def test_clocks_that_cannot_be_read_are_a_doubt_and_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    _played(monkeypatch, "1234")
    timer = CudaTimer.of(DEVICE)
    assert timer.doubts == {"clocks": "not watched: no library"}
    assert timer.is_throttled() is None
    assert timer.memory_bytes_per_second is None


def test_clocks_that_tell_only_a_part_are_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent(PlayedClocks):
        def are_throttled(self) -> bool:
            raise ClocksUnknownError("not supported")

    _played(monkeypatch, "1234", Silent())
    assert CudaTimer.of(DEVICE).is_throttled() is None


def test_a_device_is_told_by_what_identifies_it(monkeypatch: pytest.MonkeyPatch) -> None:
    _played(monkeypatch, "1234", PlayedClocks())
    facts = device_facts(DEVICE)
    assert (facts["device"], facts["capability"], facts["driver"]) == ("NVIDIA H200", "9.0", "580.1")
    _played(monkeypatch, "1234")
    assert (device_facts(DEVICE)["driver"], device_facts(DEVICE)["driver_unknown"]) == (None, "no library")
