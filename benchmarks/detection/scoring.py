"""What a detector found, held against what was put in: recall by size of step, false alarms, delay, cost.

A step is hit within `REACH` commits of its place: looking back, by a change point of the whole history; online, by an
alarm that names such a place at most `HORIZON` commits after the step. Online, a place within `REACH` of one named
before is no new alarm. Every alarm in a history without a step is false.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.detection.detectors import Detector, Find
from benchmarks.detection.series import SIZES, Floats, History

REACH = 5
HORIZON = 30
START = 30
"""Online verdicts begin with so many commits."""

Draw = Callable[[float], list[History]]
"""All histories of one noise model with a step of one size, none for size 0: of the same noise, at the same places."""


@dataclass(slots=True)
class Tally:
    """Counts of one detector in one mode on one noise model; delays are in commits, seconds of CPU."""

    alarms: int = 0
    commits: int = 0
    hits: dict[float, list[bool]] = field(default_factory=lambda: {size: [] for size in SIZES})
    delays: list[int] = field(default_factory=list)
    calls: int = 0
    seconds: float = 0.0

    @property
    def false_rate(self) -> float:
        """Alarms per 1000 commits of histories without a step."""
        return 1000 * self.alarms / self.commits

    def recall(self, size: float) -> float:
        """The share of steps of one size that was hit."""
        return float(np.mean(self.hits[size]))

    def find(self, rule: Find, values: Floats, known: Sequence[int]) -> list[int]:
        """Ask the rule, and note what it cost."""
        begin = time.process_time()
        found = rule(values, known)
        self.seconds += time.process_time() - begin
        self.calls += 1
        return found


@dataclass(frozen=True, slots=True)
class Score:
    """One detector in one mode on several noise models, each counting alike."""

    name: str
    tallies: dict[str, Tally]

    @property
    def false_rate(self) -> float:
        """False alarms per 1000 commits."""
        return statistics.fmean(tally.false_rate for tally in self.tallies.values())

    def recall(self, size: float) -> float:
        """The mean recall of the models."""
        return statistics.fmean(tally.recall(size) for tally in self.tallies.values())

    @property
    def delay(self) -> float:
        """The median delay of all hits, in commits after the step's first; NaN without any."""
        delays = [delay for tally in self.tallies.values() for delay in tally.delays]
        return statistics.median(delays) if delays else float("nan")

    @property
    def milliseconds(self) -> float:
        """CPU time of one call."""
        tallies = self.tallies.values()
        return 1000 * sum(tally.seconds for tally in tallies) / sum(tally.calls for tally in tallies)


def look_back(detector: Detector, draws: dict[str, Draw]) -> Score:
    """Score whole histories."""
    return Score(detector.name, {model: _look_back(detector.look_back, draw) for model, draw in draws.items()})


def watch(detector: Detector, draws: dict[str, Draw]) -> Score:
    """Score the verdicts after each commit."""
    return Score(detector.name, {model: _watch(detector.watch, draw) for model, draw in draws.items()})


def _look_back(rule: Find, draw: Draw) -> Tally:
    tally = Tally()
    for history in draw(0.0):
        tally.alarms += len(tally.find(rule, history.values, ()))
        tally.commits += len(history.values)
    for size in SIZES:
        for history in draw(size):
            found = tally.find(rule, history.values, ())
            tally.hits[size].append(any(is_near(index, history.step) for index in found))
    return tally


def _watch(rule: Find, draw: Draw) -> Tally:
    tally = Tally()
    before_steps = []
    for still in draw(0.0):
        alarms = list(_alarms(tally, rule, still.values, START, len(still.values), ()))
        tally.alarms += len(alarms)
        tally.commits += len(still.values) - START + 1
        before_steps.append(alarms)
    for size in SIZES:
        for history, earlier in zip(draw(size), before_steps, strict=True):
            assert history.step is not None
            known = [index for commits, index in earlier if commits <= history.step]
            last = min(history.step + HORIZON, len(history.values))
            delay = next(
                (
                    commits - history.step - 1
                    for commits, index in _alarms(tally, rule, history.values, history.step + 1, last, known)
                    if is_near(index, history.step)
                ),
                None,
            )
            tally.hits[size].append(delay is not None)
            if delay is not None:
                tally.delays.append(delay)
    return tally


def _alarms(
    tally: Tally, rule: Find, values: Floats, first: int, last: int, known: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """(commits seen, place) of each new alarm while the history grows from `first` to `last` commits."""
    named = list(known)
    for commits in range(first, last + 1):
        for index in tally.find(rule, values[:commits], named):
            if not any(is_near(index, place) for place in named):
                named.append(index)
                yield commits, index


def is_near(index: int, place: int | None) -> bool:
    """Do two places count as one?"""
    return place is not None and abs(index - place) <= REACH


def shared(points: list[list[int]], others: list[list[int]]) -> float:
    """The share of change points, a list a history, that another detector has too; NaN if there are none."""
    hits = [
        any(is_near(index, other) for other in theirs)
        for found, theirs in zip(points, others, strict=True)
        for index in found
    ]
    return statistics.fmean(hits) if hits else float("nan")
