"""Base against head of one series, measured side by side in fresh processes: different, the same, or not known yet.

One process of each makes a pair; its control, a kernel that no commit changes, is measured in both. The plan is
sequential: after 10, 20 and 30 pairs of a session a decision is tried. A session is one lease of a machine, and
what holds in one can be a mode of that machine: only what a second session repeats is a finding.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from service.detection.noise import logs

LOOKS = (10, 20, 30)
NORMAL_95 = 1.6448536269514722
"""The 95 % quantile of the normal distribution."""


class Answer(StrEnum):
    """What a paired job says, or asks for."""

    WORSE = "worse"
    BETTER = "better"
    SAME = "same"
    INCONCLUSIVE = "inconclusive"
    MORE_PAIRS = "more-pairs"
    SECOND_SESSION = "second-session"


@dataclass(frozen=True, slots=True)
class Plan:
    """`level`: the chance of a false difference in one session, over all looks. `smallest`: the relative shift
    that matters. `tolerance`: the relative shift up to which two commits are the same. `control_share`: of the
    shift, that the control may move."""

    level: float = 0.001
    smallest: float = 0.01
    tolerance: float = 0.01
    control_share: float = 0.5


PLAN = Plan()


@dataclass(frozen=True, slots=True)
class Session:
    """Times from one lease of a machine, one value a process, the i-th of base and head from the i-th pair.
    `control_base` and `control_head`: the control's, beside base and head."""

    base: Sequence[float]
    head: Sequence[float]
    control_base: Sequence[float]
    control_head: Sequence[float]

    @property
    def pairs(self) -> int:
        """How many pairs are complete."""
        return min(len(self.base), len(self.head), len(self.control_base), len(self.control_head))

    def first(self, pairs: int) -> "Session":
        """The session as it stood after so many pairs."""
        return Session(self.base[:pairs], self.head[:pairs], self.control_base[:pairs], self.control_head[:pairs])


@dataclass(frozen=True, slots=True)
class Comparison:
    """One session at one look. `shift`: Hodges-Lehmann, the log of head over base, with its 95 % bounds `low`
    and `high`, each one-sided; `control_shift` alike; `p_worse` and `p_better`: one-sided Mann-Whitney."""

    pairs: int
    shift: float
    low: float
    high: float
    control_shift: float
    p_worse: float
    p_better: float

    @property
    def p(self) -> float:
        """Of the likelier direction."""
        return min(self.p_worse, self.p_better)


@dataclass(frozen=True, slots=True)
class Decision:
    """The answer, the reason, and the comparisons that it rests on: one a session. `pairs`: how many pairs the session
    that is asked for should have in all, where more are."""

    answer: Answer
    reason: str
    comparisons: tuple[Comparison, ...]
    pairs: int = 0

    @property
    def p(self) -> float:
        """What the grid's false discovery control goes by: both sessions' p, each times two directions and three looks,
        combined (Fisher 1932); 1 if there is no confirmed difference."""
        if self.answer not in (Answer.WORSE, Answer.BETTER):
            return 1.0
        product = math.prod(min(1.0, 2 * len(LOOKS) * comparison.p) for comparison in self.comparisons)
        return product * (1 - math.log(product))


def hodges_lehmann(base: npt.ArrayLike, head: npt.ArrayLike) -> tuple[float, float, float]:
    """The median of all differences head - base, and its one-sided 95 % bounds below and above.

    Hodges & Lehmann 1963. The bounds are the ordered differences that the Mann-Whitney statistic's normal approximation
    puts at 5 % (Hollander, Wolfe & Chicken 2014, 4.3); the extreme ones where there are too few.
    """
    left, right = np.asarray(base, dtype=np.float64), np.asarray(head, dtype=np.float64)
    differences = np.sort(np.subtract.outer(right, left), axis=None)
    count = len(differences)
    deviation = math.sqrt(count * (len(left) + len(right) + 1) / 12)
    skipped = max(0, math.floor(count / 2 - NORMAL_95 * deviation))
    return float(np.median(differences)), float(differences[skipped]), float(differences[count - 1 - skipped])


def mann_whitney(base: npt.ArrayLike, head: npt.ArrayLike) -> tuple[float, float]:
    """One-sided p that head is greater, and that it is less, by `scipy.stats.mannwhitneyu`; exact without ties."""
    from scipy.stats import mannwhitneyu  # noqa: PLC0415

    method = "exact" if len(np.unique(np.concatenate((base, head)))) == np.size(base) + np.size(head) else "asymptotic"
    greater, less = (
        float(mannwhitneyu(head, base, alternative=side, method=method).pvalue) for side in ("greater", "less")
    )
    return greater, less


def compare(session: Session) -> Comparison:
    """What one session says, all its pairs taken. Raises ValueError unless all times are positive and finite."""
    base, head, control_base, control_head = (
        logs(times[: session.pairs])
        for times in (session.base, session.head, session.control_base, session.control_head)
    )
    shift, low, high = hodges_lehmann(base, head)
    p_worse, p_better = mann_whitney(base, head)
    control_shift, _, _ = hodges_lehmann(control_base, control_head)
    return Comparison(session.pairs, shift, low, high, control_shift, p_worse, p_better)


def decide(first: Session, second: Session | None = None, plan: Plan = PLAN) -> Decision:
    """Decide on what was measured so far. Every look up to now is tried in order, so that the answer does not depend on
    how many pairs a job delivers at once."""
    decision = _first_session(first, plan)
    if decision.answer is not Answer.SECOND_SESSION or second is None:
        return decision
    return _repeat(decision.comparisons[0], second, plan)


def _first_session(session: Session, plan: Plan) -> Decision:
    comparison = None
    for look in LOOKS:
        if session.pairs < look:
            seen = (comparison,) if comparison else ()
            return Decision(Answer.MORE_PAIRS, f"not decided by {session.pairs} pairs", seen, look)
        comparison = compare(session.first(look))
        if _is_different(comparison, plan):
            reason = f"{_words(comparison.shift)} in {look} pairs, p = {comparison.p:.1e}"
            return Decision(Answer.SECOND_SESSION, reason, (comparison,), LOOKS[0])
        if _is_same(comparison, plan):
            return Decision(Answer.SAME, f"within {_percent(plan.tolerance)} in {look} pairs", (comparison,))
    assert comparison
    return Decision(Answer.INCONCLUSIVE, _doubt(comparison, plan), (comparison,))


def _repeat(first: Comparison, session: Session, plan: Plan) -> Decision:
    """Does a second session show the same? The sign alone would repeat by chance every second time, so the
    whole rule must hold there too."""
    for look in LOOKS:
        if session.pairs < look:
            return Decision(Answer.SECOND_SESSION, f"the second session has {session.pairs} pairs", (first,), look)
        again = compare(session.first(look))
        both = (first, again)
        if again.shift * first.shift > 0 and _is_different(again, plan):
            reason = f"{_words(first.shift)}, and {_words(again.shift)} in a second session"
            return Decision(Answer.WORSE if first.shift > 0 else Answer.BETTER, reason, both)
        if _is_same(again, plan):
            return Decision(Answer.SAME, f"{_words(first.shift)}, but not in a second session", both)
    reason = f"{_words(first.shift)}, but {_words(again.shift)} in a second session: {_doubt(again, plan)}"
    return Decision(Answer.INCONCLUSIVE, reason, both)


def _is_different(comparison: Comparison, plan: Plan) -> bool:
    """Unlikely by chance, large enough, and not the control's."""
    return (
        comparison.p < plan.level / len(LOOKS)
        and abs(comparison.shift) > math.log1p(plan.smallest)
        and abs(comparison.control_shift) < plan.control_share * abs(comparison.shift)
    )


def _is_same(comparison: Comparison, plan: Plan) -> bool:
    """Neither worse nor better by as much as the tolerance, each with 95 % certainty."""
    return comparison.high < math.log1p(plan.tolerance) and comparison.low > -math.log1p(plan.tolerance)


def _doubt(comparison: Comparison, plan: Plan) -> str:
    if abs(comparison.control_shift) >= plan.control_share * abs(comparison.shift):
        return f"the control moved by {_percent(comparison.control_shift)}"
    return f"between {_percent(comparison.low)} and {_percent(comparison.high)} after {comparison.pairs} pairs"


def _words(shift: float) -> str:
    return f"{_percent(abs(shift))} {'slower' if shift > 0 else 'faster'}"


def _percent(shift: float) -> str:
    return f"{math.expm1(shift):.1%}".replace("%", " %")
