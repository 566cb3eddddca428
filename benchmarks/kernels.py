"""Kernels side by side on the same inputs in one run: time, peak and saved memory, traffic, gradient errors.

    .venv/bin/python benchmarks/kernels.py [--tokens 64] [--vocabulary 131072] [--dtype float32] [--keep-mask]

U is one float32 buffer of the logits' size. Times are forward and forward + backward, medians of interleaved
repetitions, as ratios to `legacy`. Peak and saved memory are beyond the inputs, to the byte; traffic is what the
dispatched operations read and write, caches or not. Errors are relative L2 of each output's gradient alone against the
float64 oracle. A kernel that cannot run here is named with what it lacks. The step of `compiled` should take no more
than 1.1 times `eager`'s: a Python float computed in 64 bits once made it 24 times.
"""

import argparse
import math
import os
import platform
import statistics
import time
from dataclasses import dataclass
from typing import get_args

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or every profile says that it starts and stops

import torch

from runners.instruments.memory import measure_memory
from runners.instruments.subject import Options, Subject, branches, collector_off, forward, fresh, step_gradient
from runners.instruments.work import measure_work
from runners.kernels.inputs import Distribution, Inputs, make_inputs
from runners.kernels.reference import Reference, reference
from runners.kernels.registry import KERNELS, kernel
from service.wire import EntropyMode

NAMES = (
    "online",
    "fused",
    "legacy",
    "eager",
    "compiled",
    "megatron_fused",
    "megatron_unfused",
    "liger",
    "cut_cross_entropy",
)
CONTROL = "legacy"
# Compiled code is no operations that a dispatcher could count.
COMPILED = {"compiled", "cut_cross_entropy"}


@dataclass(frozen=True, slots=True)
class Row:
    """What a kernel measured; memory and traffic in U, traffic None where it cannot be counted, an error where there is
    no such gradient.
    """

    peak: float
    saved: float
    traffic: float | None
    log_prob_error: float
    entropy_error: float | None


def measure(subject: Subject, inputs: Inputs, how: Options, oracle: Reference) -> Row:
    """Everything that needs no clock."""
    unit = inputs.logits.numel() * 4
    result = branches(subject, inputs, how)
    memory = measure_memory(subject, inputs, how)
    assert result.g_log_prob is not None
    return Row(
        peak=memory.step_peak_bytes / unit,
        saved=memory.saved_bytes / unit,
        traffic=None if subject.name in COMPILED else measure_work(subject, inputs, how).traffic_bytes / unit,
        log_prob_error=relative_l2(result.g_log_prob, oracle.g_log_prob),
        entropy_error=None if result.g_entropy is None else relative_l2(result.g_entropy, oracle.g_entropy),
    )


def relative_l2(gradient: torch.Tensor, truth: torch.Tensor) -> float:
    """||G - R|| / ||R||, row by row so that the difference takes no memory to speak of."""
    error = sum(float((one.double() - other).square().sum()) for one, other in zip(gradient, truth, strict=True))
    return math.sqrt(error / float(truth.square().sum()))


def measure_times(
    subjects: list[Subject], inputs: Inputs, how: Options, repetitions: int
) -> dict[str, list[tuple[float, float]]]:
    """Seconds of forward and of forward + backward by kernel, one pair a repetition; whoever begins takes turns."""
    samples: dict[str, list[tuple[float, float]]] = {subject.name: [] for subject in subjects}
    mine = fresh(inputs)
    with collector_off():
        for repetition in range(repetitions + 1):
            start = repetition % len(subjects)
            for subject in subjects[start:] + subjects[:start]:
                began = time.perf_counter()
                outputs = forward(subject, mine, how)
                middle = time.perf_counter()
                step_gradient(outputs, mine, how)
                ended = time.perf_counter()
                del outputs
                if repetition:  # the first warms up
                    samples[subject.name].append((middle - began, ended - began))
    return samples


def print_table(rows: dict[str, Row], times: dict[str, list[tuple[float, float]]]) -> None:
    """One line a kernel."""
    medians = {name: [statistics.median(each) for each in zip(*pairs, strict=True)] for name, pairs in times.items()}
    header = ("forward", "step", "peak U", "saved U", "traffic U", "error g(lp)", "error g(ent)")
    print(f"{'':<17}" + "".join(f"{name:>13}" for name in header))
    for name, row in rows.items():
        ratios = [mine / control for mine, control in zip(medians[name], medians[CONTROL], strict=True)]
        entropy = "-" if row.entropy_error is None else f"{row.entropy_error:.1e}"
        traffic = "-" if row.traffic is None else f"{row.traffic:.1f}"
        print(
            f"{name:<17}{ratios[0]:>13.2f}{ratios[1]:>13.2f}{row.peak:>13.3f}{row.saved:>13.5f}{traffic:>13}"
            f"{row.log_prob_error:>13.1e}{entropy:>13}"
        )


def parse() -> argparse.Namespace:
    """The arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--vocabulary", type=int, default=131072)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--distribution", choices=get_args(Distribution), default="spread")
    parser.add_argument("--entropy", choices=get_args(EntropyMode), default="gradient")
    parser.add_argument("--keep-mask", action="store_true")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--chunk-size", type=int)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


def main() -> None:
    """Measure every kernel that can run here."""
    arguments = parse()
    torch.set_num_threads(arguments.threads)
    inputs = make_inputs(
        tokens=arguments.tokens,
        vocabulary=arguments.vocabulary,
        dtype=getattr(torch, arguments.dtype),
        distribution=arguments.distribution,
        keep_mask=arguments.keep_mask,
    )
    how = Options(arguments.entropy, chunk_size=arguments.chunk_size, temperature=arguments.temperature)
    known = [kernel(each.name) for each in KERNELS if each.name in NAMES]
    subjects = [Subject(each.name, each.run) for each in known if each.missing is None]
    oracle = reference(
        inputs.logits,
        inputs.targets,
        upstream_log_prob=inputs.upstream_log_prob,
        upstream_entropy=inputs.upstream_entropy,
        keep_mask=inputs.keep_mask,
        temperature=arguments.temperature,
    )
    rows = {subject.name: measure(subject, inputs, how, oracle) for subject in subjects}
    del oracle
    times = measure_times(subjects, inputs, how, arguments.repetitions)
    print(
        f"N = {arguments.tokens}, V = {arguments.vocabulary}, {arguments.dtype}, {arguments.distribution}, entropy "
        f"{arguments.entropy}, keep-mask {'yes' if arguments.keep_mask else 'no'}; U = "
        f"{inputs.logits.numel() * 4 / 2**20:.1f} MiB; times / {CONTROL}, {arguments.repetitions} repetitions; "
        f"torch {torch.__version__}, {arguments.threads} thread(s), {platform.machine()}"
    )
    print_table(rows, times)
    for each in known:
        if each.missing is not None:
            print(f"{each.name:<17}{each.missing}")


if __name__ == "__main__":
    main()
