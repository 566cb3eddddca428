"""How values, times, states and rules read on a page.

Values come in base units (seconds, bytes, dimensionless) and are rounded here, at the edge, and nowhere else. Nothing
here decides anything: states and limits are what the judge stored.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from statistics import median

from service.catalogue import BY_NAME, Family, Metric, MetricClass, Rule

NONE = "\N{EN DASH}"
CI = {
    "pass": "CI passes (exit 0)",
    "fail": "CI fails (exit 1)",
    "undecided": "undecided: the project's CI decides (exit 2)",
}


@dataclass(frozen=True, slots=True)
class State:
    """A verdict state as a reader meets it, and what it means."""

    word: str
    meaning: str


STATES: dict[str, State] = {
    state.word: state
    for state in (
        State("regress", "something got worse than its baseline by its rule"),
        State("invalid", "a measurement cannot be used and there is nothing to compare it with"),
        State("incomparable", "the baseline was measured in another environment only"),
        State("missing", "a required measurement is not there"),
        State("no-baseline", "measured, but no measured ancestor to compare with"),
        State("inconclusive", "the samples do not allow a decision"),
        State("improve", "something got better by its rule, and nothing got worse"),
        State("pass", "nothing changed by any rule"),
    )
}

RULES: dict[Rule, str] = {
    Rule.BYTES: "regresses when it grows by more than max(4 KiB, 0.1 %)",
    Rule.COUNT: "regresses when it grows by more than 1 % and by at least 2",
    Rule.ANY_CHANGE: "any change regresses",
    Rule.ERROR_MAX: "regresses when it is above the floor and at least 2x its baseline",
    Rule.ERROR_RMS: "regresses when it is above the floor and at least 1.41x its baseline",
    Rule.TALLY: "any growth regresses",
    Rule.SHARE: "regresses when it passes 1e-2 and doubles",
    Rule.BITS: "regresses when it falls by 3 bits or more",
    Rule.CHECK: "regresses when it passed and fails now",
    Rule.INFORMATIONAL: "shown for information, decides nothing",
}


@dataclass(frozen=True, slots=True)
class Quantity:
    """A value as text, and the same value in a second unit where that helps."""

    text: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.text} ({self.detail})" if self.detail else self.text


def quantity(value: float | None, unit: str, unit_bytes: int = 0) -> Quantity:
    """A value in a metric's base unit. Bytes are shown in U (`unit_bytes`, the case's logits buffer) and binary units,
    seconds with SI prefixes, errors in scientific form.
    """
    if value is None:
        return Quantity(NONE)
    if unit == "byte" and unit_bytes:
        return Quantity(f"{value / unit_bytes:.2f} U", binary_bytes(value))
    return Quantity(_BY_UNIT.get(unit, _count)(value))


def binary_bytes(value: float) -> str:
    """Bytes with a binary prefix and three significant digits: `12.0 MiB`."""
    power = min(int(math.log2(abs(value)) // 10), 4) if abs(value) >= 1 else 0
    scaled = value / 1024**power
    return f"{scaled:,.{_decimals(scaled)}f} {'KMGT'[power - 1]}iB" if power else f"{value:.0f} B"


def si_seconds(value: float) -> str:
    """Seconds with an SI prefix and three significant digits: `1.23 ms`."""
    for factor, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if abs(value) >= factor:
            return f"{value / factor:,.{_decimals(value / factor)}f} {unit}"
    return f"{value / 1e-9:.3g} ns" if value else "0 s"


def scientific(value: float) -> str:
    """Three significant digits and an exponent without padding: `1.41e-3`; zero is `0`."""
    if value == 0:
        return "0"
    digits, exponent = f"{value:.2e}".split("e")
    return f"{digits}e{int(exponent)}"


def _decimals(value: float) -> int:
    return 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0


def _count(value: float) -> str:
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.1f}"


_BY_UNIT: dict[str, Callable[[float], str]] = {
    "byte": binary_bytes,
    "second": si_seconds,
    "1": scientific,
    "nat": scientific,
    "ulp": lambda value: f"{value:.3g} ulp",
    "bit": lambda value: f"{value:.0f} bits",
    "pass": lambda value: "passes" if value else "fails",
}


def change(before: float | None, after: float | None, metric_name: str) -> str:
    """The step from baseline to candidate in words: `1.50x more memory`, `passed, fails now`; empty where one of them
    has no finite value.
    """
    if before is None or after is None:
        return ""
    if before == after:
        return "unchanged"
    metric = BY_NAME[metric_name]
    if metric.rule is Rule.CHECK:
        return "failed, passes now" if after else "passed, fails now"
    if metric.rule is Rule.BITS:
        return f"{abs(after - before):.0f} bits {'more' if after > before else 'fewer'}"
    grows, noun = abs(after) > abs(before), _noun(metric)
    smaller, larger = sorted((abs(before), abs(after)))
    if smaller == 0:
        return f"{noun} where there was none" if grows else f"no {noun} left"
    return f"{_ratio(larger / smaller)} {_comparative(metric, grows)}"


def _ratio(ratio: float) -> str:
    if ratio < 1.1:
        return f"{100 * (ratio - 1):.2g} %"
    return f"{ratio:.2f}x" if ratio < 10 else f"{float(f'{ratio:.3g}'):,.{int(ratio < 100)}f}x"


def _noun(metric: Metric) -> str:
    if metric.unit not in ("byte", "1", "nat", "ulp", "second"):
        return f"{metric.unit}s"
    if metric.family is Family.PRECISION:
        return "share" if metric.rule is Rule.SHARE else "error"
    return "traffic" if metric.family is Family.WORK else str(metric.family)


def _comparative(metric: Metric, grows: bool) -> str:
    noun = _noun(metric)
    if noun in ("error", "share"):
        return f"{'larger' if grows else 'smaller'} {noun}"
    if metric.metric_class is MetricClass.TIMING:
        return "longer" if grows else "shorter"
    less = "less" if metric.unit == "byte" else "fewer"
    return f"{'more' if grows else less} {noun}"


def rule_words(rule: str) -> str:
    """What a rule's name stands for; a rule of a newer judge is shown by its name."""
    return RULES[Rule(rule)] if rule in set(Rule) else rule


def state(word: str | None) -> State:
    """A state by its word; a commit that was never judged has none and is `unjudged`."""
    return STATES.get(word or "", State(word or "unjudged", "not judged yet"))


def ci(word: str) -> str:
    """What `ulpwatch gate` makes of a verdict."""
    return CI.get(word, CI["undecided"])


def samples_median(samples: Sequence[float]) -> float | None:
    """The middle of the finite raw samples, or None where there are none."""
    finite = [sample for sample in samples if math.isfinite(sample)]
    return median(finite) if finite else None


def raw(value: float) -> str:
    """A raw sample with every digit that it has; whole numbers without a fraction."""
    whole = float(value).is_integer() and abs(value) < 1e15  # a float by its type may be an int out of JSON
    return str(int(value)) if whole else repr(value)


def sample(value: float) -> str:
    """A raw sample to be read: whole numbers in full, six digits of a fraction."""
    return raw(value) if float(value).is_integer() else f"{value:.6g}"


def instant(at: datetime) -> str:
    """ISO 8601 in UTC, to the second, for machines."""
    return at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def minute(at: datetime) -> str:
    """ISO 8601 in UTC, to the minute, for people."""
    return at.astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC")


def short(sha: str) -> str:
    """A commit id as people write it."""
    return sha[:7]


def plural(count: int, noun: str) -> str:
    """`1 finding`, `2 findings`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
