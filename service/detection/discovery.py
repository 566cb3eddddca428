"""Many comparisons of one commit at once: which of them to believe (Benjamini & Hochberg 1995)."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

BLOCKING = 0.01
REPORTED = 0.05


@dataclass(frozen=True, slots=True)
class Discovery:
    """What the whole grid makes of one comparison: `q` is the least false discovery rate at which it counts."""

    q: float

    @property
    def blocks(self) -> bool:
        """Certain enough to fail a commit."""
        return self.q <= BLOCKING

    @property
    def is_reported(self) -> bool:
        """Certain enough to be shown."""
        return self.q <= REPORTED


def discoveries(p_values: npt.ArrayLike, comparisons: int | None = None) -> list[Discovery]:
    """The q of each p, in the order given. `comparisons` counts those too that were screened out before any p was
    computed, as if their p were 1; without it there were no others.

    q of the i-th smallest of m is the least of p_j m / j over j >= i. As `scipy.stats.false_discovery_control`, which
    takes a second to import and cannot count the comparisons that have no p.
    """
    ps = np.asarray(p_values, dtype=np.float64)
    total = len(ps) if comparisons is None else comparisons
    if total < len(ps):
        raise ValueError(f"{len(ps)} p-values of {total} comparisons")
    order = np.argsort(ps, kind="stable")
    ranked = ps[order] * total / np.arange(1, len(ps) + 1)
    qs = np.empty(len(ps))
    qs[order] = np.minimum(np.minimum.accumulate(ranked[::-1])[::-1], 1.0)
    return [Discovery(float(q)) for q in qs]
