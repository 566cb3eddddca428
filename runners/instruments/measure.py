"""Measures one kernel on one case: correctness first, then memory, work, checks and time, in that order.

It decides nothing about a value and knows no history, and it calls no kernel: it asks one that may be in another
process. How a kernel is found and bound is runners.kernel_process' matter.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

import torch

from runners.instruments import checks
from runners.instruments.accuracy import Yardstick, numeric_metrics, permuted, yardstick
from runners.instruments.calls import Answer, Call, Measured, RaisedError, Rank, branches_of, describe, figures
from runners.instruments.parallel import RanksError, measure_over_ranks
from runners.instruments.subject import ARGUMENTS, Branches, Options, ResultShapeError, Subject, options
from runners.instruments.unseen import fault_on, unseen
from runners.kernels.inputs import Inputs, digest, make_inputs
from service.catalogue import BY_NAME, MetricClass
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
    kernel: Measured, case: Case, *, role: Literal["kernel", "control"] = "kernel", repetitions: int = 5
) -> Measurement:
    """Everything about `kernel` on `case`; an exception in the kernel is an outcome, not an exception.

    `repetitions` is the number of time samples. No time is stored for a case whose checks or numbers failed. The
    contract metrics `callable` and `completes` are the caller's, who alone sees a kernel die. Raises ValueError for a
    case that is split over several ranks: that is measure_split_case's.
    """
    if case.tensor_parallel != 1:
        raise ValueError(f"case {case.id} is split over ranks: measure_case measures the whole vocabulary on one rank")
    found = _Findings()
    if kernel.omitted:
        found.notes["arguments"] = f"not taken by this commit and left out: {', '.join(kernel.omitted)}"
    inputs, inputs_digest = _inputs(_inputs_case(case))
    yard = _yardstick(_inputs_case(case))  # outside the try: a failure of ours is not the kernel's outcome
    outcome: Outcome = "ok"
    try:
        _measure(kernel, case, inputs, yard, repetitions, found)
    except RaisedError as error:
        outcome = _outcome(error)
        found.notes["outcome"] = str(error)
        if error.import_failure is not None:
            found = _Findings(notes={"outcome": f"the entry cannot be called: {error.import_failure}"})
    except Exception as error:  # noqa: BLE001 -- a kernel under measurement may return anything
        outcome = "raised"
        found.notes["outcome"] = f"its results cannot be read: {describe(error)}"
    return Measurement(
        kernel=kernel.name,
        role=role,
        case=case,
        outcome=outcome,
        inputs_digest=inputs_digest,
        values=found.values,
        nonfinite=found.nonfinite,
        notes=found.notes | kernel.doubts,
    )


def measure_split_case(ranks: Sequence[Rank], case: Case) -> Measurement:
    """Everything about a kernel on a case that is split over ranks. After another outcome than `ok` the ranks are no
    longer in step: end them.
    """
    found, first = _Findings(), ranks[0]
    if first.omitted:
        found.notes["arguments"] = f"not taken by this commit and left out: {', '.join(first.omitted)}"
    inputs, inputs_digest = _inputs(_inputs_case(case))
    yard = _yardstick(_inputs_case(case))
    outcome: Outcome = "ok"
    try:
        measured = measure_over_ranks(ranks, inputs, options(case), yard, draw=case.id, exact_readings=_EXACT_READINGS)
    except RanksError as error:
        outcome = "raised"
        found.notes["outcome"] = str(error)
    except Exception as error:  # noqa: BLE001 -- a kernel under measurement may return anything
        outcome = "raised"
        found.notes["outcome"] = f"its results cannot be read: {describe(error)}"
    else:
        for name, samples in measured.values.items():
            if all(map(math.isfinite, samples)):
                found.values[name] = samples
            else:
                found.nonfinite.append(name)
        _record_checks(measured.faults, found)
        if fault := _incorrect(found):
            found.notes["timing"] = f"not stored: {fault}"
            found.values = {name: one for name, one in found.values.items() if not _is_time(name)}
    return Measurement(
        kernel=first.name,
        case=case,
        outcome=outcome,
        inputs_digest=inputs_digest,
        values=found.values,
        nonfinite=found.nonfinite,
        notes=found.notes | {topic: doubt for rank in ranks for topic, doubt in rank.doubts.items()},
    )


def _outcome(error: RaisedError) -> Outcome:
    if error.import_failure is not None:
        return "unmeasurable"
    return "out_of_memory" if error.out_of_memory else "raised"


def _measure(kernel: Measured, case: Case, inputs: Inputs, yard: Yardstick, repetitions: int, found: _Findings) -> None:
    how = options(case)
    try:
        first = kernel.ask(Call("first", how), inputs)
        result = branches_of(kernel, inputs, how)
    except ResultShapeError as error:
        _record_checks({"result_shape": str(error)}, found)
        return
    _record_numbers(kernel, inputs, how, result, yard, found)
    # Before the checks, whose threads crash torch where a kernel runs a profiler of its own: here that is told.
    _record_exact(kernel, case, inputs, how, found)
    if checks.applies(case):
        _record_checks(checks.run_checks(checks.Probe(kernel, inputs, how, result)), found)
    del result
    if fault := _incorrect(found):
        found.notes["timing"] = f"not stored: {fault}"
        return
    for got in (kernel.ask(Call("time", how, repetitions=repetitions, draw=case.id), inputs), first):
        found.values |= figures(got, MetricClass.TIMING)
    found.values |= figures(kernel.ask(Call("compilations", how), inputs), MetricClass.TIMING)


def _record_exact(kernel: Measured, case: Case, inputs: Inputs, how: Options, found: _Findings) -> None:
    """Memory and work, each on inputs that the kernel has not seen; and whether what it computed meanwhile is right.

    Inputs that a memory pass changes count as changed at any size.
    """
    errors = {name: samples[0] for name, samples in found.values.items()}
    faults: dict[str, str | None] = dict.fromkeys(("unseen_inputs", "inputs_unchanged", "own_thread"))
    for reading in range(_EXACT_READINGS):
        for kind in ("memory", "work"):
            given = unseen(inputs, f"{case.id} {kind} {reading}")
            got = kernel.ask(Call(kind, how), given)
            for name, samples in figures(got, MetricClass.EXACT).items():
                found.values.setdefault(name, []).extend(samples)
            faults = {name: faults[name] or fault for name, fault in _faults(given, how, got, errors).items()}
    _record_checks(faults if case.tokens else {"own_thread": faults["own_thread"]}, found)


def _faults(given: Inputs, how: Options, got: Answer, errors: Mapping[str, float]) -> dict[str, str | None]:
    assert got.log_prob is not None
    (gradient,) = got.gradients
    wrong = fault_on(given, how, log_prob=got.log_prob, entropy=got.entropy, gradient=gradient, errors=errors)
    return {
        "unseen_inputs": wrong,
        "inputs_unchanged": None if got.left is None else checks.inputs_changed(given, got.left),
        "own_thread": checks.thread_fault([got]),
    }


def _record_numbers(
    kernel: Measured, inputs: Inputs, how: Options, result: Branches, yard: Yardstick, found: _Findings
) -> None:
    shuffled_inputs, place = permuted(inputs)
    shuffled = branches_of(kernel, shuffled_inputs, how)
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
    failed = sorted(name for name, samples in found.values.items() if _is_check(name) and 0.0 in samples)
    if failed:
        return f"failed {', '.join(failed)}"
    if found.nonfinite:
        return f"not finite: {', '.join(found.nonfinite)}"
    if found.values["nonfinite_unexpected"] != [0.0]:
        return "elements are not finite where the oracle is, or the reverse"
    return None


def _is_check(name: str) -> bool:
    return BY_NAME[name].metric_class is MetricClass.CONTRACT


def _is_time(name: str) -> bool:
    return BY_NAME[name].metric_class is MetricClass.TIMING


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
