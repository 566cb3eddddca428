"""The rules that compare two values of one metric, one function a rule (METHOD sections 3, 4 and 6).

A rule knows only a value before, a value after and a floor; what "before" is, is decided in service.detection.levels.
An improvement is the mirror image: a change whose way back would be a regression.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from service.catalogue import Metric, MetricClass, Rule

RULE_VERSION = 1

BYTES_SLACK = 4096.0
BYTES_SHARE = 0.001
COUNT_SHARE = 0.01
COUNT_SLACK = 2.0
MAX_FACTOR = 2.0  # log2 >= 1
RMS_FACTOR = math.sqrt(2.0)  # log2 >= 0.5
FLOOR_SHARE = 1 / 8
NOISE_FACTOR = 4.0
SHARE_FLOOR = 1e-2
SHARE_FACTOR = 2.0
BITS_LOST = 3.0
UNIT_ROUNDOFF = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}

PARAMETERS: dict[str, float] = {
    "bytes_slack": BYTES_SLACK,
    "bytes_share": BYTES_SHARE,
    "count_share": COUNT_SHARE,
    "count_slack": COUNT_SLACK,
    "max_factor": MAX_FACTOR,
    "rms_factor": RMS_FACTOR,
    "floor_share": FLOOR_SHARE,
    "noise_factor": NOISE_FACTOR,
    "share_floor": SHARE_FLOOR,
    "share_factor": SHARE_FACTOR,
    "bits_lost": BITS_LOST,
}

NONFINITE = math.inf
"""Stands for a metric that came out NaN or infinite. Never leaves this package as a number: JSON holds null."""

_ONE_SAMPLE_SUFFICES = frozenset({Rule.CHECK, Rule.TALLY})


@dataclass(frozen=True, slots=True)
class Reading:
    """All samples of one metric at one commit in one segment, repetitions pooled; unordered.

    `nonfinite` says that at least one repetition gave NaN or infinity. `note` is the measurement's own word on it.
    """

    samples: tuple[float, ...]
    nonfinite: bool = False
    note: str = ""


class Relation(StrEnum):
    """How a reading stands to a value: worse or better than it by the rule, the same, or unclear because the samples
    differ and the limit lies between them."""

    WORSE = "worse"
    BETTER = "better"
    SAME = "same"
    UNCLEAR = "unclear"


@dataclass(frozen=True, slots=True)
class Crossing:
    """A rule's answer: is `after` over the limit, and the limit that `before` sets, in the metric's unit."""

    worse: bool
    limit: float


def bytes_rule(before: float, after: float, floor: float) -> Crossing:
    """Memory: regress if it grows by more than max(4 KiB, 0.1 %)."""
    del floor
    slack = max(BYTES_SLACK, BYTES_SHARE * before)
    return Crossing(after - before > slack, before + slack)


def count_rule(before: float, after: float, floor: float) -> Crossing:
    """Operations, allocations and traffic, whole numbers: regress if they grow by more than 1 % and by at least 2."""
    del floor
    growth = after - before
    return Crossing(
        growth > COUNT_SHARE * before and growth >= COUNT_SLACK,
        before + max(COUNT_SHARE * before, COUNT_SLACK - 1),
    )


def any_change_rule(before: float, after: float, floor: float) -> Crossing:
    """Collectives: every change regresses."""
    del floor
    return Crossing(after != before, before)


def error_max_rule(before: float, after: float, floor: float) -> Crossing:
    """Worst-case errors: regress above the floor at log2(x / max(B, F/8)) >= 1."""
    return _error(before, after, floor, MAX_FACTOR)


def error_rms_rule(before: float, after: float, floor: float) -> Crossing:
    """Averaged errors: regress above the floor at log2(x / max(B, F/8)) >= 0.5."""
    return _error(before, after, floor, RMS_FACTOR)


def _error(before: float, after: float, floor: float, factor: float) -> Crossing:
    threshold = factor * max(before, floor * FLOOR_SHARE)
    return Crossing(after > floor and after >= threshold, max(floor, threshold))


def tally_rule(before: float, after: float, floor: float) -> Crossing:
    """Counts of wrong rows or elements: any growth regresses."""
    del floor
    return Crossing(after > before, before)


def share_rule(before: float, after: float, floor: float) -> Crossing:
    """A share of suspicious elements: regress if it is over 1e-2 and has at least doubled."""
    del floor
    threshold = SHARE_FACTOR * before
    return Crossing(after > SHARE_FLOOR and after >= threshold, max(SHARE_FLOOR, threshold))


def bits_rule(before: float, after: float, floor: float) -> Crossing:
    """Effective mantissa bits: regress if 3 or more are lost (24 -> 8 is a bfloat16 cast)."""
    del floor
    return Crossing(before - after >= BITS_LOST, before - BITS_LOST)


def check_rule(before: float, after: float, floor: float) -> Crossing:
    """Contract checks: pass (1) -> fail (0) regresses."""
    del floor
    return Crossing(after < before, before)


RULES: dict[Rule, Callable[[float, float, float], Crossing]] = {
    Rule.BYTES: bytes_rule,
    Rule.COUNT: count_rule,
    Rule.ANY_CHANGE: any_change_rule,
    Rule.ERROR_MAX: error_max_rule,
    Rule.ERROR_RMS: error_rms_rule,
    Rule.TALLY: tally_rule,
    Rule.SHARE: share_rule,
    Rule.BITS: bits_rule,
    Rule.CHECK: check_rule,
}


def floor(metric: Metric, dtype: str, *, noise: float = 0.0, scale: float = 1.0) -> float:
    """F of METHOD section 4, in the metric's unit: two errors at or under it are equal.

    `dtype` is the case's logits dtype, which is the gradient's; outputs are float32 whatever it is, and the distance to
    the legacy gradient is taken in bfloat16. float32: max(u x scale, 4 x noise) with `scale` at least 1 for absolute
    metrics and 1 for relative ones. bfloat16, float16: u. In ulps the floor is that of the relative error over u, at
    least 1. Rules that know no floor get 0.
    """
    if metric.rule not in (Rule.ERROR_MAX, Rule.ERROR_RMS):
        return 0.0
    held_in = _dtype_of(metric, dtype)
    unit = UNIT_ROUNDOFF[held_in]
    relative = max(unit * max(1.0, scale), NOISE_FACTOR * noise) if held_in == "float32" else unit
    return max(1.0, relative / unit) if metric.unit == "ulp" else relative


def _dtype_of(metric: Metric, dtype: str) -> str:
    if metric.name == "legacy_delta_g_lp":
        return "bfloat16"
    return dtype if metric.name.startswith("g_") else "float32"


def cost(metric: Metric, sample: float) -> float:
    """The value that the rules see: a signed error counts by its size."""
    return abs(sample) if metric.signed else sample


def worst(metric: Metric, reading: Reading) -> float:
    """The worst of a reading's samples as the rules see it; NONFINITE if any repetition was."""
    if reading.nonfinite:
        return NONFINITE
    costs = [cost(metric, sample) for sample in reading.samples]
    return min(costs) if metric.higher_is_better else max(costs)


def best(metric: Metric, reading: Reading) -> float:
    """The best of a reading's samples as the rules see it; NONFINITE if any repetition was: any count regresses."""
    if reading.nonfinite:
        return NONFINITE
    costs = [cost(metric, sample) for sample in reading.samples]
    return max(costs) if metric.higher_is_better else min(costs)


def cross(metric: Metric, before: float, after: float, floor: float) -> Crossing:
    """Apply the metric's rule. Non-finite where the value before was finite is worse, whatever the rule."""
    if before == NONFINITE:
        return Crossing(False, NONFINITE)
    if after == NONFINITE:
        return Crossing(True, RULES[metric.rule](before, before, floor).limit)
    return RULES[metric.rule](before, after, floor)


def relate(metric: Metric, before: float, reading: Reading, floor: float) -> Relation:
    """Where a reading stands to a value.

    Samples that differ are noise (METHOD section 3): worse only if even the best is over the limit, better only if even
    the worst is, and unclear if the limit lies between them. Of checks and tallies of wrong elements one bad sample
    suffices.
    """
    low, high = best(metric, reading), worst(metric, reading)
    over = [cross(metric, before, value, floor).worse for value in (low, high)]
    if all(over) or (over[1] and metric.rule in _ONE_SAMPLE_SUFFICES):
        return Relation.WORSE
    if any(over):
        return Relation.UNCLEAR
    return Relation.BETTER if cross(metric, high, before, floor).worse else Relation.SAME


def equal_samples(reading: Reading) -> bool:
    """Every repetition gave the same value."""
    return len(set(reading.samples)) <= 1


def confirmed(metric: Metric, reading: Reading, *, repeatable: bool) -> bool:
    """May an improvement tighten the accepted value at once? `repeatable`: the case's bitwise repetition did not fail.

    Exact metrics by two equal samples. Numeric metrics and checks by that repetition, which is their second pass.
    """
    if reading.nonfinite or not equal_samples(reading):
        return False
    return len(reading.samples) >= 2 if metric.metric_class is MetricClass.EXACT else repeatable


def effect(before: float | None, after: float | None) -> float | None:
    """log2(after / before): 1 is twice as much. None where one of them is 0, missing or not finite."""
    if before is None or after is None or before <= 0 or after <= 0 or NONFINITE in (before, after):
        return None
    ratio = after / before
    return math.log2(ratio) if 0 < ratio < math.inf else math.log2(after) - math.log2(before)
