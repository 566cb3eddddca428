"""The paired decision: its statistics by hand, its plan look by look, and the situations of modes and controls."""

import math

import numpy as np
import pytest

from service.detection.pairs import Answer, Session, compare, decide, hodges_lehmann, mann_whitney


def session(
    slower: float = 0.0, *, control: float = 0.0, noise: float = 0.005, pairs: int = 30, seed: int = 0
) -> Session:
    """Log-normal times about a millisecond; head and its control slower by so much."""
    rng = np.random.default_rng(seed)
    shifts = (0.0, slower, 0.0, control)
    times = (1e-3 * (1 + shift) * np.exp(rng.normal(size=pairs) * noise) for shift in shifts)
    return Session(*(drawn.tolist() for drawn in times))


def test_the_shift_is_the_median_of_all_differences() -> None:
    assert hodges_lehmann([0.0, 1.0], [2.0, 4.0]) == (2.5, 1.0, 4.0)


def test_the_bounds_are_ordered_differences() -> None:
    """Of 0..9 against itself 28 of the 100 differences are -3 or less, 36 are -2 or less; as
    50 - 1.645 sqrt(100 x 21 / 12) = 28.2, the lowest and the highest 28 are skipped."""
    assert hodges_lehmann(range(10), range(10)) == (0.0, -2.0, 2.0)


def test_complete_separation_of_ten_has_the_least_p_there_is() -> None:
    greater, less = mann_whitney(range(10), range(10, 20))
    assert (greater, less) == (pytest.approx(1 / math.comb(20, 10)), pytest.approx(1.0))


def test_ties_do_not_make_the_test_exact() -> None:
    greater, less = mann_whitney([1.0, 1.0, 2.0, 2.0], [1.0, 1.0, 2.0, 2.0])
    assert 0.5 < greater == less < 0.7
    assert mann_whitney([1.0] * 10, [1.0] * 10) == (1.0, 1.0)


def test_times_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match="positive"):
        compare(Session([1.0], [0.0], [1.0], [1.0]))


def test_nothing_measured_asks_for_ten_pairs() -> None:
    decision = decide(Session((), (), (), ()))
    assert (decision.answer, decision.pairs, decision.comparisons) == (Answer.MORE_PAIRS, 10, ())


def test_equal_commits_are_the_same_after_ten_pairs() -> None:
    decision = decide(session())
    assert (decision.answer, decision.comparisons[0].pairs, decision.p) == (Answer.SAME, 10, 1.0)


@pytest.mark.parametrize(("slower", "answer"), [(0.05, Answer.WORSE), (-0.05, Answer.BETTER)])
def test_a_difference_asks_for_a_second_session_and_is_confirmed_by_it(slower: float, answer: Answer) -> None:
    first = session(slower)
    asked = decide(first)
    assert (asked.answer, asked.pairs, asked.p) == (Answer.SECOND_SESSION, 10, 1.0)
    confirmed = decide(first, session(slower, seed=1))
    assert confirmed.answer is answer
    assert [comparison.pairs for comparison in confirmed.comparisons] == [10, 10]
    assert confirmed.comparisons[0].shift == pytest.approx(math.log1p(slower), abs=0.01)


def test_the_p_of_a_confirmed_difference_combines_both_sessions() -> None:
    decision = decide(session(0.05), session(0.05, seed=1))
    product = (6 / math.comb(20, 10)) ** 2
    assert decision.p == pytest.approx(product * (1 - math.log(product)))


def test_a_session_where_the_control_moved_along_confirms_nothing() -> None:
    """Session A: +8 % with the control at +7 %; session B: nothing."""
    for pairs in (10, 20):
        assert decide(session(0.08, control=0.07, pairs=pairs)).answer is Answer.MORE_PAIRS
    decision = decide(session(0.08, control=0.07), session(seed=1))
    assert decision.answer is Answer.INCONCLUSIVE
    assert "the control moved by" in decision.reason


def test_a_mode_of_one_machine_is_not_confirmed_by_another() -> None:
    decision = decide(session(0.08), session(seed=1))
    assert decision.answer is Answer.SAME
    assert "not in a second session" in decision.reason


def test_a_second_session_with_another_sign_is_inconclusive() -> None:
    assert decide(session(0.05), session(-0.05, seed=1)).answer is Answer.INCONCLUSIVE


def test_kernel_and_control_that_both_move_are_the_environment() -> None:
    assert decide(session(0.09, control=0.09), session(0.09, control=0.09, seed=1)).answer is Answer.INCONCLUSIVE


def test_the_control_may_move_by_less_than_half() -> None:
    assert decide(session(0.08, control=0.03)).answer is Answer.SECOND_SESSION


def test_a_difference_too_small_to_matter_is_none() -> None:
    assert decide(session(0.007, noise=0.001)).answer is Answer.SAME
    assert decide(session(0.013, noise=0.001)).answer is Answer.SECOND_SESSION


def test_noise_that_hides_the_tolerance_is_inconclusive_after_thirty_pairs() -> None:
    answers = [decide(session(noise=0.06, pairs=pairs)) for pairs in (10, 20, 30)]
    assert [decision.answer for decision in answers] == [Answer.MORE_PAIRS, Answer.MORE_PAIRS, Answer.INCONCLUSIVE]
    assert [decision.pairs for decision in answers] == [20, 30, 0]


def test_the_answer_does_not_depend_on_how_many_pairs_come_at_once() -> None:
    first, second = session(0.03, noise=0.012, seed=5), session(0.03, noise=0.012, seed=6)
    decision = decide(first, second)
    assert decision.answer is Answer.WORSE
    taken = [comparison.pairs for comparison in decision.comparisons]
    assert decide(first.first(taken[0]), second.first(taken[1])) == decision


def test_an_incomplete_pair_does_not_count() -> None:
    assert Session([1.0] * 10, [1.0] * 10, [1.0] * 9, [1.0] * 10).pairs == 9


def test_the_second_session_is_asked_for_pair_by_pair() -> None:
    decision = decide(session(0.05), session(0.05, seed=1, pairs=4))
    assert (decision.answer, decision.pairs) == (Answer.SECOND_SESSION, 10)
