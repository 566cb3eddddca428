"""Memory: exact to the byte, the same in every repetition and process."""

import gc
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from runners.instruments.memory import MemoryReading, measure_memory, reading
from runners.instruments.subject import Options, Subject
from runners.kernels.inputs import Inputs

N, V = 8, 64
U = N * V * 4


class _KnownPattern(torch.autograd.Function):
    """Forward: 1000 bytes kept, 500 for a while, 4 N the output. Backward: 3000 bytes for a while, U the gradient."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(torch.empty(1000, dtype=torch.uint8))
        temporary = torch.empty(500, dtype=torch.uint8)
        del temporary
        return torch.empty(logits.shape[0])

    @staticmethod
    def backward(_ctx: Any, _upstream: torch.Tensor) -> torch.Tensor:
        temporary = torch.empty(3000, dtype=torch.uint8)
        gradient = torch.empty(N, V)
        del temporary
        return gradient


def _known_pattern(logits: torch.Tensor, targets: torch.Tensor, **keywords: Any) -> tuple[torch.Tensor, None]:
    return _KnownPattern.apply(logits), None


def test_a_known_allocation_pattern_is_read_to_the_byte(inputs: Inputs) -> None:
    assert measure_memory(Subject("known", _known_pattern), inputs, Options("off")) == MemoryReading(
        forward_peak_bytes=1500,
        step_peak_bytes=1000 + 4 * N + 3000 + U,
        saved_bytes=1000,
        largest_allocation_bytes=3000,
        allocations=5,
    )


def test_events_are_folded_in_order() -> None:
    assert reading([100, 50, -50], [30, 80, -100], output_bytes=40) == MemoryReading(
        forward_peak_bytes=150, step_peak_bytes=210, saved_bytes=60, largest_allocation_bytes=100, allocations=4
    )


def test_nothing_allocated_reads_as_zero() -> None:
    assert reading([], [], output_bytes=0) == MemoryReading(0, 0, 0, 0, 0)


def test_readings_repeat(clean: Subject, inputs: Inputs) -> None:
    measure_memory(clean, inputs, Options())
    assert measure_memory(clean, inputs, Options()) == measure_memory(clean, inputs, Options())


def test_another_process_reads_the_same(clean: Subject, inputs: Inputs) -> None:
    program = """
import torch
from runners.instruments.memory import measure_memory
from runners.instruments.subject import Options, Subject
from runners.kernels.inputs import make_inputs
from runners.kernels.registry import kernel
torch.set_num_threads(2)
inputs = make_inputs(tokens=8, vocabulary=64, distribution="flat")
subject = Subject("fused", kernel("fused").run)
measure_memory(subject, inputs, Options())
print(measure_memory(subject, inputs, Options()))
"""
    measure_memory(clean, inputs, Options())
    output = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=200
    ).stdout
    assert output.strip() == str(measure_memory(clean, inputs, Options()))


def test_one_more_buffer_kept_costs_exactly_one_unit(clean: Subject, inputs: Inputs) -> None:
    kept: list[torch.Tensor] = []

    def run(logits: torch.Tensor, targets: torch.Tensor, **keywords: Any) -> Any:
        kept[:] = [logits.detach().clone()]
        return clean.run(logits, targets, **keywords)

    before = measure_memory(clean, inputs, Options())
    after = measure_memory(Subject("keeps", run), inputs, Options())
    assert after.saved_bytes - before.saved_bytes == U
    assert after.forward_peak_bytes - before.forward_peak_bytes == U
    assert after.step_peak_bytes - before.step_peak_bytes == U
    assert after.allocations - before.allocations == 1


def test_the_rest_of_a_storage_that_an_output_views_is_saved(tampered: Any, clean: Subject, inputs: Inputs) -> None:
    def view_of_a_wide_buffer(result: Any) -> Any:
        wide = torch.empty(N, V).copy_(result[0][:, None].expand(N, V))
        return wide[:, 0], result[1]

    before = measure_memory(clean, inputs, Options("off"))
    after = measure_memory(tampered(outputs=view_of_a_wide_buffer), inputs, Options("off"))
    assert after.saved_bytes - before.saved_bytes == U - 4 * N


def test_entropy_as_a_value_saves_no_more_than_none(clean: Subject, inputs: Inputs) -> None:
    off, value = (measure_memory(clean, inputs, Options(mode)) for mode in ("off", "value"))
    assert off.saved_bytes == value.saved_bytes


def test_half_precision_logits_are_inputs_too(clean: Subject, inputs: Inputs) -> None:
    half = replace(inputs, logits=inputs.logits.bfloat16())
    assert measure_memory(clean, half, Options("off")).largest_allocation_bytes == U


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_left_as_it_was_even_after_an_error(enabled: bool, inputs: Inputs) -> None:
    def run(logits: torch.Tensor, targets: torch.Tensor, **keywords: Any) -> Any:
        assert not gc.isenabled()
        raise ValueError("no")

    was_enabled = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(ValueError, match="no"):
            measure_memory(Subject("raises", run), inputs, Options())
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()
