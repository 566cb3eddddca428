"""Exact bytes of one forward and backward on a CPU, rebuilt from the profiler's allocation events. Reads no clock.

torch.profiler reports every allocation of this thread and every release of a tensor allocated inside the region, to the
byte and in time order, so that the same kernel gives the same figures in every process.
"""

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from runners.instruments.profiler import FORWARD_ENDS, events, mark, single
from runners.instruments.subject import Options, Outputs, Step, Subject, collector_off, forward, fresh, step_gradient
from runners.kernels.inputs import Inputs


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """Bytes beyond the inputs (logits, targets, mask and upstream gradients), and a count of allocations.

    The outputs and the logits' gradient count towards the peaks. `saved_bytes` is all that is alive after the forward
    but the outputs' own elements, wherever the kernel keeps it: on its context, in a closure or in a global.
    """

    forward_peak_bytes: int
    step_peak_bytes: int
    saved_bytes: int
    largest_allocation_bytes: int
    allocations: int


def measure_memory(subject: Subject, inputs: Inputs, how: Options) -> MemoryReading:
    """The reading of one memory_pass."""
    return memory_pass(subject, inputs, how)[0]


def memory_pass(subject: Subject, inputs: Inputs, how: Options) -> tuple[MemoryReading, Step]:
    """One reading of forward + backward, and what was computed meanwhile. Raises OwnProfilerError.

    The subject has been called on these options before (warm-up). The gradient is held until the region ends, and no
    earlier gradient is there to be replaced or added to.
    """
    mine = fresh(inputs)
    with collector_off(), events(memory=True) as seen:
        outputs = forward(subject, mine, how)
        output_bytes = _own_bytes(outputs)
        mark(FORWARD_ENDS)
        gradient = step_gradient(outputs, mine, how)
    return reading(*_split(seen), output_bytes=output_bytes), Step(mine, outputs, gradient)


def reading(forward_sizes: list[int], backward_sizes: list[int], *, output_bytes: int) -> MemoryReading:
    """Folds allocation events (positive) and releases (negative), in bytes and in time order, into a reading."""
    sizes = forward_sizes + backward_sizes
    allocated = [size for size in sizes if size > 0]
    return MemoryReading(
        forward_peak_bytes=max(accumulate(forward_sizes, initial=0)),
        step_peak_bytes=max(accumulate(sizes, initial=0)),
        saved_bytes=max(0, sum(forward_sizes) - output_bytes),
        largest_allocation_bytes=max(allocated, default=0),
        allocations=len(allocated),
    )


def _split(seen: list[Any]) -> tuple[list[int], list[int]]:
    """Allocation sizes of the forward and of the backward, each in time order."""
    boundary = single(seen, FORWARD_ENDS).start_ns()
    sizes = [(event.start_ns(), event.nbytes()) for event in seen if event.name() == "[memory]"]
    sizes.sort(key=lambda pair: pair[0])
    return [size for at, size in sizes if at < boundary], [size for at, size in sizes if at >= boundary]


def _own_bytes(outputs: Outputs) -> int:
    """Bytes of the outputs' elements; the rest of a larger storage that an output is a view of is saved memory."""
    tensors = [outputs.log_prob] if outputs.entropy is None else [outputs.log_prob, outputs.entropy]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
