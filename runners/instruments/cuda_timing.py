"""Raw samples of device time, by events on the current stream from a cold cache; and whether work escapes the stream.

What the device is and how it is asked is runners.instruments.cuda_device's matter, when to stop that of stopping.
"""

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist

from runners.instruments.cuda_inputs import input_sets
from runners.instruments.stopping import (
    StoppingRule,
    calls_per_sample,
    fixed_count,
    is_enough,
    is_escape,
    least_traffic_bytes,
    roofline_fault,
    throttling_fault,
)
from runners.instruments.subject import Options, Subject, collector_off, forward, step_gradient
from runners.kernels.inputs import Inputs

CUDA_TIMING_CONTRACT = "events-cold-l2-3-sets/1"
# Passes over the logits or their gradient: a backward reads them once more and writes their gradient.
_PASSES = {"forward": 1, "step": 3}
_ESCAPE_CALLS = 5

# Results of equal calls differ by reordered sums at most: by less than a bfloat16's rounding.
_ALIKE = 2.0**-8

Body = Callable[[Inputs], torch.Tensor | None]


class Timer(Protocol):
    """A device that times its current stream. `memory_bytes_per_second` is None where it is not known."""

    @property
    def cache_bytes(self) -> int: ...
    @property
    def memory_bytes_per_second(self) -> float | None: ...

    def evict(self) -> None:
        """Ask the stream to empty the cache of what a kernel may find there."""

    def mark(self) -> Any:
        """A mark in the current stream."""

    def wait(self, mark: Any) -> None:
        """Wait until the stream has come to a mark."""

    def wait_for_all(self) -> None:
        """Wait until the whole device has nothing left to do, on any stream."""

    def seconds_between(self, one: Any, other: Any) -> float:
        """Device time between two marks that have been waited for."""

    def now(self) -> float:
        """The host's clock."""

    def is_throttled(self) -> bool | None:
        """Whether its clocks are held back now, None where it does not tell."""


@dataclass(frozen=True, slots=True)
class DeviceTimes:
    """Samples by metric; where `fault` says why they are invalid, only what bears it out."""

    samples: dict[str, list[float]]
    fault: str | None = None


@dataclass(slots=True)
class _Taken:
    """The samples of one phase: kept ones, and how many were dropped for throttled clocks, None if nobody tells.

    `witness` is one of them, drawn at random: its last call's input set and what that call gave.
    """

    kept: list[float] = field(default_factory=list)
    dropped: int | None = None
    witness: tuple[int, torch.Tensor | None] = (0, None)

    @property
    def total(self) -> int:
        return len(self.kept) + (self.dropped or 0)


def measure_device_time(
    subject: Subject,
    inputs: Inputs,
    how: Options,
    timer: Timer,
    *,
    rule: StoppingRule | None = None,
    group: dist.ProcessGroup | None = None,
) -> DeviceTimes:
    """Forward without graph, forward with graph, forward + backward; each call with a fresh graph, inputs in turns.

    With a `group` of several ranks each takes as many samples as rank 0 chooses. What a timed call of each phase, drawn
    at random, gave is held against a call that nobody times, and the inputs against what they were. The caller has
    called the subject on these options.
    """
    bodies = _bodies(subject, how)
    sets = input_sets(inputs)
    sums = [_checksum(one) for one in sets]
    with collector_off():
        taken = {phase: _sample(body, sets, timer, rule or StoppingRule(), group) for phase, body in bodies.items()}
    if [_checksum(one) for one in sets] != sums:
        return DeviceTimes({}, "the inputs are not what they were before the timed calls")
    for phase, body in bodies.items():
        turn, given = taken[phase].witness
        if not _alike(given, body(sets[turn])):
            return DeviceTimes({}, f"a timed call of {phase} does not give what a call that nobody times gives")
    return believed(taken, inputs.logits.nbytes, timer)


def believed(taken: dict[str, _Taken], logits_bytes: int, timer: Timer) -> DeviceTimes:
    """The samples as metrics, or why they are invalid."""
    facts: dict[str, list[float]] = {}
    faults: list[str | None] = []
    told = [phase for phase in taken.values() if phase.dropped is not None]
    if told:
        dropped, total = sum(phase.dropped or 0 for phase in told), sum(phase.total for phase in told)
        facts["throttled_share"] = [dropped / total]
        faults.append(throttling_fault(dropped, total))
    if timer.memory_bytes_per_second is not None:
        for name, passes in _PASSES.items():
            if not taken[name].kept:
                continue
            least = least_traffic_bytes(logits_bytes, passes, timer.cache_bytes) / timer.memory_bytes_per_second
            share = least / statistics.median(taken[name].kept)
            facts[f"{name}_roofline_share"] = [share]
            faults.append(roofline_fault(share))
    if fault := next(filter(None, faults), None):
        return DeviceTimes(facts, fault)
    return DeviceTimes(facts | {f"{name}_device_seconds": phase.kept for name, phase in taken.items()})


def escape_fault(subject: Subject, inputs: Inputs, how: Options, timer: Timer) -> str | None:
    """Why not all work is done when the current stream is: the device works on elsewhere, unseen by events.

    Looked for in the forward alone too: after a backward autograd makes the current stream wait for others. Judged by
    the median of a few calls, after one that warms up.
    """
    bodies = _bodies(subject, how)
    mine = replace(inputs, logits=inputs.logits.detach().clone().requires_grad_())
    for phase in ("forward", "step"):
        readings = [_call(bodies[phase], [mine], 0, 1, timer)[:2] for _ in range(_ESCAPE_CALLS + 1)][1:]
        seconds, lag = (statistics.median(column) for column in zip(*readings, strict=True))
        if is_escape(lag, seconds):
            return f"{phase}: the device works on for {lag * 1e6:.0f} us after its stream's {seconds * 1e6:.0f} us"
    return None


def _bodies(subject: Subject, how: Options) -> dict[str, Body]:
    def forward_only(inputs: Inputs) -> torch.Tensor:
        with torch.no_grad():
            return forward(subject, replace(inputs, logits=inputs.logits.detach()), how).log_prob

    def train_forward(inputs: Inputs) -> torch.Tensor:
        return forward(subject, inputs, how).log_prob

    def step(inputs: Inputs) -> torch.Tensor | None:
        return step_gradient(forward(subject, inputs, how), inputs, how)

    return {"forward": forward_only, "train_forward": train_forward, "step": step}


def _sample(
    body: Body, sets: Sequence[Inputs], timer: Timer, rule: StoppingRule, group: dist.ProcessGroup | None
) -> _Taken:
    for turn in range(len(sets)):
        _call(body, sets, turn, 1, timer)  # warm-up
    pilot, *_ = _call(body, sets, 0, 1, timer)
    calls, count = calls_per_sample(pilot), None
    if group is not None and group.size() > 1:
        calls, count = agreed((calls, fixed_count(pilot * calls, rule)), group)
    taken = _Taken()
    started = timer.now()
    while not _is_done(taken, timer.now() - started, rule, count):
        turn = taken.total
        seconds, _, given = _call(body, sets, turn, calls, timer)
        if random.random() * (turn + 1) < 1:  # each sample is the witness with the same chance  # noqa: S311
            taken.witness = (turn + calls - 1) % len(sets), None if given is None else given.detach().clone()
        throttled = timer.is_throttled()
        if throttled is not None:
            taken.dropped = (taken.dropped or 0) + throttled
        if not throttled:
            taken.kept.append(seconds)
    return taken


def _is_done(taken: _Taken, elapsed: float, rule: StoppingRule, count: int | None) -> bool:
    if count is not None:
        return taken.total >= count
    return taken.total > 0 and (is_enough(taken.kept, elapsed, rule) or taken.total >= rule.most)


def _call(
    body: Body, sets: Sequence[Inputs], turn: int, calls: int, timer: Timer
) -> tuple[float, float, torch.Tensor | None]:
    """One sample: device seconds a call, seconds for which the device works on after the stream is done, and what the
    last call gave.
    """
    timer.wait_for_all()
    timer.evict()
    began = timer.mark()
    given = None
    for call in range(calls):
        given = None  # gone before the next is made
        given = body(sets[(turn + call) % len(sets)])
    ended = timer.mark()
    timer.wait(ended)
    stream_done = timer.now()
    timer.wait_for_all()
    return timer.seconds_between(began, ended) / calls, timer.now() - stream_done, given


def _checksum(inputs: Inputs) -> tuple[int, ...]:
    """The sum of the bits of each of a kernel's inputs, as 64-bit integers that wrap around."""
    words = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
    tensors = [tensor for tensor in (inputs.logits.detach(), inputs.targets, inputs.keep_mask) if tensor is not None]
    return tuple(int(tensor.view(words[tensor.element_size()]).sum(dtype=torch.int64)) for tensor in tensors)


def _alike(timed: torch.Tensor | None, plain: torch.Tensor | None) -> bool:
    """Whether two results differ by rounding at most, row by row; a row counts as at least a thousandth of the
    greatest.
    """
    if timed is None or plain is None:
        return timed is plain
    one, other = (each.detach().reshape(max(1, len(each)), -1) for each in (timed, plain))
    change, size = (one - other).float().norm(dim=1), other.float().norm(dim=1)
    greatest = torch.where(size.isfinite(), size, 0.0).max()
    same = (one == other).all(1)  # infinities too
    return bool((same | (change <= _ALIKE * size.maximum(1e-3 * greatest))).all())


def agreed(numbers: tuple[int, int], group: dist.ProcessGroup) -> tuple[int, int]:
    """Rank 0's numbers on every rank: collectives hang where ranks call a kernel unequally often."""
    told: list[tuple[int, int]] = [numbers]
    dist.broadcast_object_list(told, group=group, group_src=0)
    return told[0]
