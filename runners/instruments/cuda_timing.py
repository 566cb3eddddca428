"""Raw samples of device time, by events on the current stream from a cold cache; and whether work escapes the stream.

What the device is and how it is asked is runners.instruments.cuda_device's matter, when to stop that of stopping.
"""

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

Body = Callable[[Inputs], object]


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
    """The samples of one phase: kept ones, and how many were dropped for throttled clocks, None if nobody tells."""

    kept: list[float] = field(default_factory=list)
    dropped: int | None = None

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

    With a `group` of several ranks each takes as many samples as rank 0 chooses. The caller has called the subject on
    these options.
    """
    bodies = _bodies(subject, how)
    sets = input_sets(inputs)
    with collector_off():
        taken = {phase: _sample(body, sets, timer, rule or StoppingRule(), group) for phase, body in bodies.items()}
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
    """Why not all of a step's work is done when the current stream is: the device works on elsewhere, unseen by events.

    Judged by the median of a few steps, after one that warms up.
    """
    step = _bodies(subject, how)["step"]
    mine = replace(inputs, logits=inputs.logits.detach().clone().requires_grad_())
    readings = [_call(step, [mine], 0, 1, timer) for _ in range(_ESCAPE_CALLS + 1)][1:]
    seconds, lag = (statistics.median(column) for column in zip(*readings, strict=True))
    if not is_escape(lag, seconds):
        return None
    return f"the device works on for {lag * 1e6:.0f} us after its current stream's {seconds * 1e6:.0f} us"


def _bodies(subject: Subject, how: Options) -> dict[str, Body]:
    def forward_only(inputs: Inputs) -> object:
        with torch.no_grad():
            return forward(subject, replace(inputs, logits=inputs.logits.detach()), how)

    def train_forward(inputs: Inputs) -> object:
        return forward(subject, inputs, how)

    def step(inputs: Inputs) -> object:
        return step_gradient(forward(subject, inputs, how), inputs, how)

    return {"forward": forward_only, "train_forward": train_forward, "step": step}


def _sample(
    body: Body, sets: Sequence[Inputs], timer: Timer, rule: StoppingRule, group: dist.ProcessGroup | None
) -> _Taken:
    for turn in range(len(sets)):
        _call(body, sets, turn, 1, timer)  # warm-up
    pilot, _ = _call(body, sets, 0, 1, timer)
    calls, count = calls_per_sample(pilot), None
    if group is not None and group.size() > 1:
        calls, count = agreed((calls, fixed_count(pilot * calls, rule)), group)
    taken = _Taken()
    started = timer.now()
    while not _is_done(taken, timer.now() - started, rule, count):
        seconds, _ = _call(body, sets, taken.total, calls, timer)
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


def _call(body: Body, sets: Sequence[Inputs], turn: int, calls: int, timer: Timer) -> tuple[float, float]:
    """One sample: device seconds a call, and seconds for which the device works on after the stream is done."""
    timer.wait_for_all()
    timer.evict()
    began = timer.mark()
    for call in range(calls):
        body(sets[(turn + call) % len(sets)])
    ended = timer.mark()
    timer.wait(ended)
    stream_done = timer.now()
    timer.wait_for_all()
    return timer.seconds_between(began, ended) / calls, timer.now() - stream_done


def agreed(numbers: tuple[int, int], group: dist.ProcessGroup) -> tuple[int, int]:
    """Rank 0's numbers on every rank: collectives hang where ranks call a kernel unequally often."""
    told: list[tuple[int, int]] = [numbers]
    dist.broadcast_object_list(told, group=group, group_src=0)
    return told[0]
