"""How noisy a timing history is in the long run: per point, but as it counts for the mean of many.

Histories are autocorrelated and bimodal, so that the deviation of single points promises more certainty than a mean of
them has. Everything here is in natural logs: 0.01 is about 1 %.
"""

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

MAD_TO_DEVIATION = 1.4826
MEDIAN_COST = 1.57
"""pi / 2: by how much the variance of a median exceeds that of a mean of normal values."""
CLIP_WINDOW = 21
CLIP_DEVIATIONS = 3.0
BLOCKS = (1, 3, 6)
QUIETEST = 0.001
"""A history that never moves is still taken to have this much noise: 0.1 %."""


def logs(values: npt.ArrayLike) -> Floats:
    """Natural logs of a history. Raises ValueError unless every value is positive and finite."""
    numbers = np.asarray(values, dtype=np.float64)
    if not np.all((numbers > 0) & np.isfinite(numbers)):
        raise ValueError("a timing history holds positive, finite values only")
    return np.log(numbers)


def robust_deviation(values: Floats, centre: float | Floats) -> float:
    """1.4826 times the median distance from the centre: the standard deviation, were the values normal."""
    return MAD_TO_DEVIATION * float(np.median(np.abs(values - centre)))


def running_median(values: Floats, window: int = CLIP_WINDOW) -> Floats:
    """The median of the `window` (odd) values about each one, the ends mirrored; of a shorter history a smaller
    window."""
    reach = min(window // 2, len(values) - 1)
    mirrored = np.pad(values, reach, mode="reflect")
    windows = np.lib.stride_tricks.sliding_window_view(mirrored, 2 * reach + 1)
    return np.partition(windows, reach, axis=1)[:, reach]


def clip_outliers(values: Floats, deviations: float = CLIP_DEVIATIONS) -> Floats:
    """The values, each moved to within so many robust deviations of the running median."""
    centre = running_median(values)
    reach = deviations * robust_deviation(values, centre)
    return np.clip(values, centre - reach, centre + reach)


def long_run_deviation(values: Floats, blocks: tuple[int, ...] = BLOCKS) -> float:
    """The noise s for which s / sqrt(n) is the deviation of a mean of n neighbours.

    Of neighbouring blocks of b values the means m and m' differ by a deviation of s sqrt(2 / b); the largest of the
    estimates from the median of |m - m'| counts. A few steps in the history hardly move a median. Values without
    outliers (`clip_outliers`); never less than `QUIETEST`.
    """
    estimates = (
        robust_deviation(differences, 0.0) * math.sqrt(block / 2) for block, differences in _blocks(values, blocks)
    )
    return max((QUIETEST, *estimates))


def residual_deviation(residuals: Floats, blocks: tuple[int, ...] = BLOCKS) -> float:
    """The same from the mean square of the differences, which heavy tails raise and a median overlooks. One step would
    raise it too: of what is left about known levels only."""
    estimates = (
        float(np.sqrt(np.mean(differences**2) * block / 2)) for block, differences in _blocks(residuals, blocks)
    )
    return max((QUIETEST, *estimates))


def _blocks(values: Floats, blocks: tuple[int, ...]) -> Iterator[tuple[int, Floats]]:
    """For each size the differences of the means of neighbouring blocks, wherever they begin."""
    sums = np.concatenate(([0.0], np.cumsum(values)))
    for block in blocks:
        means = (sums[block:] - sums[:-block]) / block
        if len(means) > block:
            yield block, means[block:] - means[:-block]


def history_deviation(history: Floats) -> float:
    """The long-run noise of a history of logs, outliers included."""
    return long_run_deviation(clip_outliers(history))
