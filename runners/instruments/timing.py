"""Raw time samples of forward and backward, as process CPU time and as wall time. Averages and judges nothing.

On a CPU they are informational: a small shared machine is too noisy to decide by. They are taken interleaved, over
rotating input sets, with a fresh graph in each repetition.
"""

import time
from dataclasses import dataclass, replace

import torch

from runners.instruments.subject import Options, Subject, collector_off, forward, fresh, step_gradient
from runners.kernels.inputs import Inputs

TIMING_CONTRACT = "interleaved-3-sets/1"
_INPUT_SETS = 3


@dataclass(frozen=True, slots=True)
class _Clocks:
    cpu: float
    wall: float


def measure_time(subject: Subject, inputs: Inputs, how: Options, *, repetitions: int) -> dict[str, list[float]]:
    """Seconds, one sample a repetition, by metric: forward without graph, forward with graph, forward + backward.

    The backward's time is step minus train forward. The caller has called the subject on these options (warm-up).
    """
    samples: dict[str, list[float]] = {}
    sets = _rotated(inputs)
    with collector_off():
        for repetition in range(repetitions):
            mine = sets[repetition % _INPUT_SETS]
            started = _now()
            with torch.no_grad():
                forward(subject, replace(mine, logits=mine.logits.detach()), how)
            _record(samples, "forward", started, _now())
            started = _now()
            outputs = forward(subject, mine, how)
            _record(samples, "train_forward", started, _now())
            step_gradient(outputs, mine, how)
            _record(samples, "step", started, _now())
            del outputs
    return samples


def _rotated(inputs: Inputs) -> list[Inputs]:
    """Input sets that differ in every row and lie apart in memory: rows and vocabulary shifted cyclically."""
    vocabulary = inputs.logits.shape[1]
    return [
        fresh(
            Inputs(
                logits=inputs.logits.roll((shift, shift), (0, 1)),
                targets=(inputs.targets.roll(shift) + shift) % vocabulary,
                keep_mask=None if inputs.keep_mask is None else inputs.keep_mask.roll((shift, shift), (0, 1)),
                upstream_log_prob=inputs.upstream_log_prob.roll(shift),
                upstream_entropy=inputs.upstream_entropy.roll(shift),
            )
        )
        for shift in range(_INPUT_SETS)
    ]


def _now() -> _Clocks:
    return _Clocks(cpu=time.process_time(), wall=time.perf_counter())


def _record(samples: dict[str, list[float]], phase: str, started: _Clocks, ended: _Clocks) -> None:
    samples.setdefault(f"{phase}_cpu_seconds", []).append(ended.cpu - started.cpu)
    samples.setdefault(f"{phase}_wall_seconds", []).append(ended.wall - started.wall)
