"""Many small losses that each pass: how far a timing history has come from its best level.

The reference is the best level since a baseline was last accepted as a whole. Accepting the finding of one step
does not move it: otherwise twenty accepted steps of 1 % would never be 20 %.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from service.detection.noise import MEDIAN_COST, history_deviation, logs

WINDOW = 10
TOLERANCE = 0.05
CERTAINTY = 5.0


@dataclass(frozen=True, slots=True)
class Drift:
    """How far the newest points are from the best level before them. `best` and `newest`: medians in the
    metric's unit, of which `shift` is the log of the ratio; `limit`: what it must exceed; `best_end`: the first
    point after the best window; `points`: how many of the newest points count."""

    best: float
    newest: float
    shift: float
    limit: float
    best_end: int
    points: int

    @property
    def regressed(self) -> bool:
        """Is it over the tolerance, and over what the noise explains?"""
        return self.shift > self.limit


def cumulative_drift(values: npt.ArrayLike, since: int = 0) -> Drift | None:
    """Compare the median of the newest 1 to 10 points with the lowest median of 10 before them; None for too
    few points.

    `values` are positive, lower is better, in commit order; `since` is the first point of the last accepted
    baseline. Over the limit means above 5 %, and above 5 standard errors of the two from the long-run noise, so
    that the lowest of many medians of a noisy history is no reference by luck. The number of newest points is
    the one that shows most.
    """
    history = logs(values)
    reference = history[since:]
    if len(reference) <= WINDOW:
        return None
    noise = history_deviation(history)
    medians = np.median(np.lib.stride_tricks.sliding_window_view(reference, WINDOW), axis=1)
    found = []
    for points in range(1, min(WINDOW, len(reference) - WINDOW) + 1):
        earlier = medians[: len(medians) - points]
        best = int(np.argmin(earlier))
        newest = float(np.median(reference[-points:]))
        error = noise * math.sqrt(MEDIAN_COST * (1 / WINDOW + 1 / points))
        limit = max(math.log1p(TOLERANCE), CERTAINTY * error)
        found.append(
            Drift(
                math.exp(earlier[best]),
                math.exp(newest),
                newest - float(earlier[best]),
                limit,
                since + best + WINDOW,
                points,
            )
        )
    return max(found, key=lambda drift: drift.shift - drift.limit)
