"""Judges one commit: its readings against the levels that its baseline left, series by series.

Pure: which commit is the baseline, and where the readings come from, the caller knows.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from service.catalogue import BY_NAME, Metric, MetricClass, Rule
from service.detection.level_sets import Levels, Rosters, Standing, carry, device_class, expected, redefined
from service.detection.levels import (
    Circumstances,
    Decision,
    Level,
    State,
    Step,
    advance,
    decide,
    fail_at_once,
    resume,
    start,
)
from service.detection.rules import NONFINITE, Reading, Relation, floor, relate, worst

ENDINGS = ("callable", "completes")
"""The checks that say how a case ended; they count whatever a target requires."""
GATES, BUDGET = "within_gates", "within_budget"
"""The checks of what a target declares: they fail whatever the history says."""


@dataclass(frozen=True, slots=True)
class Observation:
    """One series at one commit in one segment: readings by metric. `device` is the device in words."""

    series: int
    segment: str
    device: str
    dtype: str
    readings: Mapping[str, Reading]


@dataclass(frozen=True, slots=True)
class Comparison:
    """One metric of one series of a commit and its baseline. `reading` is None where the commit has none."""

    series: int
    metric: str
    segment: str
    device: str
    reading: Reading | None
    step: Step


@dataclass(frozen=True, slots=True)
class Judgement:
    """What a commit changed, and what stands after it."""

    standing: Standing
    comparisons: tuple[Comparison, ...]


@dataclass(frozen=True, slots=True)
class Measured:
    """What a commit's runs saw: readings by series, and the series that each suite measured."""

    observations: Sequence[Observation]
    rosters: Rosters


def judge_commit(before: Standing, measured: Measured, sha: str, *, baseline: str, required: str) -> Judgement:
    """Advance what stands by what was measured of a commit, and compare each series. `before` is left as it is.

    `baseline` is the commit that `before` stands for, empty if there is none; the suite `required` is expected of every
    commit once it was run.
    """
    after: Levels = {series: dict(segments) for series, segments in before.levels.items()}
    comparisons: list[Comparison] = []
    ordered = sorted(measured.observations, key=lambda item: (item.series, item.segment))
    for group in _by_series_and_device(ordered):
        own = before.levels.get(group[0].series, {})
        comparisons += _judge_series(own, after.setdefault(group[0].series, {}), group, sha)
    due = expected(before.rosters, measured.rosters, required)
    changed = {
        (suite[0], series)
        for suite in redefined(before.rosters, measured.rosters)
        for series in before.rosters[suite].series
    }
    comparisons += _missing(before.levels, after, ordered, _Due(due, changed, baseline))
    return Judgement(Standing(after, carry(before.rosters, measured.rosters)), tuple(comparisons))


def apply_decisions(judgement: Judgement, decided: Callable[[Comparison], Decision | None]) -> Judgement:
    """The judgement with what people decided about its regressions."""
    levels: Levels = {series: dict(segments) for series, segments in judgement.standing.levels.items()}
    comparisons = []
    for item in judgement.comparisons:
        decision = decided(item) if item.step.state is State.REGRESS else None
        settled = item if decision is None else replace(item, step=decide(item.step, decision))
        comparisons.append(settled)
        if decision:
            own = levels[item.series]
            own[item.segment] = own[item.segment] | {item.metric: settled.step.level}
    return Judgement(replace(judgement.standing, levels=levels), tuple(comparisons))


Unknown = tuple[str, State]


def _by_series_and_device(observations: Sequence[Observation]) -> Iterator[list[Observation]]:
    groups: dict[tuple[int, str], list[Observation]] = {}
    for observation in observations:
        groups.setdefault((observation.series, device_class(observation.segment)), []).append(observation)
    yield from groups.values()


def _judge_series(
    before: Mapping[str, Mapping[str, Level]],
    after: dict[str, dict[str, Level]],
    group: Sequence[Observation],
    sha: str,
) -> Iterator[Comparison]:
    correct = all(_is_correct(before.get(one.segment, {}), one) for one in group)
    repeatable = all(
        worst(BY_NAME["repeat_bitwise"], one.readings["repeat_bitwise"]) == 1
        for one in group
        if "repeat_bitwise" in one.readings
    )
    for one in group:
        levels = dict(before.get(one.segment, {}))
        for name, reading in sorted(one.readings.items()):
            if not _is_judged(name):
                continue
            metric = BY_NAME[name]
            facts = Circumstances(_floor(metric, levels, one), sha, correct, repeatable)
            step = _decide(metric, levels.get(name), reading, facts, unknown=_unknown(metric, before, one))
            levels[name] = step.level
            yield Comparison(one.series, name, one.segment, one.device, reading, step)
        levels.update(_facts(levels, one, correct=correct))
        after[one.segment] = levels


def _decide(metric: Metric, level: Level | None, reading: Reading, facts: Circumstances, *, unknown: Unknown) -> Step:
    if metric.name in ENDINGS and worst(metric, reading) == 0:
        if level is None:
            return start(metric, reading, "", State.INVALID)
        if not level.opened and level.accepted == 0:
            return Step(level, State.INVALID, before=0.0, after=0.0, reason=reading.note)
    if level is None and metric.name in (GATES, BUDGET) and worst(metric, reading) == 0:
        return fail_at_once(metric, reading, facts.sha)
    if level is None:
        return start(metric, reading, *unknown)
    if level.lapsed:
        return resume(metric, level, reading, facts)
    return advance(metric, level, reading, facts)


def _unknown(metric: Metric, before: Mapping[str, Mapping[str, Level]], one: Observation) -> Unknown:
    """What to say of a metric that has no level in its segment.

    A check that holds is as good as it can be: where only the check is new, not the case, it needs no baseline. So a
    commit that adds an argument passes the checks that come with it.
    """
    own = device_class(one.segment)
    if any(metric.name in levels for segment, levels in before.items() if device_class(segment) == own):
        return "measured before, but in another environment or on other inputs", State.INCOMPARABLE
    if metric.rule is Rule.CHECK and before.get(one.segment) and worst(metric, one.readings[metric.name]) == 1:
        return "a check that holds needs no baseline", State.PASS
    return "first measurement", State.NO_BASELINE


def _is_correct(levels: Mapping[str, Level], one: Observation) -> bool:
    """No check fails, no value is infinite and no error is over its limit that was not so at the accepted level.

    A check that the kernel never passed is its known state: a kernel is held to its own past. A case over its memory
    budget is no less correct.
    """
    if _ended_badly(one):
        return False
    for name, reading in one.readings.items():
        metric, level = BY_NAME[name], levels.get(name)
        if level is None or not _is_judged(name) or metric.metric_class is MetricClass.EXACT or name == BUDGET:
            continue
        if relate(metric, level.accepted, reading, _floor(metric, levels, one)) is Relation.WORSE:
            return False
    return True


def _floor(metric: Metric, levels: Mapping[str, Level], one: Observation) -> float:
    """F of the metric here. Of the reorder noise of commit and baseline the smaller counts, and so with the scale: a
    fault that makes a kernel depend on the order of the vocabulary must not raise its own floor."""
    noise = _fact(metric.noise, levels, one)
    scale = _fact(metric.scale, levels, one)
    return floor(metric, one.dtype, noise=noise or 0.0, scale=scale or 1.0)


def _fact(name: str | None, levels: Mapping[str, Level], one: Observation) -> float | None:
    if name is None:
        return None
    known = [levels[name].accepted] if name in levels else []
    known += [worst(BY_NAME[name], one.readings[name])] if name in one.readings else []
    return min((value for value in known if value != NONFINITE), default=None)


def _facts(levels: Mapping[str, Level], one: Observation, *, correct: bool) -> dict[str, Level]:
    """The informational values that floors are made of, as they stand after a commit: a correct case renews them."""
    wanted = {name for metric in one.readings for name in (BY_NAME[metric].noise, BY_NAME[metric].scale) if name}
    return {
        name: Level(worst(BY_NAME[name], one.readings[name]))
        for name in wanted
        if name in one.readings and not one.readings[name].nonfinite and (correct or name not in levels)
    }


@dataclass(frozen=True, slots=True)
class _Due:
    """What a commit should have measured: series on device classes, and every metric of a series that it did measure.
    Of the series `redefined` a suite asks for something else than it did: what it dropped is reported once."""

    series: set[tuple[str, int]]
    redefined: set[tuple[str, int]]
    baseline: str


def _missing(before: Levels, after: Levels, observations: Sequence[Observation], due: _Due) -> Iterator[Comparison]:
    """Series and metrics that were measured before, and should have been here.

    They stay missing until they are measured. A case that did not end well keeps its levels: it is judged by how it
    ended.
    """
    measured = {(device_class(one.segment), one.series) for one in observations}
    seen = {(device_class(one.segment), one.series, name) for one in observations for name in one.readings}
    broken = {(device_class(one.segment), one.series) for one in observations if _ended_badly(one)}
    for series, segments in sorted(before.items()):
        reported: set[tuple[str, str]] = set()
        for segment, levels in sorted(segments.items()):
            own = device_class(segment), series
            if own in broken or own not in measured | due.series:
                continue
            for name, level in sorted(levels.items()):
                if (*own, name) in seen or not _is_judged(name):
                    continue
                after[series][segment] = dict(after[series][segment])
                if own in measured & due.redefined and not level.opened:
                    del after[series][segment][name]
                else:
                    after[series][segment][name] = replace(level, lapsed=level.lapsed or due.baseline)
                if (own[0], name) not in reported:
                    yield _lost(series, segment, name, level)
                reported.add((own[0], name))


def _ended_badly(one: Observation) -> bool:
    return any(name in one.readings and worst(BY_NAME[name], one.readings[name]) == 0 for name in ENDINGS)


def _is_judged(name: str) -> bool:
    return BY_NAME[name].rule is not Rule.INFORMATIONAL


def _lost(series: int, segment: str, name: str, level: Level) -> Comparison:
    before = None if level.top == NONFINITE else level.top
    reason = f"measured at {level.lapsed[:7]}, not since" if level.lapsed else "measured at the baseline, not here"
    return Comparison(series, name, segment, "", None, Step(level, State.MISSING, before=before, reason=reason))
