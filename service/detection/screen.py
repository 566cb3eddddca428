"""What one new point of a timing history says, right after it came in: two questions, neither of which is a finding.

`surprise`: do the newest few stand apart, so that a paired job is worth its cost? `newest_step`: have the newest points
settled at another level? That needs some points more, and no paired job.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from service.detection.noise import MEDIAN_COST, Floats, history_deviation, logs, residual_deviation, robust_deviation
from service.detection.steps import step_over_curve

DECILES_TO_DEVIATION = 2.563
SETTLED_BLOCKS = (1, 3)
"""Of the noise of the points that compare; larger blocks would take a step among them for noise."""


@dataclass(frozen=True, slots=True)
class Surprising:
    """When the newest points are suspect: their median is so many `deviations` from the centre of the
    `before` eligible points before them (at least `fewest`), `one` for a single point and `several` for the
    last 2 to `newest`; and more than a share of the centre, and than `resolution`, in the metric's unit (0.5
    us)."""

    one: float = 2.25
    several: float = 2.75
    newest: int = 4
    before: int = 30
    fewest: int = 8
    least_scale: float = 0.003
    least_share: float = 0.015
    resolution: float = 0.5e-6


@dataclass(frozen=True, slots=True)
class Surprise:
    """The newest points against those before them, in the metric's unit. `value`: the median of the
    `points_after` newest. They are suspect if it is farther from the centre, worse or better, than the
    limit."""

    value: float
    centre: float
    scale: float
    limit: float
    points_before: int
    points_after: int

    @property
    def excess(self) -> float:
        """The distance from the centre as a share of the limit."""
        return abs(self.value - self.centre) / self.limit

    @property
    def is_suspect(self) -> bool:
        """Is a paired job worth its cost?"""
        return self.excess > 1


@dataclass(frozen=True, slots=True)
class Online:
    """How much evidence a step among the newest points needs.

    `limit`: its shift in standard errors. `margin`: as in `service.detection.steps.LookBack`. The step has
    `fewest_after` to `most_after` points and is compared with the `fewest_before` to `most_before` points
    before it. Points count as at most `clip` robust deviations from the median of all these. `newest` points
    tell the noise.
    """

    limit: float = 5.0
    margin: float = 1.0
    fewest_after: int = 4
    most_after: int = 30
    fewest_before: int = 8
    most_before: int = 60
    clip: float = 2.5
    newest: int = 300


@dataclass(frozen=True, slots=True)
class NewestStep:
    """The likeliest step among the newest points. `index`: the first point at the new level. `before` and
    `after`: medians in the metric's unit, of which `shift` is the log of the ratio. `score`: the difference of
    the clipped means in standard errors from the long-run `noise`; `margin`: how much better than a line it
    fits, in squared noise deviations."""

    index: int
    before: float
    after: float
    shift: float
    score: float
    margin: float
    noise: float
    points_before: int
    points_after: int
    is_step: bool


SURPRISING = Surprising()
ONLINE = Online()


def surprise(values: npt.ArrayLike, rule: Surprising = SURPRISING) -> Surprise | None:
    """Compare the newest one to four eligible points, the newest last, with those before them; the most
    surprising number of them counts. None if too few points are before."""
    points = np.asarray(values, dtype=np.float64)
    numbers = range(1, min(rule.newest, len(points) - rule.fewest) + 1)
    return max((_against(points, after, rule) for after in numbers), key=lambda found: found.excess, default=None)


def newest_step(values: npt.ArrayLike, since: int = 0, rule: Online = ONLINE) -> NewestStep | None:
    """The likeliest place of a step among the newest points, and whether the evidence suffices; None if they
    are too few.

    `values` are positive, in commit order, the newest last. `since` is where the present level began: the newest change
    that is known already. Points before it tell the noise and nothing else.
    """
    history = logs(values)
    begin = max(since, len(history) - rule.most_after - rule.most_before)
    count = len(history) - begin
    after = np.arange(rule.fewest_after, min(rule.most_after, count - rule.fewest_before) + 1)
    if not len(after):
        return None
    noise = history_deviation(history[-rule.newest :])
    level = _clip(history[begin:], rule.clip, noise)
    settled = level[: count - rule.fewest_after]
    noise = max(noise, residual_deviation(settled - settled.mean(), SETTLED_BLOCKS))
    before = np.minimum(count - after, rule.most_before)
    sums = np.concatenate(([0.0], np.cumsum(level)))
    means_after = (sums[count] - sums[count - after]) / after
    means_before = (sums[count - after] - sums[count - after - before]) / before
    scores = np.abs(means_after - means_before) / (noise * np.sqrt(1 / after + 1 / before))
    best = int(scores.argmax())
    at, border = int(after[best]), int(before[best])
    margin = step_over_curve(level[count - at - border :], border) / noise**2
    low, high = float(np.median(history[-at - border : -at])), float(np.median(history[-at:]))
    return NewestStep(
        index=len(history) - at,
        before=math.exp(low),
        after=math.exp(high),
        shift=high - low,
        score=float(scores[best]),
        margin=margin,
        noise=noise,
        points_before=border,
        points_after=at,
        is_step=bool(scores[best] >= rule.limit) and margin >= rule.margin,
    )


def _against(points: Floats, after: int, rule: Surprising) -> Surprise:
    eligible = points[:-after][-rule.before :]
    centre = float(np.median(eligible))
    low, high = np.quantile(eligible, (0.1, 0.9))
    spread = float(high - low) / DECILES_TO_DEVIATION
    scale = max(robust_deviation(eligible, centre), spread, rule.least_scale * abs(centre))
    deviations = rule.one if after == 1 else rule.several
    limit = deviations * scale * math.sqrt(1 / after + MEDIAN_COST / len(eligible))
    limit = max(limit, rule.least_share * abs(centre), rule.resolution)
    return Surprise(float(np.median(points[-after:])), centre, scale, limit, len(eligible), after)


def _clip(values: Floats, deviations: float, noise: float) -> Floats:
    """The values within so many deviations of their median: their own or the long-run noise, whichever is more."""
    centre = float(np.median(values))
    reach = deviations * max(robust_deviation(values, centre), noise)
    return np.clip(values, centre - reach, centre + reach)
