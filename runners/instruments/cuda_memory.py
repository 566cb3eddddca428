"""Exact bytes of one forward and backward on a CUDA device, by the caching allocator's own books. Reads no clock.

The books are kept on the host as memory is asked for and given back, whatever the device is doing, so that equal calls
give equal figures. Bytes are those asked for; what the allocator makes of them is told beside them.
"""

import gc
from dataclasses import dataclass

import torch

from runners.instruments.subject import Options, Outputs, Subject, collector_off, forward, fresh, step_gradient
from runners.kernels.inputs import Inputs

# More events than any kernel's step has: a chunked one has some dozens a chunk.
_EVENTS = 1_000_000


@dataclass(frozen=True, slots=True)
class CudaMemoryReading:
    """Bytes beyond the inputs, as memory.MemoryReading has them, and three figures of the allocator.

    `allocated_peak_bytes` counts its rounded blocks, `reserved_peak_bytes` what it took from the device beyond what
    it held before, with an emptied cache; `allocation_retries` how often it had to give its cache back first.
    """

    forward_peak_bytes: int
    step_peak_bytes: int
    saved_bytes: int
    largest_allocation_bytes: int
    allocations: int
    allocated_peak_bytes: int
    reserved_peak_bytes: int
    allocation_retries: int


def measure_cuda_memory(subject: Subject, inputs: Inputs, how: Options) -> CudaMemoryReading:
    """One reading of forward + backward; the subject has been called on these options before (warm-up).

    The gradient is held until the region ends, and no earlier gradient is there to be replaced or added to.
    """
    device = inputs.logits.device
    mine = fresh(inputs)
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    torch.cuda.memory._record_memory_history(context=None, max_entries=_EVENTS, device=device, clear_history=True)
    try:
        with collector_off():
            before = torch.cuda.memory_stats(device)
            outputs = forward(subject, mine, how)
            middle = torch.cuda.memory_stats(device)
            output_bytes = _own_bytes(outputs)
            held = step_gradient(outputs, mine, how)
            after = torch.cuda.memory_stats(device)
            sizes = _allocated_sizes(device)
        del held
    finally:
        torch.cuda.memory._record_memory_history(enabled=None, device=device)
    return reading(before, middle, after, sizes, output_bytes=output_bytes)


def reading(
    before: dict[str, int], middle: dict[str, int], after: dict[str, int], sizes: list[int], *, output_bytes: int
) -> CudaMemoryReading:
    """Statistics before the forward, after it and after the backward, with the peaks counted since before; `sizes` in
    bytes of every allocation.
    """
    current = before["requested_bytes.all.current"]
    return CudaMemoryReading(
        forward_peak_bytes=middle["requested_bytes.all.peak"] - current,
        step_peak_bytes=after["requested_bytes.all.peak"] - current,
        saved_bytes=max(0, middle["requested_bytes.all.current"] - current - output_bytes),
        largest_allocation_bytes=max(sizes, default=0),
        allocations=after["allocation.all.allocated"] - before["allocation.all.allocated"],
        allocated_peak_bytes=after["allocated_bytes.all.peak"] - before["allocated_bytes.all.current"],
        reserved_peak_bytes=after["reserved_bytes.all.peak"] - before["reserved_bytes.all.current"],
        allocation_retries=after["num_alloc_retries"] - before["num_alloc_retries"],
    )


def _allocated_sizes(device: torch.device) -> list[int]:
    """Bytes asked for of every allocation since the history was cleared."""
    traces = torch.cuda.memory._snapshot(device)["device_traces"]
    index = torch.cuda.current_device() if device.index is None else device.index
    return [int(event["size"]) for event in traces[index] if event["action"] == "alloc"]


def _own_bytes(outputs: Outputs) -> int:
    """Bytes of the outputs' elements; the rest of a larger storage that an output is a view of is saved memory."""
    tensors = [outputs.log_prob] if outputs.entropy is None else [outputs.log_prob, outputs.entropy]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
