"""One kernel on one case on a device: a complete measurement. The device is the CPU, its clock is played."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from runners.instruments.cuda_measure import Instruments, measure_case_on_device
from runners.instruments.memory import measure_memory
from runners.instruments.stopping import StoppingRule
from runners.instruments.subject import Subject
from service.wire import Case

CASE = Case(tokens=150, vocabulary=64)


@dataclass
class StoppedClock:
    """A device on which every mark is a millisecond after the one before, and nothing is left to do after one."""

    cache_bytes: int = 0
    memory_bytes_per_second: float | None = 1e12
    time: float = 0.0
    lag: float = 0.0

    def evict(self) -> None: ...

    def mark(self) -> float:
        self.time += 1e-3
        return self.time

    def wait(self, mark: float) -> None: ...

    def wait_for_all(self) -> None:
        self.time += self.lag

    def seconds_between(self, one: float, other: float) -> float:
        return other - one

    def now(self) -> float:
        return self.time

    def is_throttled(self) -> bool | None:
        return False


def _measure(subject: Subject, case: Case = CASE, clock: StoppedClock | None = None) -> Any:
    instruments = Instruments(clock or StoppedClock(), StoppingRule(least=3), measure_memory)
    return measure_case_on_device(subject, case, instruments)


def test_a_clean_kernel_gives_numbers_memory_work_and_device_times(clean: Subject) -> None:
    measurement = _measure(clean)
    assert (measurement.outcome, measurement.notes, measurement.nonfinite) == ("ok", {}, [])
    values = measurement.values
    once = ("lp_abs_max", "g_rel_l2_ent", "async_escape", "first_call_seconds", "compilations")
    assert all(len(values[name]) == 1 for name in once)
    assert all(len(values[name]) == 2 for name in ("step_peak_bytes", "saved_bytes", "operations", "collectives"))
    assert all(len(values[f"{phase}_device_seconds"]) == 3 for phase in ("forward", "train_forward", "step"))
    assert values["throttled_share"] == [0.0]
    assert not [name for name in values if name.endswith(("_cpu_seconds", "_wall_seconds"))]


@pytest.mark.parametrize("row", [0, 77, 149])
def test_one_wrong_row_of_many_is_seen(row: int, tampered: Any) -> None:
    def spoil(result: Any) -> Any:
        log_prob = result[0].clone()
        if len(log_prob) == CASE.tokens:
            log_prob[row] += 1
        return log_prob, result[1]

    assert _measure(tampered(outputs=spoil)).values["lp_abs_max"][0] == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("row", [1, 100, 149])
def test_one_row_without_its_gradient_is_counted(row: int, tampered: Any) -> None:
    def drop(gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        if len(gradient) == CASE.tokens:
            gradient[row] = 0
        return gradient

    values = _measure(tampered(gradient=drop)).values
    assert values["grad_coverage_miss_lp"] + values["grad_coverage_miss_ent"] != [0.0, 0.0]


def test_escaping_work_fails_its_check_and_no_time_is_stored(clean: Subject) -> None:
    measurement = _measure(clean, clock=StoppedClock(lag=1e-3))
    assert measurement.values["async_escape"] == [0.0]
    assert measurement.notes["timing"] == "not stored: failed async_escape"
    assert "step_device_seconds" not in measurement.values


def test_times_that_cannot_be_are_invalid_with_their_reason(clean: Subject) -> None:
    measurement = _measure(clean, clock=StoppedClock(memory_bytes_per_second=1e6))
    assert measurement.outcome == "ok"
    assert measurement.notes["timing"].startswith("invalid: faster than memory allows")
    assert measurement.values["step_roofline_share"][0] > 1
    assert "step_device_seconds" not in measurement.values


@pytest.mark.parametrize(
    ("error", "outcome"),
    [(torch.OutOfMemoryError("CUDA out of memory. Tried"), "out_of_memory"), (RuntimeError("no"), "raised")],
)
def test_an_exception_is_an_outcome_with_its_reason(
    error: Exception, outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    emptied: list[bool] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))

    def run(logits: torch.Tensor, targets: torch.Tensor, **keywords: Any) -> Any:
        raise error

    measurement = _measure(Subject("raises", run))
    assert measurement.outcome == outcome
    assert measurement.notes == {"outcome": f"{type(error).__name__}: {error}"}
    assert emptied == [True] * (outcome == "out_of_memory")


def test_outputs_of_a_wrong_shape_are_a_failed_check(tampered: Any) -> None:
    measurement = _measure(tampered(outputs=lambda result: (result[0][:, None], result[1])))
    assert measurement.values == {"result_shape": [0.0]}


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": 0},
        {"tokens": 7},
        {"keep_mask": True, "distribution": "masked"},
        {"dtype": "bfloat16"},
        {"entropy": "off"},
    ],
    ids=str,
)
def test_cases_of_every_kind_end_well(change: dict[str, Any], clean: Subject) -> None:
    assert _measure(clean, CASE.model_copy(update=change)).outcome == "ok"


def test_a_split_case_is_refused(clean: Subject) -> None:
    with pytest.raises(ValueError, match=r"split over ranks"):
        _measure(clean, CASE.model_copy(update={"tensor_parallel": 2}))
