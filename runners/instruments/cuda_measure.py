"""Measures one kernel on one case on a CUDA device: correctness, escaping work, memory, work and time, in that order.

What runners.instruments.measure is for a CPU. It differs in where inputs lie and in its instruments for memory and
time; metrics, oracle and outcomes are the same. The contract checks of small cases are not among it.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal

import torch

from runners.instruments.accuracy import Yardstick, numeric_metrics, permuted, yardstick
from runners.instruments.cuda_inputs import PlacedInputs, drawn_frame, on_device, place, worst_rows
from runners.instruments.cuda_memory import measure_cuda_memory
from runners.instruments.cuda_timing import Timer, escape_fault, measure_device_time
from runners.instruments.stopping import StoppingRule
from runners.instruments.subject import Branches, Options, ResultShapeError, Subject, branches
from runners.instruments.timing import compilations, first_call_seconds
from runners.instruments.work import measure_work
from runners.kernels.inputs import Inputs
from runners.kernels.reference import Reference
from service.wire import Case, Measurement, Outcome

# An exact metric is read twice; readings that differ are the judge's matter.
_EXACT_READINGS = 2

ReadMemory = Callable[[Subject, Inputs, Options], Any]


@dataclass(slots=True)
class _Findings:
    """What has been measured so far, so that a case that ends in an exception keeps what came before it."""

    values: dict[str, list[float]] = field(default_factory=dict)
    nonfinite: list[str] = field(default_factory=list)
    notes: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Instruments:
    """What a device is measured with: its timer, when sampling ends, and how memory is read."""

    timer: Timer
    rule: StoppingRule = field(default_factory=StoppingRule)
    read_memory: ReadMemory = measure_cuda_memory


def measure_case_on_device(
    subject: Subject, case: Case, instruments: Instruments, *, role: Literal["kernel", "control"] = "kernel"
) -> Measurement:
    """Everything about `subject` on `case` on `subject.device`; an exception in the kernel is an outcome.

    Errors are the worst of all rows. No time is stored for a case whose numbers or checks failed; times that cannot be
    believed leave the reason in the note `timing`, and what bears it out. Raises ValueError for a case that is split
    over several ranks.
    """
    if case.tensor_parallel != 1:
        raise ValueError(f"case {case.id} is split over ranks: this measures the whole vocabulary on one rank")
    found = _Findings()
    inputs_case = case.model_copy(update={"entropy": "gradient", "chunk_size": None})
    placed = _placed(inputs_case, subject.device)
    yard = _yardstick(inputs_case.model_copy(update={"tokens": placed.drawn.logits.shape[0]}))
    outcome: Outcome = "ok"
    try:
        _measure(subject, placed, Options(case.entropy, case.chunk_size, case.temperature), yard, instruments, found)
    except Exception as error:  # noqa: BLE001 -- a kernel under measurement may raise anything
        outcome = "out_of_memory" if isinstance(error, torch.OutOfMemoryError | MemoryError) else "raised"
        found.notes["outcome"] = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:500]}"
    if outcome == "out_of_memory":
        torch.cuda.empty_cache()  # or the next case finds what this one left lying about
    return Measurement(
        kernel=subject.name,
        role=role,
        case=case,
        outcome=outcome,
        inputs_digest=placed.digest,
        values=found.values,
        nonfinite=found.nonfinite,
        notes=found.notes,
    )


def _measure(
    subject: Subject, placed: PlacedInputs, how: Options, yard: Yardstick, instruments: Instruments, found: _Findings
) -> None:
    compiled_before = compilations()
    try:
        first_call = first_call_seconds(subject, placed.whole, how)
        result = branches(subject, placed.whole, how)
    except ResultShapeError as error:
        found.values["result_shape"] = [0.0]
        found.notes["result_shape"] = str(error)
        return
    rows = worst_rows(result, _on(yard.oracle, result.log_prob.device), placed.drawn.logits.shape[0])
    result = drawn_frame(result, rows)
    _record_numbers(subject, placed, how, result, yard, found)
    del result
    fault = escape_fault(subject, placed.whole, how, instruments.timer)
    found.values["async_escape"] = [0.0 if fault else 1.0]
    if fault:
        found.notes["async_escape"] = fault
    for _ in range(_EXACT_READINGS):
        for reading in (instruments.read_memory(subject, placed.whole, how), measure_work(subject, placed.whole, how)):
            for name, value in asdict(reading).items():
                found.values.setdefault(name, []).append(float(value))
    if fault := _incorrect(found):
        found.notes["timing"] = f"not stored: {fault}"
        return
    times = measure_device_time(subject, placed.whole, how, instruments.timer, rule=instruments.rule)
    found.values |= times.samples
    if times.fault:
        found.notes["timing"] = f"invalid: {times.fault}"
    found.values["first_call_seconds"] = [first_call]
    found.values["compilations"] = [float(compilations() - compiled_before)]


def _record_numbers(
    subject: Subject, placed: PlacedInputs, how: Options, result: Branches, yard: Yardstick, found: _Findings
) -> None:
    shuffled_inputs, order = permuted(placed.drawn)
    on_it = on_device(shuffled_inputs, subject.device)
    shuffled = branches(subject, on_it, how)
    count = placed.drawn.logits.shape[0]
    shuffled = drawn_frame(shuffled, torch.arange(count))
    for name, value in numeric_metrics(placed.drawn, how, result, shuffled, order, yard).items():
        if math.isfinite(value):
            found.values[name] = [value]
        else:
            found.nonfinite.append(name)


def _incorrect(found: _Findings) -> str | None:
    """Why no time of this case is to be celebrated, None if it may be."""
    if found.notes:
        return f"failed {', '.join(sorted(found.notes))}"
    if found.nonfinite:
        return f"not finite: {', '.join(found.nonfinite)}"
    if found.values["nonfinite_unexpected"] != [0.0]:
        return "elements are not finite where the oracle is, or the reverse"
    return None


def _on(oracle: Reference, device: torch.device) -> Reference:
    return replace(oracle, **{name: getattr(oracle, name).to(device) for name in Reference.__slots__})


@lru_cache(maxsize=1)
def _placed(case: Case, device: str) -> PlacedInputs:
    return place(case, device)


@lru_cache(maxsize=1)
def _yardstick(case: Case) -> Yardstick:
    return yardstick(place(case, "cpu").drawn, case.temperature)
