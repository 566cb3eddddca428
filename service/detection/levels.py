"""The level of one metric of one series in one segment, and how a commit's reading advances it.

A level is what stands after a commit: the accepted value, and above it the values that open findings stand for. It is
a pure fold along the commit graph, so that the order in which results arrive changes nothing.
"""

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal

from service.catalogue import Metric, MetricClass, Rule
from service.detection.rules import (
    NONFINITE,
    Reading,
    Relation,
    confirmed,
    cross,
    effect,
    equal_samples,
    relate,
    worst,
)


class State(StrEnum):
    """The states of a comparison and of a commit (METHOD section 7), the most serious first."""

    REGRESS = "regress"
    INVALID = "invalid"
    INCOMPARABLE = "incomparable"
    MISSING = "missing"
    NO_BASELINE = "no-baseline"
    INCONCLUSIVE = "inconclusive"
    IMPROVE = "improve"
    PASS = "pass"  # noqa: S105


Decision = Literal["accepted", "dismissed"]
"""What a person makes of a regression: the new baseline, or no regression at all."""


@dataclass(frozen=True, slots=True)
class Level:
    """What stands after a commit, in the metric's unit.

    `opened` holds (value, culprit) of open findings, each worse than the one before it. `pending` is a better value
    that waits for its second, equal pass. `lapsed` is the last commit that measured it, where later ones did not.
    """

    accepted: float
    opened: tuple[tuple[float, str], ...] = ()
    pending: float | None = None
    lapsed: str = ""

    @property
    def top(self) -> float:
        """The value that the next commit is expected to show."""
        return self.opened[-1][0] if self.opened else self.accepted


@dataclass(frozen=True, slots=True)
class Step:
    """One comparison: the level after it, the state, and the numbers of the decision in the metric's unit.

    `recovered` names the culprits whose findings this reading closes. `tightened` says that an improvement is accepted,
    `decided` what a person made of a regression. Values that are not finite are None.
    """

    level: Level
    state: State
    before: float | None = None
    after: float | None = None
    limit: float | None = None
    effect: float | None = None
    recovered: tuple[str, ...] = ()
    tightened: bool = False
    decided: Decision | None = None
    reason: str = ""

    @property
    def counts_as(self) -> State:
        """The state that a verdict counts."""
        return State.PASS if self.decided else self.state


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What a decision needs beside the two values: the floor F, whether the case is correct (only then may its value be
    accepted), whether its bitwise repetition holds, and the commit."""

    floor: float
    sha: str
    correct: bool = True
    repeatable: bool = True


def start(metric: Metric, reading: Reading, reason: str, state: State = State.NO_BASELINE) -> Step:
    """The first reading of a segment: the worst of its samples becomes the accepted value."""
    value = worst(metric, reading)
    doubts = "; ".join(doubt for doubt in (reading.note, unequal(metric, reading)) if doubt)
    return Step(Level(value), state, after=_finite(value), reason=reason or doubts)


def fail_at_once(metric: Metric, reading: Reading, sha: str) -> Step:
    """The first reading of a check that must hold whatever the history says, and does not."""
    value = worst(metric, reading)
    return Step(Level(1.0, opened=((value, sha),)), State.REGRESS, after=_finite(value), limit=1.0, reason=reading.note)


def resume(metric: Metric, level: Level, reading: Reading, facts: Circumstances) -> Step:
    """The first reading after commits that did not measure the metric, compared with what stood before them.

    What is worse or better is so, wherever in between it came about. What is not has still no baseline: the commits
    between may have been anything.
    """
    step = advance(metric, replace(level, lapsed=""), reading, facts)
    gap = f"the commits after {level.lapsed[:7]} did not measure it"
    if step.state is State.PASS:
        return replace(step, state=State.NO_BASELINE, reason=gap)
    return replace(step, reason=f"{step.reason}; {gap}" if step.reason else gap)


def advance(metric: Metric, level: Level, reading: Reading, facts: Circumstances) -> Step:
    """Compare a reading with a level and carry the level on."""
    relation = relate(metric, level.top, reading, facts.floor)
    is_back = bool(level.opened) and relate(metric, level.accepted, reading, facts.floor) is Relation.SAME
    if is_back:  # also where every change counts as worse
        step = _fall_back(metric, level, reading, facts)
    elif relation is Relation.WORSE:
        step = _regress(metric, level, reading, facts)
    elif relation is Relation.UNCLEAR:
        step = Step(level, State.INCONCLUSIVE, reason="samples differ and the limit lies between them")
    elif level.opened:
        step = _fall_back(metric, level, reading, facts)
    elif relation is Relation.BETTER:
        step = _improve(metric, level, reading, facts)
    else:
        step = Step(replace(level, pending=None), State.PASS, reason=_notice(metric, level, reading, facts.floor))
    return _with_numbers(metric, level, reading, facts.floor, step)


def _regress(metric: Metric, level: Level, reading: Reading, facts: Circumstances) -> Step:
    opened = (*level.opened, (worst(metric, reading), facts.sha))
    reason = reading.note or ("not finite where it was" if reading.nonfinite else "")
    return Step(replace(level, opened=opened, pending=None), State.REGRESS, reason=reason)


def _fall_back(metric: Metric, level: Level, reading: Reading, facts: Circumstances) -> Step:
    """The reading is not worse than the newest open level: close what it is back from, or stay."""
    beneath = [level.accepted, *(value for value, _ in level.opened)]
    settled = next(
        index
        for index, value in enumerate(beneath)
        if relate(metric, value, reading, facts.floor) in (Relation.SAME, Relation.BETTER)
    )
    recovered = tuple(culprit for _, culprit in level.opened[settled:])
    remaining = replace(level, opened=level.opened[:settled], pending=None)
    if settled == 0:
        return _back_to_accepted(metric, remaining, reading, facts, recovered)
    if relate(metric, remaining.top, reading, facts.floor) is Relation.BETTER and facts.correct:
        eased = (*remaining.opened[:-1], (worst(metric, reading), remaining.opened[-1][1]))
        return Step(
            replace(remaining, opened=eased), State.IMPROVE, recovered=recovered, reason="an open finding grew smaller"
        )
    reason = f"unchanged since the open finding of {remaining.opened[-1][1][:7]}"
    return Step(remaining, State.PASS, recovered=recovered, reason=reason)


def _back_to_accepted(
    metric: Metric, level: Level, reading: Reading, facts: Circumstances, recovered: tuple[str, ...]
) -> Step:
    if relate(metric, level.accepted, reading, facts.floor) is Relation.BETTER:
        return replace(_improve(metric, level, reading, facts), recovered=recovered)
    return Step(level, State.PASS, recovered=recovered, reason="back at the accepted level")


def decide(step: Step, decision: Decision) -> Step:
    """A regression as a person decided on it. Accepted, its value is what later commits are held to; dismissed, it
    stands beside the accepted value like an open finding's, and later commits that are no worse pass."""
    level = Level(step.level.top) if decision == "accepted" else step.level
    return replace(step, level=level, decided=decision)


def _improve(metric: Metric, level: Level, reading: Reading, facts: Circumstances) -> Step:
    """A better value: flagged once, accepted when the case is correct and the value confirmed.

    A value that one commit shows unconfirmed is accepted when the next one shows it again.
    """
    value = worst(metric, reading)
    if not facts.correct:
        reason = "better, but not accepted: the case is not correct"
        return Step(replace(level, pending=None), State.PASS, reason=reason)
    certain = confirmed(metric, reading, repeatable=facts.repeatable)
    if level.pending is None or relate(metric, level.pending, reading, facts.floor) is Relation.BETTER:
        if certain:
            return Step(Level(value), State.IMPROVE, tightened=True)
        return Step(replace(level, pending=value), State.IMPROVE, reason="not confirmed by a second, equal pass yet")
    if relate(metric, level.pending, reading, facts.floor) is Relation.SAME:
        return Step(Level(level.pending), State.PASS, tightened=True, reason="confirms the improvement before it")
    return Step(replace(level, pending=value), State.PASS, reason="part of an unconfirmed improvement is lost again")


def _notice(metric: Metric, level: Level, reading: Reading, floor: float) -> str:
    """What a pass has to say: it is no pass by silence."""
    value = worst(metric, reading)
    if value == NONFINITE:
        return "is not finite, as it was"
    if metric.rule is Rule.CHECK and value == 0:
        return "fails, as it did"
    if metric.rule in (Rule.ERROR_MAX, Rule.ERROR_RMS) and level.accepted == 0 and 0 < value <= floor:
        return "exactness lost: it was 0 and is now an error under the floor"
    return unequal(metric, reading)


def unequal(metric: Metric, reading: Reading) -> str:
    """A word on repetitions of an exact metric that differ, where they do: they are treated as noise."""
    if metric.metric_class is not MetricClass.EXACT or equal_samples(reading):
        return ""
    return (
        f"not deterministic: {min(reading.samples):.0f} to {max(reading.samples):.0f} in {len(reading.samples)} calls"
    )


def _with_numbers(metric: Metric, level: Level, reading: Reading, floor: float, step: Step) -> Step:
    """Add what the decision was made from; `before` is the accepted value where the reading is back at it or better."""
    returned = step.recovered and not step.level.opened
    before = level.accepted if returned and step.state is State.IMPROVE else level.top
    after = worst(metric, reading)
    return replace(
        step,
        before=_finite(before),
        after=_finite(after),
        limit=_finite(cross(metric, before, before, floor).limit),
        effect=effect(before, after),
    )


def _finite(value: float) -> float | None:
    return None if value == NONFINITE else value
