"""Raw time samples on a CPU: process CPU time, wall time, and the ratio to `legacy`. Averages and judges nothing.

A small shared machine is too noisy to decide by time. Samples are taken interleaved, on inputs that the kernel has not
seen, with a fresh graph in each repetition; the ratio's two times lie side by side. For a CUDA device: cuda_timing.
"""

import sys
import time
from dataclasses import dataclass, replace

import torch

from runners.instruments.subject import Options, Subject, collector_off, forward, fresh, step_gradient
from runners.instruments.unseen import unseen
from runners.kernels.inputs import Inputs
from runners.kernels.registry import kernel

TIMING_CONTRACT = "interleaved-unseen/1"
_LEGACY = "legacy"


@dataclass(frozen=True, slots=True)
class _Clocks:
    cpu: float
    wall: float


def measure_time(
    subject: Subject, inputs: Inputs, how: Options, *, repetitions: int, draw: str = ""
) -> dict[str, list[float]]:
    """Samples by metric, one a repetition: seconds of forward without graph, forward with graph, forward + backward,
    and the last's CPU time over that of the built-in kernel `legacy` on the same inputs in the same repetition.

    The backward's time is step minus train forward. Every call has inputs of its own, made from `inputs` and the words
    `draw`. The caller has called the subject on these options (warm-up).
    """
    samples: dict[str, list[float]] = {}
    legacy = Subject(_LEGACY, kernel(_LEGACY).run, group=subject.group)
    with collector_off():
        _step(legacy, fresh(inputs), how, {})  # warm-up
        for repetition in range(repetitions):
            mine = unseen(inputs, f"{draw} forward {repetition}")
            started = _now()
            with torch.no_grad():
                forward(subject, mine, how)
            _record(samples, "forward", started, _now())
            mine = unseen(inputs, f"{draw} step {repetition}")
            mine = replace(mine, logits=mine.logits.requires_grad_())
            if repetition % 2:  # whoever comes second finds a warmer cache
                control_seconds, own_seconds = _step(legacy, mine, how, {}), _step(subject, mine, how, samples)
            else:
                own_seconds, control_seconds = _step(subject, mine, how, samples), _step(legacy, mine, how, {})
            samples.setdefault("step_ratio_to_legacy", []).append(own_seconds / control_seconds)
    return samples


def first_call_seconds(subject: Subject, inputs: Inputs, how: Options) -> float:
    """Wall time of one forward + backward, to the end of its device's work. Called before any other on these inputs it
    holds what the kernel compiles, tunes and allocates once.
    """
    mine = fresh(inputs)
    started = time.perf_counter()
    step_gradient(forward(subject, mine, how), mine, how)
    if mine.logits.is_cuda:
        torch.cuda.synchronize(mine.logits.device)
    return time.perf_counter() - started


def compilations() -> int:
    """How many graphs torch.compile has made in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")  # not there where nothing was compiled, and slow to import
    return 0 if dynamo is None else int(dynamo.counters["stats"]["unique_graphs"])


def _step(subject: Subject, inputs: Inputs, how: Options, samples: dict[str, list[float]]) -> float:
    """Samples of one forward with graph and the backward after it; returns the CPU seconds of both."""
    started = _now()
    outputs = forward(subject, inputs, how)
    _record(samples, "train_forward", started, _now())
    step_gradient(outputs, inputs, how)
    ended = _now()
    _record(samples, "step", started, ended)
    return ended.cpu - started.cpu


def _now() -> _Clocks:
    return _Clocks(cpu=time.process_time(), wall=time.perf_counter())


def _record(samples: dict[str, list[float]], phase: str, started: _Clocks, ended: _Clocks) -> None:
    samples.setdefault(f"{phase}_cpu_seconds", []).append(ended.cpu - started.cpu)
    samples.setdefault(f"{phase}_wall_seconds", []).append(ended.wall - started.wall)
