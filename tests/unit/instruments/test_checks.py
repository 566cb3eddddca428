"""Contract checks: a clean kernel passes all, and every check has a kernel that fails it."""

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any, cast

import pytest
import torch

from runners.instruments.calls import Local
from runners.instruments.checks import Probe, applies, run_checks
from runners.instruments.subject import ARGUMENTS, Options, Subject, branches
from runners.kernels.inputs import Inputs
from runners.kernels.registry import kernel
from service.catalogue import BY_NAME, MetricClass
from service.wire import Case


def _faults(subject: Subject, inputs: Inputs, how: Options | None = None) -> dict[str, str | None]:
    how = how or Options()
    return run_checks(Probe(Local(subject), inputs, how, branches(subject, inputs, how)))


@pytest.mark.parametrize("mode", ["off", "value", "gradient"])
@pytest.mark.parametrize("name", ["fused", "legacy", "eager"])
def test_our_own_kernels_pass_every_check(name: str, mode: Any, inputs: Inputs) -> None:
    faults = _faults(Subject(name, kernel(name).run), inputs, Options(mode))
    assert {check: fault for check, fault in faults.items() if fault} == {}


def test_the_checks_are_those_of_the_catalogue(clean: Subject, inputs: Inputs) -> None:
    known = {m.name for m in BY_NAME.values() if m.metric_class is MetricClass.CONTRACT}
    by_job_and_judge = {"callable", "completes", "within_gates", "within_budget"}
    over_ranks = {"tp_invariant", "collectives_agree"}
    with_memory_and_work = {"unseen_inputs", "inputs_unchanged", "own_thread"}
    elsewhere = by_job_and_judge | over_ranks | with_memory_and_work | {"async_escape"}
    assert set(_faults(clean, inputs)) == known - elsewhere


# --- A faulty kernel for every check ---------------------------------------------------------------------------------


def _run(function: Callable[..., Any]) -> Subject:
    return Subject(function.__name__, function)


def _fused(logits: torch.Tensor, targets: torch.Tensor, **keywords: Any) -> Any:
    return kernel("fused").run(logits, targets, **keywords)


def _always_entropy(logits: torch.Tensor, targets: torch.Tensor, **keywords: Any) -> Any:
    return _fused(logits, targets, **(keywords | {"with_entropy": True}))


def _never_entropy(logits: torch.Tensor, targets: torch.Tensor, **keywords: Any) -> Any:
    return _fused(logits, targets, **(keywords | {"with_entropy": False}))


def _detached_entropy(logits: torch.Tensor, targets: torch.Tensor, **keywords: Any) -> Any:
    return _fused(logits, targets, **(keywords | {"with_entropy_grad": False}))


def _attached_entropy(logits: torch.Tensor, targets: torch.Tensor, **keywords: Any) -> Any:
    return _fused(logits, targets, **(keywords | {"with_entropy_grad": True}))


def _stale_by_address(logits: torch.Tensor, targets: torch.Tensor, **keywords: Any) -> Any:
    """Caches its last result by data pointer."""
    log_prob, entropy = _fused(logits, targets, **keywords)
    cached = _LAST.setdefault(logits.data_ptr(), log_prob.detach())
    return (log_prob * 0 + cached if cached.shape == log_prob.shape else log_prob), entropy


_LAST: dict[Any, Any] = {}
_CALLS = count()


def _drifts(logits: torch.Tensor, targets: torch.Tensor, **keywords: Any) -> Any:
    log_prob, entropy = _fused(logits, targets, **keywords)
    return log_prob + 1e-3 * next(_CALLS), entropy


def _drops_the_last_chunk(logits: torch.Tensor, targets: torch.Tensor, **keywords: Any) -> Any:
    size = keywords.get("chunk_size")
    if size is None or size >= len(targets):
        return _fused(logits, targets, **keywords)
    kept = torch.arange(len(targets)) < (len(targets) - 1) // size * size
    return _fused(torch.where(kept[:, None], logits, logits.detach()), targets, **keywords)


def _masks_the_target(logits: torch.Tensor, targets: torch.Tensor, *, keep_mask: Any = None, **keywords: Any) -> Any:
    entropy = _fused(logits, targets, **keywords)[1]
    masked = logits if keep_mask is None else logits.masked_fill(~keep_mask, -1e9)
    return _fused(masked, targets, **keywords)[0], entropy


def _ignores_the_mask(logits: torch.Tensor, targets: torch.Tensor, *, keep_mask: Any = None, **keywords: Any) -> Any:
    return _fused(logits, targets, **keywords)


def _masked_entropy(logits: torch.Tensor, targets: torch.Tensor, *, keep_mask: Any = None, **keywords: Any) -> Any:
    if keep_mask is None:
        return _fused(logits, targets, **keywords)
    kept = keep_mask.scatter(1, targets[:, None], True)
    return _fused(logits.masked_fill(~kept, -1e9), targets, **keywords)


def _needs_rows(logits: torch.Tensor, targets: torch.Tensor, **keywords: Any) -> Any:
    if not len(targets):
        raise RuntimeError("max(): Expected reduction dim to be specified")
    return _fused(logits, targets, **keywords)


def _detached_when_empty(logits: torch.Tensor, targets: torch.Tensor, **keywords: Any) -> Any:
    return _fused(logits if len(targets) else logits.detach(), targets, **keywords)


class _AssumesContiguous(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, logits: torch.Tensor) -> torch.Tensor:
        return logits.as_strided(logits.shape, (logits.shape[1], 1)).clone()

    @staticmethod
    def backward(_ctx: Any, upstream: torch.Tensor) -> torch.Tensor:
        return upstream


def _reads_as_contiguous(logits: torch.Tensor, targets: torch.Tensor, **keywords: Any) -> Any:
    return _fused(_AssumesContiguous.apply(logits), targets, **keywords)


def _wants_float32(logits: torch.Tensor, targets: torch.Tensor, **keywords: Any) -> Any:
    if logits.dtype != torch.float32:
        raise TypeError(f"expected float32, got {logits.dtype}")
    return _fused(logits, targets, **keywords)


def _garbles_half(logits: torch.Tensor, targets: torch.Tensor, **keywords: Any) -> Any:
    return _fused(logits if logits.dtype == torch.float32 else logits * 0.9, targets, **keywords)


def _clamps_targets(logits: torch.Tensor, targets: torch.Tensor, **keywords: Any) -> Any:
    return _fused(logits, targets.clamp(0, logits.shape[1] - 1), **keywords)


def _double_output(logits: torch.Tensor, targets: torch.Tensor, **keywords: Any) -> Any:
    log_prob, entropy = _fused(logits, targets, **keywords)
    return log_prob.double(), entropy


def _spreads_nan(logits: torch.Tensor, targets: torch.Tensor, **keywords: Any) -> Any:
    log_p = torch.log_softmax(logits, 1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(1)


def _column_output(logits: torch.Tensor, targets: torch.Tensor, **keywords: Any) -> Any:
    log_prob, entropy = _fused(logits, targets, **keywords)
    return log_prob[:, None], entropy


_NEWEST: list[torch.Tensor] = []


class _KeepsTheLastInputs(torch.autograd.Function):
    """Its backward reads what the newest forward left, whoever's that was."""

    @staticmethod
    def forward(_ctx: Any, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        log_prob, _ = _fused(logits.detach(), targets, with_entropy=False)
        _NEWEST[:] = logits.softmax(1), torch.nn.functional.one_hot(targets, logits.shape[1]).float()
        return cast("torch.Tensor", log_prob)

    @staticmethod
    def backward(_ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor, None]:
        softmax, hot = _NEWEST
        return (hot - softmax) * upstream[:, None], None


def _keeps_the_last_inputs(logits: torch.Tensor, targets: torch.Tensor, **_: Any) -> Any:
    return _KeepsTheLastInputs.apply(logits, targets), None


def _follows_autocast(logits: torch.Tensor, targets: torch.Tensor, **keywords: Any) -> Any:
    if torch.is_autocast_enabled("cpu"):
        logits = logits.to(torch.get_autocast_dtype("cpu")).float()
    return _fused(logits, targets, **keywords)


def _insists_on_gradients(logits: torch.Tensor, targets: torch.Tensor, **keywords: Any) -> Any:
    with torch.enable_grad():
        return _fused(logits, targets, **keywords)


def _another_value_without_gradients(logits: torch.Tensor, targets: torch.Tensor, **keywords: Any) -> Any:
    return _fused(logits if torch.is_grad_enabled() else logits * 1.01, targets, **keywords)


@pytest.mark.parametrize(
    ("check", "faulty", "mode"),
    [
        ("entropy_presence", _always_entropy, "off"),
        ("entropy_presence", _never_entropy, "value"),
        ("entropy_requires_grad", _detached_entropy, "gradient"),
        ("entropy_requires_grad", _attached_entropy, "value"),
        ("repeat_bitwise", _drifts, "off"),
        ("repeat_bitwise", _stale_by_address, "off"),
        ("chunk_invariant", _drops_the_last_chunk, "off"),
        ("mask_target_kept", _masks_the_target, "gradient"),
        ("mask_zero_gradient", _ignores_the_mask, "off"),
        ("mask_entropy_unmasked", _masked_entropy, "value"),
        ("mask_entropy_unmasked", _masked_entropy, "gradient"),
        ("empty_batch", _needs_rows, "gradient"),
        ("empty_batch", _detached_when_empty, "off"),
        ("noncontiguous_logits", _reads_as_contiguous, "off"),
        ("half_precision_logits", _wants_float32, "gradient"),
        ("half_precision_logits", _garbles_half, "gradient"),
        ("target_range", _clamps_targets, "off"),
        ("result_dtype", _double_output, "off"),
        ("zero_upstream", _spreads_nan, "gradient"),
        ("no_grad", _insists_on_gradients, "off"),
        ("no_grad", _another_value_without_gradients, "gradient"),
        ("autocast", _follows_autocast, "gradient"),
        ("thread_safe", _keeps_the_last_inputs, "off"),
    ],
)
def test_a_faulty_kernel_fails_its_check_and_the_reason_is_said(
    check: str, faulty: Callable[..., Any], mode: Any, inputs: Inputs
) -> None:
    assert _faults(_run(faulty), inputs, Options(mode))[check]


def test_a_gradient_left_undefined_for_one_output_fails(tampered: Any, inputs: Inputs) -> None:
    fault = _faults(tampered(gradient=lambda _: None), inputs)["gradient_defined"]
    assert fault == "a loss on log_prob alone leaves the logits without a gradient"


def test_a_second_backward_may_raise_but_not_differ(inputs: Inputs) -> None:
    calls = count(1)

    class Accumulates(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
            ctx.shape = logits.shape
            return logits.sum(1)

        @staticmethod
        def backward(ctx: Any, upstream: torch.Tensor) -> torch.Tensor:
            return upstream[:, None].expand(ctx.shape) * next(calls)

    def run(logits: torch.Tensor, targets: torch.Tensor, **keywords: Any) -> Any:
        return Accumulates.apply(logits), None

    fault = _faults(Subject("accumulates", run), inputs, Options("off"))["second_backward"]
    assert fault == "a second backward differs from the first without an error"


def test_outputs_of_another_shape_fail(inputs: Inputs) -> None:
    result = branches(_run(_fused), inputs, Options("off"))
    faults = run_checks(Probe(Local(_run(_column_output)), inputs, Options("off"), result))
    assert faults["result_shape"] == "log_prob has shape (8, 1), not (8,)"
    assert faults["empty_batch"] == "log_prob has shape (0, 1), not (0,)"


def test_a_documented_ignore_of_out_of_range_targets_passes(inputs: Inputs) -> None:
    def run(logits: torch.Tensor, targets: torch.Tensor, **keywords: Any) -> Any:
        inside = (targets >= 0) & (targets < logits.shape[1])
        log_prob, entropy = _fused(logits, targets.where(inside, 0), **keywords)
        return log_prob * inside, entropy

    assert _faults(Subject("ignores", run), inputs)["target_range"] is None


def test_an_exception_inside_a_check_is_a_failure_with_its_first_line(inputs: Inputs) -> None:
    fault = _faults(_run(_needs_rows), inputs)["empty_batch"]
    assert fault == "raised RuntimeError: max(): Expected reduction dim to be specified"


@pytest.mark.parametrize(
    ("missing", "left_out"),
    [
        ("chunk_size", {"chunk_invariant"}),
        ("keep_mask", {"mask_target_kept", "mask_zero_gradient", "mask_entropy_unmasked"}),
        ("with_entropy", {"entropy_presence"}),
    ],
)
def test_a_check_of_an_argument_that_is_not_taken_is_left_out(
    missing: str, left_out: set[str], clean: Subject, inputs: Inputs
) -> None:
    subject = replace(clean, takes=ARGUMENTS - {missing})
    assert set(_faults(clean, inputs)) - set(_faults(subject, inputs)) == left_out


def test_a_value_only_entropy_is_checked_only_where_it_can_be_asked_for(clean: Subject, inputs: Inputs) -> None:
    older = replace(clean, takes=ARGUMENTS - {"with_entropy_grad"})
    assert "entropy_requires_grad" not in _faults(older, inputs, Options("value"))
    assert _faults(older, inputs)["entropy_requires_grad"] is None


def test_checks_run_on_small_cases_only() -> None:
    assert applies(Case(tokens=64, vocabulary=8192))
    assert not applies(Case(tokens=65, vocabulary=8192))


def test_no_row_leaves_out_the_checks_that_need_one(clean: Subject, inputs: Inputs) -> None:
    none = Inputs(inputs.logits[:0], inputs.targets[:0], None, inputs.targets[:0].float(), inputs.targets[:0].float())
    faults = _faults(clean, none)
    assert set(faults) == {
        "entropy_presence", "entropy_requires_grad", "gradient_defined", "empty_batch", "result_dtype", "result_shape"
    }  # fmt: skip
    assert not any(faults.values())
