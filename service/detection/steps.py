"""Looking back at a whole timing history: at which commits did its level change for good.

Candidates come from the best piecewise constant fit (Jackson et al. 2005, optimal partitioning). The weakest is dropped
until every one left is a step that the long-run noise cannot explain and that slow drift, a line or a
cubic, explains less well; then once more, if the noise that is left about those levels is more than it first seemed.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from service.detection.noise import Floats, clip_outliers, logs, long_run_deviation, residual_deviation

CONTROL_REACH = 1
CURVE = 3
CURVE_SLACK = 8.0
"""A cubic fits nearly as well as a step does, and noise better: it may explain so much more than a line may."""


@dataclass(frozen=True, slots=True)
class LookBack:
    """How much evidence a change point needs.

    `limit`: its shift in standard errors. `margin`: by how much, in squared noise deviations, a step must fit
    the points about it better than a line does; slow drift is a line. `shortest`: points on either side.
    `smallest`: the shift, in log. `penalty`: what a further segment must save, in squared noise deviations, to
    be tried.
    """

    limit: float = 4.5
    margin: float = 4.0
    shortest: int = 6
    smallest: float = 0.005
    penalty: float = 9.0


DEFAULT = LookBack()


@dataclass(frozen=True, slots=True)
class ChangePoint:
    """The first point at a new level, and the evidence. `before` and `after` are levels in the metric's unit,
    `shift` the log of their ratio, `score` the shift in standard errors from the long-run `noise`."""

    index: int
    before: float
    after: float
    shift: float
    score: float
    noise: float
    points_before: int
    points_after: int


def change_points(values: npt.ArrayLike, evidence: LookBack = DEFAULT) -> tuple[ChangePoint, ...]:
    """The change points of one history, positive values in commit order; empty where it is too short to tell."""
    history = logs(values)
    if len(history) < 2 * evidence.shortest:
        return ()
    cleaned = clip_outliers(history)
    noise = long_run_deviation(cleaned)
    borders = [0, *optimal_partition(cleaned, evidence.penalty * noise**2, evidence.shortest), len(cleaned)]
    while True:
        found = [
            _measure(cleaned, begin, at, end, noise)
            for begin, at, end in zip(borders, borders[1:], borders[2:], strict=False)
        ]
        scores = [_strength(cleaned, point, evidence) for point in found]
        if scores and min(scores) < evidence.limit:
            del borders[1 + int(np.argmin(scores))]
            continue
        remaining = residual_deviation(_residuals(cleaned, borders))
        if not scores or remaining <= noise:
            return tuple(found)
        noise = remaining


def unshared(points: Iterable[ChangePoint], control: Iterable[ChangePoint]) -> tuple[ChangePoint, ...]:
    """The change points without those at which the control moved too, within one commit: they are the environment's."""
    moved = [point.index for point in control]
    return tuple(point for point in points if all(abs(point.index - index) > CONTROL_REACH for index in moved))


def optimal_partition(values: Floats, penalty: float, shortest: int = 1) -> list[int]:
    """Where the segments after the first begin, in the piecewise constant fit with the least sum of squares
    plus penalty per segment. Of all fits, not greedily; quadratic in the number of values.

    The same optimum as `ruptures.KernelCPD(kernel="linear")`, without a second to import it and without another
    dependency of the service.
    """
    count = len(values)
    sums = np.concatenate(([0.0], np.cumsum(values - values.mean())))
    squares = np.concatenate(([0.0], np.cumsum((values - values.mean()) ** 2)))
    best = np.full(count + 1, np.inf)
    best[0] = 0.0
    starts = np.zeros(count + 1, dtype=np.intp)
    positions = np.arange(count + 1)
    for end in range(shortest, count + 1):
        begin = slice(0, end - shortest + 1)
        residual = squares[end] - squares[begin] - (sums[end] - sums[begin]) ** 2 / (end - positions[begin])
        costs = best[begin] + residual
        starts[end] = costs.argmin()
        best[end] = costs[starts[end]] + penalty
    borders: list[int] = []
    end = int(starts[count])
    while end > 0:
        borders.append(end)
        end = int(starts[end])
    return borders[::-1]


def step_over_curve(values: Floats, at: int, degree: int = 1) -> float:
    """How much more of the sum of squares a step before value `at` explains than a line, or a polynomial, does."""
    centred = values - values.mean()
    step = float(centred[:at].sum()) ** 2 * len(values) / (at * (len(values) - at))
    return step - float(np.sum((_polynomials(len(values), degree) @ centred) ** 2))


@lru_cache(maxsize=512)
def _polynomials(count: int, degree: int) -> Floats:
    """Orthonormal polynomials of degree 1 to `degree` over `count` equal distances, a row each."""
    powers = np.vander(np.linspace(-1, 1, count), degree + 1, increasing=True)
    return np.ascontiguousarray(np.linalg.qr(powers).Q[:, 1:].T)


def _residuals(values: Floats, borders: list[int]) -> Floats:
    """What is left of the values when each segment's mean is taken off."""
    pieces = np.split(values, borders[1:-1])
    return np.concatenate([piece - piece.mean() for piece in pieces])


def _measure(values: Floats, begin: int, at: int, end: int, noise: float) -> ChangePoint:
    before, after = float(values[begin:at].mean()), float(values[at:end].mean())
    error = noise * np.sqrt(1 / (at - begin) + 1 / (end - at))
    shift = after - before
    return ChangePoint(
        at, float(np.exp(before)), float(np.exp(after)), shift, float(abs(shift) / error), noise, at - begin, end - at
    )


def _strength(values: Floats, point: ChangePoint, evidence: LookBack) -> float:
    """The score of a change point, or half of it at most if it is no step or too small to matter."""
    about = values[point.index - point.points_before : point.index + point.points_after]
    line, curve = (step_over_curve(about, point.points_before, degree) / point.noise**2 for degree in (1, CURVE))
    if line < evidence.margin or curve < evidence.margin - CURVE_SLACK or abs(point.shift) < evidence.smallest:
        return min(point.score, evidence.limit) / 2
    return point.score
