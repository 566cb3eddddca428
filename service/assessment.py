"""From a commit's comparisons to its verdict: state, reason in words, counts, and the document that explains it.

Reads and writes no table; the statistics are in service.detection.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from service import queries
from service.catalogue import BY_NAME
from service.detection.clusters import Change, Cluster, cluster, metric_place
from service.detection.commits import ENDINGS, Comparison, Judgement, Observation
from service.detection.level_sets import Levels, Standing, device_class, open_levels
from service.detection.levels import State
from service.detection.rules import PARAMETERS, RULE_VERSION
from service.history import ancestry
from service.plans import History, Plan

_GROUPED = (State.INCOMPARABLE, State.MISSING, State.NO_BASELINE)


@dataclass(frozen=True, slots=True)
class Assessment:
    """A verdict before it is stored."""

    state: State
    reason: str
    counts: dict[str, int]
    document: dict[str, Any]
    clusters: tuple[Cluster, ...]
    standing: Standing


def lasting_state(state: str, counts: Mapping[str, int]) -> State:
    """What a commit that changes nothing takes over from a verdict: what could not be measured is not measured there
    either; all else is as it was, which is pass."""
    return next((one for one in (State.INVALID, State.MISSING) if one == state or counts.get(one)), State.PASS)


def inherit(history: History, plan: Plan, standing: Standing, state: State) -> Assessment:
    """Nothing that is watched changed: what stands is the baseline's, `state` what lasts of its state."""
    document = _document(history, plan) | {"inherited": sorted(keys_in_force(history, standing.levels))}
    lasts = "" if state is State.PASS else f", whose measurements are {state} in part or in whole"
    reason = f"inherits: the watched paths are those of {plan.source[:7]}{lasts}"
    return Assessment(state, reason, {}, document, (), standing)


def assess(
    history: History, plan: Plan, judgement: Judgement, observations: Sequence[Observation], sha: str
) -> Assessment:
    """The verdict on a commit's comparisons: the most serious of the states that the target requires."""
    comparisons = sorted(judgement.comparisons, key=lambda item: _place(history, item))
    counted = [item for item in comparisons if _counts(history.definition["require"], item)]
    lacking = _devices_lacking(history.definition["require"], observations)
    counts = Counter(item.step.counts_as for item in counted)
    counts[State.MISSING] += len(lacking)
    present = {*(one for one in counts if counts[one]), *([] if counted else [State.MISSING])}
    state = next(state for state in State if state in present)
    changes = [_change(history, item) for item in comparisons if item.step.state in (State.REGRESS, State.IMPROVE)]
    clusters = cluster(changes, _measured_cases(history, observations), sha)
    inherited = keys_in_force(history, judgement.standing.levels, without=sha)
    recovered = {
        _level_key(history, item.series, item.metric, culprit)
        for item in comparisons
        for culprit in item.step.recovered
    }
    document = _document(history, plan) | {
        "changes": [plain(change) for change in changes],
        "undecided": _undecided(history, comparisons),
        "notices": [plain(_change(history, item)) for item in comparisons if _is_notice(item)],
        "inherited": sorted(inherited),
        "recovered": sorted(recovered - inherited),
    }
    reason = _reason(history, sha, state, plan, counted, lacking, clusters) + _aside(document["notices"])
    return Assessment(
        state,
        reason,
        {str(name): counts[name] for name in State if counts[name]},
        document,
        clusters,
        judgement.standing,
    )


def _place(history: History, comparison: Comparison) -> tuple[str, str, int, str]:
    """Where a comparison stands in lists, whatever the numbers of its rows."""
    series = history.series[comparison.series]
    return series.kernel, series.case_id, metric_place(comparison.metric), comparison.segment


def _document(history: History, plan: Plan) -> dict[str, Any]:
    """What every verdict stores of how it was reached: enough to judge the same again."""
    return {
        "rule_version": RULE_VERSION,
        "parameters": PARAMETERS,
        "require": history.definition["require"],
        "baseline": plan.baseline.sha if plan.baseline else None,
        "distance": plan.baseline.distance if plan.baseline else None,
        "source": plan.source,
        "changes": [],
        "undecided": [],
        "notices": [],
        "inherited": [],
        "recovered": [],
    }


def _counts(require: Mapping[str, Any], comparison: Comparison) -> bool:
    """Does the target require this comparison? How a case ended always counts."""
    if device_class(comparison.segment) not in require["devices"]:
        return False
    return comparison.metric in ENDINGS or BY_NAME[comparison.metric].metric_class in require["metrics"]


def _devices_lacking(require: Mapping[str, Any], observations: Sequence[Observation]) -> list[str]:
    measured = {device_class(item.segment) for item in observations}
    return [device for device in require["devices"] if device not in measured]


def _change(history: History, comparison: Comparison) -> Change:
    series, step = history.series[comparison.series], comparison.step
    return Change(
        kernel=series.kernel,
        case_id=series.case_id,
        case=series.case,
        unit_bytes=series.unit_bytes,
        metric=comparison.metric,
        state=step.state,
        before=step.before,
        after=step.after,
        limit=step.limit,
        effect=step.effect,
        reason=step.reason,
        samples=comparison.reading.samples if comparison.reading else (),
        device=comparison.device,
        required=_counts(history.definition["require"], comparison),
        decided=step.decided,
    )


def _measured_cases(history: History, observations: Sequence[Observation]) -> dict[str, dict[str, Mapping[str, Any]]]:
    cases: dict[str, dict[str, Mapping[str, Any]]] = {}
    for item in observations:
        series = history.series[item.series]
        cases.setdefault(series.kernel, {})[series.case_id] = series.case
    return cases


def plain(change: Change) -> dict[str, Any]:
    """A change as the read side's Affected, in plain JSON values."""
    metric = BY_NAME[change.metric]
    return asdict(
        queries.Affected(
            case_id=change.case_id,
            metric=change.metric,
            unit=metric.unit,
            rule=str(metric.rule),
            state=str(change.state),
            before=change.before,
            after=change.after,
            limit=change.limit,
            effect=change.effect,
            unit_bytes=change.unit_bytes,
            reason=change.reason,
            samples=change.samples,
            device=change.device,
            kernel=change.kernel,
        )
    )


def _undecided(history: History, comparisons: Iterable[Comparison]) -> list[dict[str, Any]]:
    """The comparisons without a decision, the most serious first.

    Where nothing can be compared, one metric stands for its kernel and case: first measurements come by the dozen.
    """
    settled = (State.REGRESS, State.IMPROVE, State.PASS)
    changes = [_change(history, item) for item in comparisons if item.step.state not in settled]
    changes.sort(key=lambda item: (item.kernel, item.case_id, metric_place(item.metric)))
    single = [change for change in changes if change.state not in _GROUPED]
    grouped: dict[tuple[State, str, str], list[Change]] = {}
    for change in changes:
        if change.state in _GROUPED:
            grouped.setdefault((change.state, change.kernel, change.case_id), []).append(change)
    entries = [plain(change) for change in single]
    entries += [
        plain(members[0]) | {"reason": f"{members[0].reason} ({len(members)} metrics)"} for members in grouped.values()
    ]
    severity = [str(state) for state in State]
    return sorted(entries, key=lambda entry: severity.index(entry["state"]))


def _is_notice(comparison: Comparison) -> bool:
    """A pass with something to say beside "unchanged" and "recovered"."""
    step = comparison.step
    return step.state is State.PASS and bool(step.reason) and not step.level.opened and not step.recovered


def _reason(
    history: History,
    sha: str,
    state: State,
    plan: Plan,
    counted: Sequence[Comparison],
    lacking: Sequence[str],
    clusters: Sequence[Cluster],
) -> str:
    """The verdict in one sentence."""
    if state in (State.REGRESS, State.IMPROVE):
        mine = [item for item in clusters if item.direction is state and item.required and not item.decided]
        sentences = [item.sentence for item in mine]
        more = f" (and {len(sentences) - 1} more)" if len(sentences) > 1 else ""
        return sentences[0] + more
    if state is State.MISSING and lacking:
        return f"not measured on {', '.join(lacking)}, which the target requires"
    if not counted:
        return "no kernel was measured"
    number = sum(item.step.counts_as is state for item in counted)
    first = next(item.step.reason for item in counted if item.step.counts_as is state)
    base = f"{plan.baseline.sha[:7]} ({_commits(plan.baseline.distance)} back)" if plan.baseline else ""
    sentences_by_state = {
        State.INVALID: f"{number} series cannot be measured, and could not before: {first}",
        State.INCOMPARABLE: f"{number} comparisons have a baseline only in another environment or on other inputs",
        State.MISSING: f"{number} values were measured before and are missing here, first: {first}",
        State.NO_BASELINE: f"{number} metrics have no baseline at {base}, first: {first}"
        if base
        else _no_ancestor(history, sha),
        State.INCONCLUSIVE: f"{number} comparisons are undecided: {first}",
        State.PASS: f"{number} comparisons with {base} are within their limits{_back_from(counted)}"
        + _decided(clusters),
    }
    return sentences_by_state[state]


def _decided(clusters: Sequence[Cluster]) -> str:
    """The regressions that people decided on, the first in words."""
    found = [item for item in clusters if item.decided]
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return f", or {found[0].decided}: {found[0].sentence}{more}" if found else ""


def _back_from(counted: Sequence[Comparison]) -> str:
    culprits = sorted({culprit[:7] for item in counted for culprit in item.step.recovered})
    return f", and what {' and '.join(culprits)} broke is back at its accepted level" if culprits else ""


def _no_ancestor(history: History, sha: str) -> str:
    """Why a commit has no baseline: nothing before it is measured, or what is before it was never told."""
    parents = history.parents
    unknown = sorted({parent for one in ancestry(parents, sha) for parent in parents[one]} - parents.keys())
    if unknown:
        return (
            f"no known ancestor is measured, and ancestor {unknown[0][:7]} is unknown here: tell the history with "
            "`ulpwatch job add --target FILE --range FIRST..LAST`, or post it to /api/v1/commits"
        )
    return "no ancestor is measured: this is the first measurement"


def _commits(count: int) -> str:
    return "1 commit" if count == 1 else f"{count} commits"


def _aside(notices: Sequence[Mapping[str, Any]]) -> str:
    if not notices:
        return ""
    first, others = notices[0], len(notices) - 1
    more = f" (and {others} more notice{'' if others == 1 else 's'})" if others else ""
    return f". Notice: “{BY_NAME[first['metric']].title}” of {first['kernel']}: {first['reason']}{more}"


def finding_key(target: str, culprit: str, kernel: str, family: str, direction: str) -> str:
    """What makes a finding the same finding in any process and any order of arrival."""
    return hashlib.sha256("\0".join((target, culprit, kernel, family, direction)).encode()).hexdigest()


def _level_key(history: History, series: int, metric: str, culprit: str) -> str:
    """The finding that an open level belongs to."""
    kernel = history.series[series].kernel
    return finding_key(history.target, culprit, kernel, BY_NAME[metric].family, State.REGRESS)


def keys_in_force(history: History, levels: Levels, *, without: str | None = None) -> set[str]:
    """The keys of the findings that a level set stands for, but those of the commit `without`."""
    return {
        _level_key(history, series, metric, culprit)
        for series, metric, culprit in open_levels(levels)
        if culprit != without
    }
