"""Gathers what a commit changed into findings: one per kernel, family and direction, each with one sentence.

The sentence is for a person who did not write the kernel: what, of which kernel, from what to what, where, at which
commit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from service.catalogue import BY_NAME, METRICS, Family, Metric, Rule
from service.detection.levels import Decision, State

BFLOAT16_BITS = 8

_LEADS = ("step_peak_bytes", "operations", "callable", "completes", "g_rel_l2_lp", "g_rel_l2_ent", "lp_abs_max")
_PLACE = {name: place for place, name in enumerate(dict.fromkeys((*_LEADS, *(metric.name for metric in METRICS))))}
_TRAITS = ("dtype", "distribution", "tensor_parallel", "keep_mask", "chunk_size", "temperature", "entropy", "upstream")


@dataclass(frozen=True, slots=True)
class Change:
    """One comparison that regressed or improved. Values in the metric's base unit, None where not finite; `unit_bytes`
    is the case's U, `case` its parameters. `required` says that the target's verdict counts it,
    `decided` what a person made of it."""

    kernel: str
    case_id: str
    case: Mapping[str, Any]
    unit_bytes: int
    metric: str
    state: State
    before: float | None
    after: float | None
    limit: float | None
    effect: float | None
    reason: str
    samples: tuple[float, ...]
    device: str
    required: bool = True
    decided: Decision | None = None


@dataclass(frozen=True, slots=True)
class Cluster:
    """A finding in the making; `changes` are sorted, the one that leads the sentence first."""

    kernel: str
    family: Family
    direction: State
    sentence: str
    changes: tuple[Change, ...]

    @property
    def required(self) -> bool:
        """Does any of it count for the target's verdict?"""
        return any(change.required for change in self.changes)

    @property
    def decided(self) -> Decision | None:
        """What a person made of it, where that is about all of it."""
        return self.changes[0].decided if all(change.decided for change in self.changes) else None


def cluster(
    changes: Sequence[Change], measured: Mapping[str, Mapping[str, Mapping[str, Any]]], sha: str
) -> tuple[Cluster, ...]:
    """One cluster per kernel, family and direction, the most serious first. `measured`: kernel -> case id -> parameters
    of all its cases.
    """
    groups: dict[tuple[str, Family, State], list[Change]] = {}
    for change in changes:
        groups.setdefault((change.kernel, BY_NAME[change.metric].family, change.state), []).append(change)
    clusters = []
    for (kernel, family, direction), members in groups.items():
        ranked = tuple(sorted(members, key=_rank))
        leading = [change for change in ranked if change.metric == ranked[0].metric]
        sentence = f"{_what(ranked)} {_where(leading, measured[kernel])}, at {sha[:7]}"
        clusters.append(Cluster(kernel, family, direction, sentence, ranked))
    return tuple(sorted(clusters, key=_severity))


def _severity(one: Cluster) -> tuple[bool, int, str]:
    return one.direction is not State.REGRESS, one.family.rank, one.kernel


def metric_place(metric: str) -> int:
    """The rank of a metric among those of a finding or a list: the telling ones first."""
    return _PLACE[metric]


def _rank(change: Change) -> tuple[Any, ...]:
    """The telling metric first, and before all what is not a number any more or has become one."""
    size = float("inf") if change.effect is None else abs(change.effect)
    return (
        None not in (change.before, change.after),
        metric_place(change.metric),
        -size,
        -change.unit_bytes,
        change.case_id,
        change.device,
    )


def _what(ranked: Sequence[Change]) -> str:
    """The leading change in words, with its two values."""
    lead = ranked[0]
    metric = BY_NAME[lead.metric]
    if metric.rule is Rule.CHECK:
        broken = "does not hold" if lead.before is None else "no longer holds"
        verb = broken if lead.state is State.REGRESS else "now holds"
        reason = f" ({lead.reason})" if lead.reason else ""
        others = len({change.metric for change in ranked}) - 1
        more = f" and {others} more check{'s' if others > 1 else ''}" if others else ""
        return f"contract of {lead.kernel}: “{metric.title}” {verb}{reason}{more}"
    title = f"{metric.title}," if "," in metric.title else metric.title
    values = f"{title} of {lead.kernel}: {_transition(metric, lead)}"
    bits = next((change for change in ranked if change.metric == "g_mantissa_bits"), None)
    if bits and bits.state is State.REGRESS and bits.after is not None and 0 < bits.after <= BFLOAT16_BITS:
        return f"a bfloat16 cast of the gradient ({bits.before:.0f} -> {bits.after:.0f} mantissa bits): {values}"
    return values


def _transition(metric: Metric, change: Change) -> str:
    before, after = (amount(metric, value, change.unit_bytes) for value in (change.before, change.after))
    if before == after and metric.unit == "byte":
        before, after = (amount(metric, value, 0) for value in (change.before, change.after))
    return f"{before} -> {after}"


def amount(metric: Metric, value: float | None, unit_bytes: int) -> str:
    """A value in words: bytes in U where the case has one, counts whole, errors to two digits."""
    if value is None:
        return "not finite"
    if metric.unit == "byte":
        return f"{value / unit_bytes:.2f} U" if unit_bytes else f"{value:,.0f} bytes"
    if value.is_integer() and abs(value) < 1e15:
        return f"{value:,.0f}" + ("" if metric.unit in ("1", "nat") else f" {metric.unit}{'' if value == 1 else 's'}")
    return f"{value:.2g}" + ("" if metric.unit == "1" else f" {metric.unit}")


def _where(ranked: Sequence[Change], measured: Mapping[str, Mapping[str, Any]]) -> str:
    """In how many of the kernel's cases the leading metric changed, where most, and what they have in common
    that not all cases have.
    """
    affected = {change.case_id: change.case for change in ranked}
    if len(affected) == 1:
        return f"in case {ranked[0].case_id}" + (f" (1 of {len(measured)})" if len(measured) > 1 else "")
    metric = BY_NAME[ranked[0].metric]
    values = {_transition(metric, change) for change in ranked}
    most = "" if metric.rule is Rule.CHECK or len(values) == 1 else f" (most in {ranked[0].case_id})"
    if len(affected) == len(measured):
        return f"in all {len(measured)} cases{most}"
    return (
        f"in {len(affected)} of {len(measured)} cases{_common(list(affected.values()), list(measured.values()))}{most}"
    )


def _common(affected: Sequence[Mapping[str, Any]], measured: Sequence[Mapping[str, Any]]) -> str:
    shared = [
        f"{trait.replace('_', ' ')} {_word(affected[0].get(trait))}"
        for trait in _TRAITS
        if len({str(case.get(trait)) for case in affected}) == 1
        and len({str(case.get(trait)) for case in measured}) > 1
    ]
    return f", all with {' and '.join(shared[:3])}" if shared else ""


def _word(value: Any) -> str:
    return (
        {True: "on", False: "off", None: "off"}.get(value, str(value)) if isinstance(value, bool | None) else str(value)
    )
