"""Counts what one forward and backward dispatches: operations, the bytes they move, collectives. Reads no clock.

The figures are exact and the same on every machine: they see a per-row loop or an extra pass where a clock on a shared
CPU sees noise. They say nothing of caches or fusion below the dispatcher.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from runners.instruments.profiler import BEGINS, events, single
from runners.instruments.subject import Options, Step, Subject, forward, fresh, step_gradient
from runners.kernels.inputs import Inputs

_COLLECTIVE_NAMESPACES = frozenset({"c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd"})
_NOT_A_COLLECTIVE = frozenset({"wait_tensor", "barrier", "monitored_barrier_"})
# Nothing runs on the device for these: views, whose schema does not say so, and memory without content.
_FREE = frozenset(
    {
        "_reshape_alias", "_unsafe_view", "alias", "detach_", "empty", "empty_like", "empty_permuted", "empty_strided",
        "lift_fresh", "new_empty", "new_empty_strided", "resize_", "squeeze_", "t_", "transpose_", "unsqueeze_",
    }
)  # fmt: skip
# These read of their first argument only what they return, ...
_READ_PART = frozenset({"embedding", "gather", "index", "index_select", "take", "_unsafe_index"})
# ... and these write into their first argument only as much as they are given.
_WRITE_PART = frozenset(
    {
        "index_add_", "index_fill_", "index_put_", "_index_put_impl_", "scatter_", "scatter_add_", "scatter_reduce_",
    }
)  # fmt: skip
# These do not read what they overwrite.
_WRITE_ONLY = frozenset({"copy_", "fill_", "zero_"})


@dataclass(frozen=True, slots=True)
class WorkReading:
    """Counts of dispatched operations and collectives, the bytes that the operations read and write, and those of the
    tensors that the collectives are given."""

    operations: int
    traffic_bytes: int
    collectives: int
    collective_bytes: int


def measure_work(subject: Subject, inputs: Inputs, how: Options) -> WorkReading:
    """The reading of one work_pass."""
    return work_pass(subject, inputs, how).reading


@dataclass(frozen=True, slots=True)
class WorkPass:
    """A reading, what was computed meanwhile, the collectives with their bytes in order, and how many operations ran on
    threads other than the caller's: those are in no reading.
    """

    reading: WorkReading
    step: Step
    collectives: list[tuple[str, int]]
    operations_elsewhere: int


def work_pass(subject: Subject, inputs: Inputs, how: Options) -> WorkPass:
    """Counts one forward + backward of the subject. Raises OwnProfilerError."""
    mine = fresh(inputs)
    counter = WorkCounter()
    with events(memory=False) as seen, counter:
        outputs = forward(subject, mine, how)
        gradient = step_gradient(outputs, mine, how)
    step = Step(mine, outputs, gradient)
    return WorkPass(counter.reading(), step, counter.collectives, _operations_elsewhere(seen))


def _operations_elsewhere(seen: list[Any]) -> int:
    own = single(seen, BEGINS).start_thread_id()
    return sum(event.name().startswith("aten::") and event.start_thread_id() != own for event in seen)


class WorkCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts every ATen operation dispatched inside the `with`, in the forward as in the backward.

    Views and uninitialised allocations are no operations: they launch nothing and move no byte. An operation moves the
    distinct bytes of its tensor arguments and results; one that writes in place reads and writes that argument, one
    with an `out=` argument or a fill only writes it. Gathers and scatters move the elements they touch. Collectives
    are counted apart: `collectives` has their names and bytes in order.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operations = 0
        self._traffic_bytes = 0
        self.collectives: list[tuple[str, int]] = []

    def reading(self) -> WorkReading:
        """What has been counted so far."""
        collective_bytes = sum(size for _, size in self.collectives)
        return WorkReading(self._operations, self._traffic_bytes, len(self.collectives), collective_bytes)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        keywords = kwargs or {}
        result = func(*args, **keywords)
        name = func.overloadpacket.__name__
        if func.namespace in _COLLECTIVE_NAMESPACES:
            if name not in _NOT_A_COLLECTIVE:
                given = _distinct([*args, *keywords.values()])
                self.collectives.append((name, sum(map(_bytes, given.values()))))
        elif not (func.is_view or name in _FREE):
            self._operations += 1
            self._traffic_bytes += _moved_bytes(func, name, args, keywords, result)
        return result


def _moved_bytes(func: Any, name: str, args: tuple[Any, ...], keywords: dict[str, Any], result: Any) -> int:
    """Bytes read and written by one operation."""
    parameters = func._schema.arguments
    given = dict(zip((parameter.name for parameter in parameters), args, strict=False)) | keywords
    written = _distinct(
        given.get(parameter.name)
        for parameter in parameters
        if parameter.alias_info is not None and parameter.alias_info.is_write
    )
    read = _distinct(given.values())
    made = {key: tensor for key, tensor in _distinct([result]).items() if key not in written}
    if name in _READ_PART or name in _WRITE_PART:
        whole, *others = read.values()
        touched = [*others, *made.values()] if name in _READ_PART else others
        elements = max((tensor.numel() for tensor in touched), default=0)
        return sum(map(_bytes, others)) + 2 * elements * whole.element_size()
    if name in _WRITE_ONLY or any(parameter.is_out for parameter in parameters):
        read = {key: tensor for key, tensor in read.items() if key not in written}
    return sum(_bytes(tensor) for tensors in (read, written, made) for tensor in tensors.values())


def _distinct(values: Iterable[Any]) -> dict[int, torch.Tensor]:
    """The tensors among `values` and the lists in them, each once."""
    found: dict[int, torch.Tensor] = {}
    for value in values:
        if isinstance(value, torch.Tensor):
            found[id(value)] = value
        elif isinstance(value, list | tuple):
            found |= _distinct(value)
    return found


def _bytes(tensor: torch.Tensor) -> int:
    """Bytes of the elements; an expanded tensor has no more than its storage."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
