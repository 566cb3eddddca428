"""Our rules and the peers' as their packages run them, each at its defaults, behind one call.

A peer that is not installed is left out, by name. Peers look at the whole history at every commit, as their
programs do.
"""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.detection.series import Floats
from service.detection.screen import ONLINE, newest_step
from service.detection.steps import DEFAULT, change_points

EASED_PENALTY = 13.5
"""Of our look-back, times the square of how far its limit is eased: below it, every wiggle would be tried."""

Known = Sequence[int]
Find = Callable[[Floats, Known], list[int]]
"""Where the levels of a history change, as indices of first points; `known` are those reported before."""


@dataclass(frozen=True, slots=True)
class Detector:
    """A rule by name: `look_back` for whole histories, `watch` for a verdict after each commit."""

    name: str
    look_back: Find
    watch: Find


def ours(limit: float | None = None) -> Detector:
    """Our rules at their defaults; or, to compare at a peer's own rate of false alarms, at another limit."""
    evidence, online = DEFAULT, ONLINE
    if limit is not None:
        ease = min(1.0, limit / DEFAULT.limit)
        evidence = replace(
            DEFAULT,
            limit=limit,
            margin=_eased(DEFAULT.margin, ease),
            penalty=min(DEFAULT.penalty, EASED_PENALTY * ease**2),
            smallest=0.0,
        )
        online = replace(ONLINE, limit=limit, margin=_eased(ONLINE.margin, min(1.0, limit / ONLINE.limit)))

    def look_back(values: Floats, known: Known) -> list[int]:
        del known
        return [point.index for point in change_points(values, evidence)]

    def watch(values: Floats, known: Known) -> list[int]:
        found = newest_step(values, max(known, default=0), online)
        return [found.index] if found and found.is_step else []

    return Detector("ulpwatch" if limit is None else f"ulpwatch at {limit:g}", look_back, watch)


def _eased(margin: float, ease: float) -> float:
    """The margin over a line shrinks with the limit and, below half of it, asks for nothing any more."""
    return margin * (2 * ease - 1) if ease > 0.5 else -np.inf


def otava() -> Detector:
    """apache-otava: the change points of `otava.analysis`, at the options of its `AnalysisOptions`."""
    compute = importlib.import_module("otava.analysis").compute_change_points
    options = importlib.import_module("otava.series").AnalysisOptions()

    def find(values: Floats, known: Known) -> list[int]:
        del known
        found, _ = compute(values.tolist(), options.window_len, options.max_pvalue, options.min_magnitude)
        return [int(point.index) for point in found]

    return Detector("apache-otava", find, find)


def asv() -> Detector:
    """asv: the borders of the segments of `asv.step_detect.detect_steps`."""
    detect = importlib.import_module("asv.step_detect").detect_steps

    def find(values: Floats, known: Known) -> list[int]:
        del known
        return [int(segment[0]) for segment in detect(values.tolist())[1:]]

    return Detector("asv", find, find)


def pelt() -> Detector:
    """ruptures: `Pelt` at its defaults (l2, segments of 2, every fifth index). Its penalty has none: 2 s^2 log
    n (BIC for one more level and its place), s from the differences of neighbours."""
    ruptures = importlib.import_module("ruptures")

    def find(values: Floats, known: Known) -> list[int]:
        del known
        variance = float(np.var(np.diff(values))) / 2
        return ruptures.Pelt().fit(values).predict(pen=2 * variance * np.log(len(values)))[:-1]

    return Detector("ruptures PELT", find, find)


def peers() -> tuple[list[Detector], list[str]]:
    """The peers that are installed, and a line on each that is not."""
    found, missing = [], []
    for build in (otava, asv, pelt):
        try:
            found.append(build())
        except ImportError as error:
            missing.append(f"{build.__name__}: left out, {error}")
    return found, missing
