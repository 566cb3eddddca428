"""The allocator's books, kept by an allocator that is played here: what is read off them, and when."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from runners.instruments.cuda_memory import CudaMemoryReading, measure_cuda_memory
from runners.instruments.subject import Options, Subject
from runners.kernels.inputs import Inputs

N, V = 8, 64
U = N * V * 4
BLOCK = 512
SEGMENT = 1 << 21
DEVICE = torch.device("cpu")


class PlayedAllocator:
    """Books like torch's: bytes asked for, blocks of 512 bytes, segments of 2 MiB that are kept until given back."""

    def __init__(self) -> None:
        self.requested = self.blocks = self.reserved = 0
        self.peaks = dict.fromkeys(("requested", "blocks", "reserved"), 0)
        self.count = self.retries = 0
        self.trace: list[tuple[str, int]] | None = None
        self.recorded: list[Any] = []

    def allocate(self, size: int) -> None:
        self.requested += size
        self.blocks += -(-size // BLOCK) * BLOCK
        self.reserved = max(self.reserved, -(-self.blocks // SEGMENT) * SEGMENT)
        self.count += 1
        self._book("alloc", size)

    def release(self, size: int) -> None:
        self.requested -= size
        self.blocks -= -(-size // BLOCK) * BLOCK
        self._book("free_completed", size)

    def _book(self, action: str, size: int) -> None:
        for name, peak in self.peaks.items():
            self.peaks[name] = max(peak, getattr(self, name))
        if self.trace is not None:
            self.trace.append((action, size))

    @contextmanager
    def for_a_while(self, size: int) -> Iterator[None]:
        self.allocate(size)
        yield
        self.release(size)

    # What torch.cuda offers of it.

    def memory_stats(self, device: torch.device) -> dict[str, int]:
        keys = {"requested": "requested_bytes", "blocks": "allocated_bytes", "reserved": "reserved_bytes"}
        current = {f"{key}.all.current": getattr(self, name) for name, key in keys.items()}
        peaks = {f"{key}.all.peak": self.peaks[name] for name, key in keys.items()}
        return current | peaks | {"allocation.all.allocated": self.count, "num_alloc_retries": self.retries}

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        self.peaks = {name: getattr(self, name) for name in self.peaks}

    def empty_cache(self) -> None:
        self.reserved = -(-self.blocks // SEGMENT) * SEGMENT

    def record(self, enabled: Any = "all", *, device: torch.device, **options: Any) -> None:
        self.trace = [] if enabled else None
        self.recorded.append(enabled)

    def snapshot(self, device: torch.device) -> dict[str, Any]:
        assert self.trace is not None
        return {"device_traces": [[{"action": action, "size": size} for action, size in self.trace]]}


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> PlayedAllocator:
    played = PlayedAllocator()
    played.allocate(10_000)  # what others hold
    with played.for_a_while(3 * SEGMENT):  # and what they held once
        pass
    for name in ("memory_stats", "reset_peak_memory_stats", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, getattr(played, name))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", played.record)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", played.snapshot)
    return played


class _KnownPattern(torch.autograd.Function):
    """Forward: 1000 bytes kept, 500 for a while, 4 N the output. Backward: 3000 bytes for a while, U the gradient."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, allocator: PlayedAllocator) -> torch.Tensor:
        ctx.allocator = allocator
        allocator.allocate(1000)
        with allocator.for_a_while(500):
            pass
        allocator.allocate(4 * N)
        return torch.empty(logits.shape[0])

    @staticmethod
    def backward(ctx: Any, _upstream: torch.Tensor) -> tuple[torch.Tensor, None]:
        with ctx.allocator.for_a_while(3000):
            ctx.allocator.allocate(U)
        return torch.empty(N, V), None


def _known(allocator: PlayedAllocator) -> Subject:
    return Subject("known", lambda logits, targets, **keywords: (_KnownPattern.apply(logits, allocator), None))


def test_a_known_allocation_pattern_is_read_to_the_byte(allocator: PlayedAllocator, inputs: Inputs) -> None:
    assert measure_cuda_memory(_known(allocator), inputs, Options("off")) == CudaMemoryReading(
        forward_peak_bytes=1500,
        step_peak_bytes=1000 + 4 * N + 3000 + U,
        saved_bytes=1000,
        largest_allocation_bytes=3000,
        allocations=5,
        allocated_peak_bytes=1024 + 512 + 3072 + U,
        reserved_peak_bytes=0,  # the segment that others hold a part of has room for it
        allocation_retries=0,
    )
    assert allocator.recorded == ["all", None]


def test_what_the_allocator_takes_from_the_device_counts_beyond_an_emptied_cache(
    allocator: PlayedAllocator, inputs: Inputs
) -> None:
    def run(logits: torch.Tensor, targets: torch.Tensor, **keywords: Any) -> Any:
        with allocator.for_a_while(2 * SEGMENT):
            return logits.sum(1), None

    reading = measure_cuda_memory(Subject("wide", run), inputs, Options("off"))
    assert reading.reserved_peak_bytes == 2 * SEGMENT


def test_retries_within_the_region_are_counted_and_no_others(allocator: PlayedAllocator, inputs: Inputs) -> None:
    allocator.retries = 3

    def run(logits: torch.Tensor, targets: torch.Tensor, **keywords: Any) -> Any:
        allocator.retries += 2
        return logits.sum(1), None

    assert measure_cuda_memory(Subject("tight", run), inputs, Options("off")).allocation_retries == 2


def test_the_history_is_closed_even_after_an_error(allocator: PlayedAllocator, inputs: Inputs) -> None:
    def run(logits: torch.Tensor, targets: torch.Tensor, **keywords: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        measure_cuda_memory(Subject("greedy", run), inputs, Options())
    assert allocator.recorded == ["all", None]
