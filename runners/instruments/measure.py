"""Measures one kernel on one case: correctness first, then checks, memory, work and time, in that order.

It decides nothing about a value and knows no history; how a kernel is found and bound is runners.targets' matter.
"""

import math
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Literal

import torch
import torch.distributed as dist

from runners.instruments import checks
from runners.instruments.accuracy import Yardstick, numeric_metrics, permuted, yardstick
from runners.instruments.memory import measure_memory
from runners.instruments.parallel import Ranks, RanksError, measure_over_ranks
from runners.instruments.subject import ARGUMENTS, Branches, Options, ResultShapeError, Subject, branches, options
from runners.instruments.timing import compilations, first_call_seconds, measure_time
from runners.instruments.work import measure_work
from runners.kernels.inputs import Inputs, digest, make_inputs
from service.wire import Case, Measurement, Outcome

__all__ = ["ARGUMENTS", "ResultShapeError", "Subject", "measure_case"]

# An exact metric is read twice; readings that differ are the judge's matter.
_EXACT_READINGS = 2


@dataclass(slots=True)
class _Findings:
    """What has been measured so far, so that a case that ends in an exception keeps what came before it."""

    values: dict[str, list[float]] = field(default_factory=dict)
    nonfinite: list[str] = field(default_factory=list)
    notes: dict[str, str] = field(default_factory=dict)


def measure_case(
    subject: Subject,
    case: Case,
    *,
    role: Literal["kernel", "control"] = "kernel",
    group: dist.ProcessGroup | None = None,
    repetitions: int = 5,
) -> Measurement:
    """Everything about `subject` on `case`; an exception in the kernel is an outcome, not an exception.

    `group` is handed to a kernel that takes one; it must hold the whole vocabulary (size 1). `repetitions` is the
    number of time samples. No time is stored for a case whose checks or numbers failed. The contract metrics
    `callable` and `completes` are the caller's, who alone sees a kernel die. Raises ValueError for a case that is
    split over several ranks: that is measure_split_case's.
    """
    if case.tensor_parallel != 1 or (group is not None and group.size() != 1):
        raise ValueError(f"case {case.id} is split over ranks: measure_case measures the whole vocabulary on one rank")
    found = _Findings()
    if subject.omitted:
        found.notes["arguments"] = f"not taken by this commit and left out: {', '.join(subject.omitted)}"
    inputs, inputs_digest = _inputs(_inputs_case(case))
    yard = _yardstick(_inputs_case(case))  # outside the try: a failure of ours is not the kernel's outcome
    outcome: Outcome = "ok"
    try:
        _measure(subject, case, inputs, options(case, group), yard, repetitions, found)
    except Exception as error:  # noqa: BLE001 -- a kernel under measurement may raise anything
        outcome = "out_of_memory" if _is_out_of_memory(error) else "raised"
        found.notes["outcome"] = checks.describe(error)
    return Measurement(
        kernel=subject.name,
        role=role,
        case=case,
        outcome=outcome,
        inputs_digest=inputs_digest,
        values=found.values,
        nonfinite=found.nonfinite,
        notes=found.notes,
    )


def measure_split_case(subject: Subject, case: Case, ranks: Ranks) -> Measurement:
    """Everything about `subject` on a case that is split over ranks. Every rank calls this and gets a measurement; the
    first rank's is the one to keep. After another outcome than `ok` the ranks are no longer in step: end them.
    """
    found = _Findings()
    if subject.omitted:
        found.notes["arguments"] = f"not taken by this commit and left out: {', '.join(subject.omitted)}"
    inputs, inputs_digest = _inputs(_inputs_case(case))
    yard = _yardstick(_inputs_case(case))
    outcome: Outcome = "ok"
    try:
        measured = measure_over_ranks(subject, inputs, options(case), yard, ranks, exact_readings=_EXACT_READINGS)
    except RanksError as error:
        outcome = "raised"
        found.notes["outcome"] = str(error)
    else:
        for name, samples in measured.values.items():
            if all(map(math.isfinite, samples)):
                found.values[name] = samples
            else:
                found.nonfinite.append(name)
        _record_checks(measured.faults, found)
        if ranks.rank == 0 and (fault := _incorrect(found)):
            found.notes["timing"] = f"not stored: {fault}"
            found.values = {name: one for name, one in found.values.items() if not name.endswith("_seconds")}
    return Measurement(
        kernel=subject.name,
        case=case,
        outcome=outcome,
        inputs_digest=inputs_digest,
        values=found.values,
        nonfinite=found.nonfinite,
        notes=found.notes,
    )


def _measure(
    subject: Subject,
    case: Case,
    inputs: Inputs,
    how: Options,
    yard: Yardstick,
    repetitions: int,
    found: _Findings,
) -> None:
    compiled_before = compilations()
    try:
        first_call = first_call_seconds(subject, inputs, how)
        result = branches(subject, inputs, how)
    except ResultShapeError as error:
        found.values["result_shape"] = [0.0]
        found.notes["result_shape"] = str(error)
        return
    _record_numbers(subject, inputs, how, result, yard, found)
    if checks.applies(case):
        _record_checks(checks.run_checks(checks.Probe(subject, inputs, how, result)), found)
    del result
    for _ in range(_EXACT_READINGS):
        for reading in (measure_memory(subject, inputs, how), measure_work(subject, inputs, how)):
            for name, value in asdict(reading).items():
                found.values.setdefault(name, []).append(float(value))
    if fault := _incorrect(found):
        found.notes["timing"] = f"not stored: {fault}"
        return
    found.values |= measure_time(subject, inputs, how, repetitions=repetitions)
    found.values["first_call_seconds"] = [first_call]
    found.values["compilations"] = [float(compilations() - compiled_before)]


def _record_numbers(
    subject: Subject, inputs: Inputs, how: Options, result: Branches, yard: Yardstick, found: _Findings
) -> None:
    shuffled_inputs, place = permuted(inputs)
    shuffled = branches(subject, shuffled_inputs, how)
    del shuffled_inputs
    metrics = numeric_metrics(inputs, how, result, shuffled, place, yard)
    for name, value in metrics.items():
        if math.isfinite(value):
            found.values[name] = [value]
        else:
            found.nonfinite.append(name)


def _record_checks(faults: dict[str, str | None], found: _Findings) -> None:
    for name, fault in faults.items():
        found.values[name] = [0.0 if fault else 1.0]
        if fault:
            found.notes[name] = fault


def _incorrect(found: _Findings) -> str | None:
    """Why no time of this case is to be celebrated, None if it may be."""
    failed = sorted(set(found.notes) - {"arguments"})
    if failed:
        return f"failed {', '.join(failed)}"
    if found.nonfinite:
        return f"not finite: {', '.join(found.nonfinite)}"
    if found.values["nonfinite_unexpected"] != [0.0]:
        return "elements are not finite where the oracle is, or the reverse"
    return None


def _is_out_of_memory(error: Exception) -> bool:
    """torch's CPU allocator raises a bare RuntimeError."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def _inputs_case(case: Case) -> Case:
    """The case without what does not change its inputs and oracle, so that neighbouring cases share them."""
    return case.model_copy(update={"entropy": "gradient", "chunk_size": None, "tensor_parallel": 1})


@lru_cache(maxsize=1)
def _inputs(case: Case) -> tuple[Inputs, str]:
    inputs = make_inputs(
        tokens=case.tokens,
        vocabulary=case.vocabulary,
        dtype=getattr(torch, case.dtype),
        distribution=case.distribution,
        keep_mask=case.keep_mask,
        upstream=case.upstream,
        seed=case.seed,
    )
    return inputs, digest(inputs)


@lru_cache(maxsize=1)
def _yardstick(case: Case) -> Yardstick:
    return yardstick(_inputs(case)[0], case.temperature)
