"""One kernel on one case: a complete measurement, whatever the kernel does."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from runners.instruments.calls import Answer, Call, Local
from runners.instruments.measure import ARGUMENTS, Subject, measure_case
from runners.kernels.inputs import Inputs
from runners.kernels.registry import kernel
from service.catalogue import BY_NAME, MetricClass
from service.wire import CASE_ARGUMENTS, Case

CASE = Case(tokens=8, vocabulary=64)
ON_CUDA_ONLY = {
    "allocated_peak_bytes", "reserved_peak_bytes", "allocation_retries", "async_escape", "throttled_share",
    *(f"{phase}_device_seconds" for phase in ("forward", "train_forward", "step")),
    *(f"{phase}_roofline_share" for phase in ("forward", "step")),
}  # fmt: skip
OF_THE_CASE = {"first_call_seconds", "compilations"}


def _names(metric_class: MetricClass) -> set[str]:
    return {metric.name for metric in BY_NAME.values() if metric.metric_class is metric_class} - ON_CUDA_ONLY


def test_a_clean_kernel_gives_every_metric_of_the_catalogue(clean: Subject) -> None:
    measurement = measure_case(Local(clean), CASE, repetitions=3)
    assert measurement.outcome == "ok"
    assert measurement.notes == {}
    by_job_and_judge = {"callable", "completes", "within_gates", "within_budget"}
    over_ranks = {name for name in BY_NAME if name.startswith("tp_")} | {"rank_disagree", "collectives_agree"}
    assert set(measurement.values) == set(BY_NAME) - by_job_and_judge - over_ranks - ON_CUDA_ONLY
    assert {len(measurement.values[name]) for name in _names(MetricClass.EXACT)} == {2}
    assert {len(measurement.values[name]) for name in _names(MetricClass.TIMING) - OF_THE_CASE} == {3}
    assert {len(measurement.values[name]) for name in OF_THE_CASE} == {1}
    assert measurement.values["compilations"] == [0.0]


def test_equal_cases_have_equal_inputs_whatever_is_asked_of_them(clean: Subject) -> None:
    digests = {
        measure_case(Local(clean), CASE.model_copy(update=change), repetitions=1).inputs_digest
        for change in ({}, {"entropy": "off"}, {"chunk_size": 2}, {"temperature": 0.5})
    }
    assert len(digests) == 1
    assert measure_case(Local(clean), CASE.model_copy(update={"seed": 1}), repetitions=1).inputs_digest not in digests


def test_everything_but_time_repeats(clean: Subject) -> None:
    one, other = (measure_case(Local(clean), CASE, repetitions=1).values for _ in range(2))
    for name in set(one) - _names(MetricClass.TIMING):
        assert one[name] == other[name], name


@pytest.mark.parametrize(
    ("error", "outcome", "reason"),
    [
        (ZeroDivisionError("by zero\nand more"), "raised", "ZeroDivisionError: by zero"),
        (KeyError(), "raised", "KeyError"),
        (MemoryError("too much"), "out_of_memory", "MemoryError: too much"),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"),
            "out_of_memory",
            "RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes",
        ),
    ],
)
def test_an_exception_is_an_outcome_with_its_reason(error: Exception, outcome: str, reason: str) -> None:
    def run(logits: torch.Tensor, targets: torch.Tensor, **keywords: Any) -> Any:
        raise error

    measurement = measure_case(Local(Subject("raises", run)), CASE)
    assert measurement.outcome == outcome
    assert measurement.notes == {"outcome": reason}
    assert measurement.values == {}


def test_what_was_measured_before_an_exception_is_kept(clean: Subject) -> None:
    def run(logits: torch.Tensor, targets: torch.Tensor, **keywords: Any) -> Any:
        if not torch.is_grad_enabled():
            raise RuntimeError("no graph, no result")
        return clean.run(logits, targets, **keywords)

    large = Case(tokens=2, vocabulary=1 << 19)  # no checks, of which one calls it without gradients
    measurement = measure_case(Local(Subject("training-only", run)), large)
    assert measurement.outcome == "raised"
    assert _names(MetricClass.EXACT) <= set(measurement.values)
    assert not _names(MetricClass.TIMING) & set(measurement.values)


def test_outputs_of_a_wrong_shape_are_a_failed_check(tampered: Any) -> None:
    column = tampered(outputs=lambda result: (result[0][:, None], result[1]))
    measurement = measure_case(Local(column), CASE)
    assert measurement.values == {"result_shape": [0.0]}
    assert measurement.notes["result_shape"] == "log_prob has shape (8, 1), not (8,)"


def test_no_time_is_stored_for_a_failed_check(tampered: Any) -> None:
    measurement = measure_case(Local(tampered(gradient=lambda _: None)), CASE)
    assert measurement.outcome == "ok"
    assert measurement.values["gradient_defined"] == [0.0]
    assert measurement.values["grad_coverage_miss_lp"] == [6.0]
    assert "gradient_defined" in measurement.notes
    assert measurement.notes["timing"].startswith("not stored: failed ")
    assert not _names(MetricClass.TIMING) & set(measurement.values)


def test_a_number_that_is_not_finite_is_named_and_has_no_value_and_no_time(tampered: Any) -> None:
    faulty = tampered(outputs=lambda result: (result[0] + torch.nan, result[1]))
    large = Case(tokens=2, vocabulary=1 << 19, entropy="off")
    measurement = measure_case(Local(faulty), large, repetitions=1)
    assert measurement.nonfinite == ["lp_abs_max", "perm_delta_lp", "legacy_delta_lp"]
    assert measurement.values["nonfinite_unexpected"] == [2.0]
    assert "lp_abs_max" not in measurement.values
    assert measurement.notes["timing"].startswith("not stored: not finite")
    assert "repeat_bitwise" not in measurement.values


def test_arguments_that_a_commit_does_not_take_are_left_out_and_noted(clean: Subject) -> None:
    def older_run(logits: torch.Tensor, targets: torch.Tensor, **keywords: Any) -> Any:
        assert "with_entropy_grad" not in keywords
        return clean.run(logits, targets, **keywords)

    older = Subject("older", older_run, takes=ARGUMENTS - {"with_entropy_grad"}, omitted=("with_entropy_grad",))
    measurement = measure_case(Local(older), CASE.model_copy(update={"entropy": "value"}), repetitions=1)
    assert measurement.outcome == "ok"
    assert measurement.notes == {"arguments": "not taken by this commit and left out: with_entropy_grad"}
    assert _names(MetricClass.TIMING) <= set(measurement.values)


def _overwrites_logits(logits: torch.Tensor, targets: torch.Tensor, **keywords: Any) -> Any:
    result = kernel("fused").run(logits, targets, **keywords)
    logits.data.add_(1.0)
    return result


def _overwrites_targets(logits: torch.Tensor, targets: torch.Tensor, **keywords: Any) -> Any:
    result = kernel("fused").run(logits, targets.clone(), **keywords)
    targets.zero_()
    return result


@pytest.mark.parametrize(("run", "changed"), [(_overwrites_logits, "logits"), (_overwrites_targets, "targets")])
def test_changed_inputs_are_a_failed_check(run: Any, changed: str) -> None:
    measurement = measure_case(Local(Subject("overwrites", run)), CASE, repetitions=1)
    assert measurement.values["inputs_unchanged"] == [0.0]
    assert measurement.notes["inputs_unchanged"] == f"{changed} was changed by forward and backward"


def test_an_output_that_puts_its_work_off_has_no_shape(clean: Subject) -> None:
    class Lazy(torch.Tensor):
        pass

    def run(logits: torch.Tensor, targets: torch.Tensor, **keywords: Any) -> Any:
        log_prob, entropy = clean.run(logits, targets, **keywords)
        return log_prob.as_subclass(Lazy), entropy  # type: ignore[no-untyped-call]

    measurement = measure_case(Local(Subject("lazy", run)), CASE)
    assert measurement.values == {"result_shape": [0.0]}
    assert measurement.notes["result_shape"] == "log_prob is a Lazy, not a torch.Tensor"


def test_a_call_that_cannot_import_something_makes_the_entry_unmeasurable() -> None:
    def run(logits: torch.Tensor, targets: torch.Tensor, **keywords: Any) -> Any:
        raise ModuleNotFoundError("No module named 'megatron'")

    measurement = measure_case(Local(Subject("imports", run)), CASE)
    assert (measurement.outcome, measurement.values) == ("unmeasurable", {})
    reason = "the entry cannot be called: ModuleNotFoundError: No module named 'megatron'"
    assert measurement.notes == {"outcome": reason}


def test_a_split_case_is_refused(clean: Subject) -> None:
    with pytest.raises(ValueError, match=r"n8-v64-float32-gradient-tp2 is split over ranks"):
        measure_case(Local(clean), CASE.model_copy(update={"tensor_parallel": 2}))


def test_a_control_is_marked(clean: Subject) -> None:
    assert measure_case(Local(clean), CASE, role="control", repetitions=1).role == "control"


def test_the_arguments_are_those_of_the_wire() -> None:
    assert frozenset(CASE_ARGUMENTS) == ARGUMENTS


class _Forger(Local):
    """Reports an error of its own choice beside the times."""

    def ask(self, call: Call, inputs: Inputs) -> Answer:
        got = super().ask(call, inputs)
        return replace(got, samples=got.samples | {"g_rel_l2_lp": [0.0]}) if call.kind == "time" else got


def test_a_kernel_cannot_report_its_own_errors(clean: Subject) -> None:
    measurement = measure_case(_Forger(clean), CASE, repetitions=1)
    assert measurement.outcome == "raised"
    assert "'g_rel_l2_lp', which is no timing metric" in measurement.notes["outcome"]
