"""Accuracy: each numeric metric stays low for a clean kernel and moves for the fault it is there for."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from runners.instruments.accuracy import (
    bf16_grid_share,
    entropy_gate,
    entropy_range_violations,
    mantissa_bits,
    numeric_metrics,
    permuted,
    yardstick,
)
from runners.instruments.subject import Branches, Options, Subject, branches
from runners.kernels.inputs import Inputs, make_inputs
from runners.kernels.reference import reference
from service.catalogue import BY_NAME, MetricClass


def _metrics(subject: Subject, inputs: Inputs, how: Options | None = None) -> dict[str, float]:
    how = how or Options()
    shuffled, place = permuted(inputs)
    return numeric_metrics(
        inputs,
        how,
        branches(subject, inputs, how),
        branches(subject, shuffled, how),
        place,
        yardstick(inputs, how.temperature),
    )


@pytest.fixture
def inputs() -> Inputs:
    return make_inputs(tokens=16, vocabulary=512, distribution="flat")


def test_a_clean_kernel_has_every_numeric_metric_and_all_are_small(clean: Subject, inputs: Inputs) -> None:
    metrics = _metrics(clean, inputs)
    over_ranks = {"tp_delta_lp", "tp_delta_ent", "tp_delta_g_lp", "tp_delta_g_ent", "rank_disagree"}
    assert set(metrics) == {m.name for m in BY_NAME.values() if m.metric_class is MetricClass.NUMERIC} - over_ranks
    assert metrics["g_rel_l2_lp"] < 1e-6
    assert metrics["g_rel_l2_ent"] < 1e-5
    assert metrics["lp_abs_max"] < 1e-5
    assert metrics["ent_abs_max"] < 1e-4
    assert metrics["g_mantissa_bits"] == 24
    assert metrics["g_bf16_grid"] < 1e-2
    assert 0 < metrics["perm_delta_g_lp"] < 1e-6
    assert metrics["legacy_delta_g_lp"] < 1e-4
    assert all(value == 0 for name, value in metrics.items() if BY_NAME[name].rule == "tally")


@pytest.mark.parametrize(("mode", "absent"), [("off", ("ent", "_ent")), ("value", ("_ent",))])
def test_what_a_mode_does_not_ask_for_is_not_measured(clean: Subject, inputs: Inputs, mode: Any, absent: Any) -> None:
    metrics = _metrics(clean, inputs, Options(mode))
    gradients = [name for name in metrics if name.startswith(("g_", "grad_", "perm_delta_g")) and name.endswith("_ent")]
    assert gradients == []
    assert ("ent_abs_max" in metrics) == (mode == "value")


def _without_row(gradient: torch.Tensor) -> torch.Tensor:
    spoilt = gradient.clone()
    spoilt[gradient.abs().sum(1).argmax()] = 0
    return spoilt


def _leaking(gradient: torch.Tensor) -> torch.Tensor:
    return gradient + 1e-3 * (gradient.abs().sum(1, keepdim=True) == 0)


def _nan_once(gradient: torch.Tensor) -> torch.Tensor:
    spoilt = gradient.clone()
    spoilt[1, 1] = torch.nan
    return spoilt


def _bf16(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.bfloat16().float()


def _bf16_target(targets: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(gradient: torch.Tensor) -> torch.Tensor:
        spoilt = gradient.clone()
        return spoilt.scatter_(1, targets[:, None], (gradient.gather(1, targets[:, None]) + 1).bfloat16().float() - 1)

    return change


@pytest.mark.parametrize(
    ("gradient", "metric", "low", "high"),
    [
        (_bf16, "g_rel_l2_lp", 1e-4, 1e-2),
        (_bf16, "g_rel_l2_ent", 1e-4, 1e-2),
        (_bf16, "g_row_rel_l2_max_lp", 1e-4, 1e-2),
        (_bf16, "g_ulp_p50_lp", 1e3, 1e5),
        (_bf16, "g_ulp_p999_lp", 1e4, 1e6),
        (_bf16, "g_bf16_grid", 1, 1),
        (_bf16, "g_mantissa_bits", 8, 8),
        (_bf16, "g_ratio_to_peer_lp", 1e3, 1e6),
        (_bf16, "g_zero_sum_lp", 1e-6, 1e-2),
        (lambda g: g.half().float(), "g_mantissa_bits", 11, 24),
        (lambda g: g / 16, "g_scale_lp", -0.9376, -0.9374),
        (lambda g: g * 1.5, "g_scale_ent", 0.499, 0.501),
        (lambda g: g * 1.5, "legacy_delta_g_lp", 0.49, 0.51),
        (lambda g: g + 1e-4, "g_zero_sum_lp", 1e-3, 10),
        (_without_row, "grad_coverage_miss_lp", 1, 1),
        (_without_row, "grad_coverage_miss_ent", 1, 1),
        (_without_row, "g_row_rel_l2_max_lp", 1, 1),
        (lambda _: None, "grad_coverage_miss_lp", 12, 12),
        (lambda _: None, "g_rel_l2_lp", 1, 1),
        (lambda _: None, "g_mantissa_bits", 0, 0),
        (_leaking, "grad_leak_lp", 4, 4),
        (_nan_once, "nonfinite_unexpected", 2, 2),
    ],
)
def test_a_faulty_gradient_moves_its_metric(
    tampered: Any, clean: Subject, inputs: Inputs, gradient: Any, metric: str, low: float, high: float
) -> None:
    assert low <= _metrics(tampered(gradient=gradient), inputs)[metric] <= high
    assert not low <= _metrics(clean, inputs)[metric] <= high or metric == "g_mantissa_bits"


def test_the_peer_is_the_measure_of_its_ratio_but_never_below_one_rounding(clean: Subject, inputs: Inputs) -> None:
    how = Options("off")
    result, (shuffled, place) = branches(clean, inputs, how), permuted(inputs)
    yard = yardstick(inputs, 1.0)
    for peer_error, denominator in ((1e-3, 1e-3), (0.0, 2.0**-24)):
        held = replace(yard, peer_error={"lp": peer_error, "ent": peer_error})
        metrics = numeric_metrics(inputs, how, result, branches(clean, shuffled, how), place, held)
        assert metrics["g_ratio_to_peer_lp"] == pytest.approx(metrics["g_rel_l2_lp"] / denominator)
    assert 1e-9 < yard.peer_error["lp"] < 1e-6


def test_a_target_column_rewritten_in_bfloat16_shows_on_confident_rows(tampered: Any, clean: Subject) -> None:
    inputs = make_inputs(tokens=16, vocabulary=512, distribution="confident")
    faulty = tampered(gradient=_bf16_target(inputs.targets))
    assert _metrics(faulty, inputs, Options("off"))["g_tgt_rel_max"] > 0.1
    assert _metrics(clean, inputs, Options("off"))["g_tgt_rel_max"] < 1e-2


@pytest.mark.parametrize(
    ("change", "metric", "low", "high"),
    [
        (lambda r: (r[0].bfloat16().float(), r[1]), "lp_abs_max", 1e-4, 1e-1),
        (lambda r: (r[0].bfloat16().float(), r[1]), "legacy_delta_lp", 1e-4, 1e-1),
        (lambda r: (r[0], r[1] + 1e-2), "ent_abs_max", 9e-3, 1.1e-2),
        (lambda r: (r[0] + 100, r[1]), "lp_pos_count", 16, 16),
        (lambda r: (r[0], r[1] - 100), "ent_range_viol", 16, 16),
        (lambda r: (r[0], r[1] + 100), "ent_range_viol", 16, 16),
        (lambda r: (r[0] + torch.inf, r[1]), "nonfinite_unexpected", 16, 16),
    ],
)
def test_a_faulty_output_moves_its_metric(
    tampered: Any, clean: Subject, inputs: Inputs, change: Any, metric: str, low: float, high: float
) -> None:
    faulty = tampered(outputs=change)
    assert low <= _metrics(faulty, inputs)[metric] <= high
    assert _metrics(clean, inputs)[metric] < low


def test_a_nan_where_the_oracle_is_finite_is_never_a_small_error(tampered: Any, inputs: Inputs) -> None:
    metrics = _metrics(tampered(outputs=lambda r: (r[0] * torch.nan, r[1]), gradient=_nan_once), inputs)
    for name in ("lp_abs_max", "g_rel_l2_lp", "g_row_rel_l2_max_lp", "g_scale_lp", "g_zero_sum_lp"):
        assert not math.isfinite(metrics[name]), name


def test_a_perfect_half_precision_gradient_has_no_error(inputs: Inputs) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        half = replace(inputs, logits=inputs.logits.to(dtype))
        how = Options()
        truth = reference(
            half.logits,
            half.targets,
            upstream_log_prob=half.upstream_log_prob,
            upstream_entropy=half.upstream_entropy,
        )
        perfect = Branches(
            truth.log_prob.float(), truth.entropy.float(), truth.g_log_prob.to(dtype), truth.g_entropy.to(dtype)
        )
        shuffled, place = permuted(half)
        again = Branches(
            perfect.log_prob,
            perfect.entropy,
            truth.g_log_prob.to(dtype)[:, place.argsort()],
            truth.g_entropy.to(dtype)[:, place.argsort()],
        )
        assert shuffled.logits.equal(half.logits[:, place.argsort()])
        metrics = numeric_metrics(half, how, perfect, again, place, yardstick(half, 1.0))
        for name in ("g_rel_l2_lp", "g_ulp_p999_ent", "g_tgt_rel_max", "perm_delta_g_lp", "perm_delta_tgt"):
            assert metrics[name] == 0, (dtype, name)
        assert "g_bf16_grid" not in metrics


@pytest.mark.parametrize(
    "distribution",
    ["spread", "confident", "confident_wrong", "offset", "ties", "one_hot", "masked", "bf16_exact", "neg_inf"],
)
def test_every_distribution_gives_finite_metrics(clean: Subject, distribution: Any) -> None:
    metrics = _metrics(clean, make_inputs(tokens=5, vocabulary=64, distribution=distribution, upstream="one_row"))
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["nonfinite_unexpected"] == 0
    assert metrics["grad_coverage_miss_lp"] == 0


def test_no_token_at_all_gives_zeros(clean: Subject) -> None:
    metrics = _metrics(clean, make_inputs(tokens=0, vocabulary=8))
    assert all(value == 0 for value in metrics.values())


def test_temperature_reaches_the_oracle(clean: Subject, inputs: Inputs) -> None:
    assert _metrics(clean, inputs, Options(temperature=0.7))["g_rel_l2_lp"] < 1e-6


def test_a_kernel_that_ignores_the_temperature_is_seen(tampered: Any, inputs: Inputs) -> None:
    metrics = _metrics(tampered(temperature=1.0), inputs, Options(temperature=0.7))
    assert metrics["lp_abs_max"] > 0.1
    assert metrics["g_rel_l2_lp"] > 0.1


@pytest.mark.parametrize(
    ("values", "bits"),
    [([0.0, -0.0], 0), ([1.0, -2.0], 1), ([1.5], 2), ([1.0, 1 + 2.0**-7], 8), ([1 + 2.0**-10], 11), ([1 / 3], 24)],
)
def test_mantissa_bits_counts_the_bits_in_use(values: list[float], bits: int) -> None:
    assert mantissa_bits(torch.tensor([values])) == bits


def test_what_is_not_finite_has_no_bits() -> None:
    assert mantissa_bits(torch.tensor([[torch.nan, torch.inf, -torch.inf]])) == 0
    assert mantissa_bits(torch.tensor([[torch.nan, 1 / 3]])) == 24
    assert bf16_grid_share(torch.tensor([[torch.nan, torch.inf, 1.5, 1 / 3]])) == 0.5


def test_the_bfloat16_grid_is_a_share_of_the_non_zero_elements() -> None:
    assert bf16_grid_share(torch.tensor([[0.0, -0.0, 1.5, 1 / 3, -1 / 3, -2.0]])) == 0.5
    assert bf16_grid_share(torch.zeros(2, 2)) == 0.0


def test_an_entropy_counts_as_out_of_range_only_beyond_its_gate() -> None:
    slack = entropy_gate(30.0)
    entropy = torch.tensor([-0.9 * slack, -1.1 * slack, math.log(8) + 0.9 * slack, math.log(8) + 1.1 * slack])
    assert entropy_range_violations(entropy, vocabulary=8, logit_scale=30.0) == 2
