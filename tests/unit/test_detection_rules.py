"""Each rule with an example on each side of its line, and what is undecided."""

import math

import pytest

from service.catalogue import BY_NAME, METRICS, Rule
from service.detection.rules import (
    RULES,
    Reading,
    Relation,
    confirmed,
    cross,
    effect,
    floor,
    relate,
    worst,
)

F = 1e-6


def relation(metric: str, before: float, *samples: float, at: float = F, nonfinite: bool = False) -> Relation:
    return relate(BY_NAME[metric], before, Reading(samples, nonfinite), at)


def test_every_rule_of_the_catalogue_that_decides_is_implemented() -> None:
    assert {metric.rule for metric in METRICS} - {Rule.INFORMATIONAL} == set(RULES)


@pytest.mark.parametrize(
    ("metric", "before", "inside", "over"),
    [
        ("step_peak_bytes", 1_000_000.0, 1_004_096.0, 1_004_097.0),  # 4 KiB
        ("step_peak_bytes", 1e10, 1e10 + 1e7, 1e10 + 1e7 + 1),  # 0.1 %
        ("operations", 1000.0, 1010.0, 1011.0),  # 1 %
        ("operations", 20.0, 21.0, 22.0),  # at least 2
        ("traffic_bytes", 0.0, 1.0, 2.0),
        ("collectives", 2.0, 2.0, 3.0),
        ("collectives", 2.0, 2.0, 1.0),
        ("lp_abs_max", 1e-4, 1.999e-4, 2e-4),  # log2 = 1
        ("g_rel_l2_lp", 1e-4, 1.414e-4, 1.4143e-4),  # log2 = 0.5
        ("lp_abs_max", 0.0, F, 1.001 * F),  # at the floor
        ("g_scale_lp", 0.0, -F, -2 * F),  # signed: by its size
        ("lp_pos_count", 3.0, 3.0, 4.0),
        ("g_bf16_grid", 0.02, 0.039, 0.04),
        ("g_bf16_grid", 0.0, 0.01, 0.0101),
        ("g_mantissa_bits", 24.0, 22.0, 21.0),
        ("inputs_unchanged", 1.0, 1.0, 0.0),
    ],
)
def test_a_rule_has_its_line(metric: str, before: float, inside: float, over: float) -> None:
    assert relation(metric, before, inside) is Relation.SAME
    assert relation(metric, before, over) is Relation.WORSE


@pytest.mark.parametrize(
    ("metric", "before", "same", "better"),
    [
        ("step_peak_bytes", 1_004_097.0, 1_000_001.0, 1_000_000.0),
        ("operations", 22.0, 21.0, 20.0),
        ("lp_abs_max", 2e-4, 1.001e-4, 1e-4),
        ("g_rel_l2_lp", F, 0.0, -1.0),  # at or under the floor nothing is better
        ("g_rel_l2_lp", 1e-3, 8e-4, 0.0),
        ("grad_leak_lp", 1.0, 1.0, 0.0),
        ("g_mantissa_bits", 21.0, 23.0, 24.0),
        ("inputs_unchanged", 0.0, 0.0, 1.0),
    ],
)
def test_an_improvement_is_the_rule_mirrored(metric: str, before: float, same: float, better: float) -> None:
    assert relation(metric, before, same) is Relation.SAME
    if better >= 0:
        assert relation(metric, before, better) is Relation.BETTER


def test_samples_that_differ_are_noise() -> None:
    base = 1_000_000.0
    assert relation("step_peak_bytes", base, base, base + 4096) is Relation.SAME
    assert relation("step_peak_bytes", base, base, base + 5000) is Relation.UNCLEAR
    assert relation("step_peak_bytes", base, base + 5000, base + 9000) is Relation.WORSE
    assert relation("step_peak_bytes", base, base / 2, base) is Relation.SAME
    assert relation("step_peak_bytes", base, base / 2, base / 3) is Relation.BETTER
    assert relation("collectives", 2.0, 2.0, 3.0) is Relation.UNCLEAR


def test_of_a_check_and_of_a_tally_one_bad_sample_suffices() -> None:
    assert relation("repeat_bitwise", 1.0, 1.0, 0.0) is Relation.WORSE
    assert relation("nonfinite_unexpected", 0.0, 0.0, 1.0) is Relation.WORSE


def test_not_finite_is_worse_than_any_number_and_the_same_as_itself() -> None:
    assert relation("lp_abs_max", 1.0, nonfinite=True) is Relation.WORSE
    assert relation("lp_abs_max", 1.0, 1.0, nonfinite=True) is Relation.WORSE
    assert relation("lp_abs_max", math.inf, nonfinite=True) is Relation.SAME
    assert relation("lp_abs_max", math.inf, 1.0) is Relation.BETTER
    assert relation("g_mantissa_bits", 24.0, nonfinite=True) is Relation.WORSE


def test_the_limit_of_a_value_that_is_not_finite_is_finite() -> None:
    assert cross(BY_NAME["lp_abs_max"], 1.0, math.inf, F).limit == 2.0


@pytest.mark.parametrize(
    ("metric", "dtype", "facts", "expected"),
    [
        ("lp_abs_max", "float32", {"scale": 12.0}, 12 * 2.0**-24),
        ("lp_abs_max", "float32", {"scale": 0.5}, 2.0**-24),
        ("lp_abs_max", "bfloat16", {"scale": 12.0}, 12 * 2.0**-24),  # outputs are float32
        ("g_rel_l2_lp", "float32", {"noise": 1e-6}, 4e-6),
        ("g_rel_l2_lp", "bfloat16", {"noise": 1.0}, 2.0**-8),
        ("g_rel_l2_lp", "float16", {}, 2.0**-11),
        ("legacy_delta_g_lp", "float32", {}, 2.0**-8),
        ("g_ulp_p999_lp", "float32", {}, 1.0),
        ("g_ulp_p999_lp", "float32", {"noise": 2.0**-24}, 4.0),
        ("step_peak_bytes", "float32", {"noise": 1.0}, 0.0),
    ],
)
def test_the_floor_of_a_metric(metric: str, dtype: str, facts: dict[str, float], expected: float) -> None:
    assert floor(BY_NAME[metric], dtype, **facts) == pytest.approx(expected, rel=1e-12)


def test_an_exact_improvement_is_confirmed_by_two_equal_samples() -> None:
    metric = BY_NAME["step_peak_bytes"]
    assert confirmed(metric, Reading((5.0, 5.0)), repeatable=False)
    assert not confirmed(metric, Reading((5.0,)), repeatable=True)
    assert not confirmed(metric, Reading((5.0, 6.0)), repeatable=True)


def test_a_numeric_improvement_is_confirmed_by_the_bitwise_repetition() -> None:
    metric = BY_NAME["lp_abs_max"]
    assert confirmed(metric, Reading((1e-6,)), repeatable=True)
    assert not confirmed(metric, Reading((1e-6,)), repeatable=False)
    assert not confirmed(metric, Reading((), nonfinite=True), repeatable=True)


def test_an_effect_is_a_binary_logarithm_where_there_is_one() -> None:
    assert effect(2.0, 8.0) == 2.0
    assert effect(0.0, 8.0) is None
    assert effect(1.0, math.inf) is None
    assert effect(None, 1.0) is None


def test_the_worst_of_a_metric_where_more_is_better_is_the_smallest() -> None:
    assert worst(BY_NAME["g_mantissa_bits"], Reading((24.0, 8.0))) == 8.0
