"""Bytes against size over the grid: a kernel may grow per element although no case alone is over its tolerance."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

TOLERANCE = 0.01
FEWEST_SIZES = 3


@dataclass(frozen=True, slots=True)
class SlopeChange:
    """Bytes per element of N x V before and after, fitted over the same cases, and the number of distinct sizes."""

    before: float
    after: float
    sizes: int

    @property
    def regressed(self) -> bool:
        """Did it grow by more than 1 %?"""
        return self.after - self.before > TOLERANCE * abs(self.before)


def bytes_per_element(measured: Mapping[tuple[int, int], float]) -> float:
    """The slope of the straight line, with intercept, that fits bytes against N x V; keys are (tokens, vocabulary).

    Residuals count relative to their size, so that the largest case does not decide alone.
    """
    elements = np.array([tokens * vocabulary for tokens, vocabulary in measured], dtype=np.float64)
    weights = 1 / elements
    mean = np.average(elements, weights=weights**2)
    values = np.array(list(measured.values()), dtype=np.float64)
    centred = elements - mean
    level = np.average(values, weights=weights**2)
    return float(np.sum(weights**2 * centred * (values - level)) / np.sum(weights**2 * centred**2))


def compare_slopes(
    before: Mapping[tuple[int, int], float], after: Mapping[tuple[int, int], float]
) -> SlopeChange | None:
    """Compare what two commits need, over the cases measured at both that differ in size alone; None for fewer
    than three sizes: two always lie on a line."""
    shared = before.keys() & after.keys()
    sizes = len({tokens * vocabulary for tokens, vocabulary in shared})
    if sizes < FEWEST_SIZES:
        return None
    ordered = sorted(shared)
    return SlopeChange(
        bytes_per_element({case: before[case] for case in ordered}),
        bytes_per_element({case: after[case] for case in ordered}),
        sizes,
    )
