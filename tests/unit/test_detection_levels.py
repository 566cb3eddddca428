"""How a level is carried from commit to commit."""

from itertools import count

from service.catalogue import BY_NAME
from service.detection.level_sets import Levels, dump, load, open_levels
from service.detection.levels import Circumstances, Level, State, Step, advance, resume, start
from service.detection.rules import NONFINITE, Reading

BYTES = BY_NAME["step_peak_bytes"]
B = 1_000_000.0


def step(level: Level, *samples: float, sha: str = "a" * 40, correct: bool = True) -> Step:
    return advance(BYTES, level, Reading(samples), Circumstances(0.0, sha, correct=correct))


def twice(value: float) -> tuple[float, float]:
    return value, value


def states(*values: float) -> list[str]:
    """The states of a history that starts at B, each value measured twice."""
    level, found, number = Level(B), [], count()
    for value in values:
        result = step(level, *twice(value), sha=f"{next(number):040d}")
        level = result.level
        found.append(str(result.state))
    return found


def test_a_segment_starts_at_the_worst_of_its_samples() -> None:
    result = start(BYTES, Reading((B, 2 * B)), "first measurement")
    assert (result.state, result.level) == (State.NO_BASELINE, Level(2 * B))


def test_a_step_is_flagged_once() -> None:
    assert states(B, 2 * B, 2 * B, 2 * B) == ["pass", "regress", "pass", "pass"]


def test_worse_than_the_open_level_is_a_new_finding() -> None:
    assert states(2 * B, 3 * B, 3 * B) == ["regress", "regress", "pass"]


def test_a_regression_keeps_the_accepted_value_and_names_its_numbers() -> None:
    result = step(Level(B), *twice(2 * B), sha="c" * 40)
    assert result.level == Level(B, ((2 * B, "c" * 40),))
    assert (result.before, result.after, result.limit, result.effect) == (B, 2 * B, B + 4096, 1.0)


def test_going_back_is_a_pass_that_recovers() -> None:
    result = step(Level(B, ((2 * B, "c" * 40),)), *twice(B))
    assert (result.state, result.recovered, result.level) == (State.PASS, ("c" * 40,), Level(B))
    assert (result.before, result.after) == (2 * B, B)


def test_going_back_by_one_of_two_findings_recovers_the_newer() -> None:
    result = step(Level(B, ((2 * B, "c" * 40), (3 * B, "d" * 40))), *twice(2 * B))
    assert (result.state, result.recovered) == (State.PASS, ("d" * 40,))
    assert result.level.opened == ((2 * B, "c" * 40),)


def test_going_back_further_than_the_accepted_value_recovers_and_improves() -> None:
    result = step(Level(B, ((2 * B, "c" * 40),)), *twice(B / 2))
    assert (result.state, result.recovered, result.level) == (State.IMPROVE, ("c" * 40,), Level(B / 2))
    assert (result.before, result.after) == (B, B / 2)


def test_going_part_of_the_way_back_improves_and_lowers_the_open_level() -> None:
    result = step(Level(B, ((3 * B, "c" * 40),)), *twice(2 * B))
    assert (result.state, result.recovered) == (State.IMPROVE, ())
    assert result.level.opened == ((2 * B, "c" * 40),)


def test_a_confirmed_improvement_becomes_the_accepted_value() -> None:
    assert states(0.75 * B, 0.75 * B, 0.9 * B) == ["improve", "pass", "regress"]


def test_an_unconfirmed_improvement_is_accepted_when_the_next_commit_shows_it_again() -> None:
    first = step(Level(B), B / 2)
    assert (first.state, first.level.accepted, first.level.pending) == (State.IMPROVE, B, B / 2)
    second = step(first.level, B / 2)
    assert (second.state, second.level) == (State.PASS, Level(B / 2))
    lost = step(first.level, B)
    assert (lost.state, lost.level) == (State.PASS, Level(B))


def test_an_improvement_of_an_incorrect_case_is_not_celebrated() -> None:
    result = step(Level(B), *twice(B / 2), correct=False)
    assert (result.state, result.level) == (State.PASS, Level(B))
    assert "not correct" in result.reason


def test_small_growth_adds_up_against_the_accepted_value() -> None:
    assert states(B + 2000, B + 4000, B + 6000) == ["pass", "pass", "regress"]


def test_samples_around_the_limit_are_inconclusive_and_change_nothing() -> None:
    result = step(Level(B), B, 2 * B)
    assert (result.state, result.level) == (State.INCONCLUSIVE, Level(B))


def test_after_a_gap_an_equal_value_keeps_the_level_and_another_one_starts_anew() -> None:
    gap = Level(B, ((2 * B, "c" * 40),), measured=False)
    same = resume(BYTES, gap, Reading(twice(2 * B)), 0.0)
    assert (same.state, same.level) == (State.NO_BASELINE, Level(B, ((2 * B, "c" * 40),)))
    other = resume(BYTES, gap, Reading(twice(5 * B)), 0.0)
    assert (other.state, other.level) == (State.NO_BASELINE, Level(5 * B))


def test_exactness_that_is_lost_under_the_floor_passes_with_a_notice() -> None:
    metric = BY_NAME["g_rel_l2_lp"]
    result = advance(metric, Level(0.0), Reading((1e-3,)), Circumstances(2.0**-8, "a" * 40))
    assert result.state is State.PASS
    assert "exactness lost" in result.reason
    assert not advance(metric, Level(0.0), Reading((0.0,)), Circumstances(2.0**-8, "a" * 40)).reason


def test_a_value_that_is_not_finite_has_no_number() -> None:
    metric = BY_NAME["lp_abs_max"]
    result = advance(metric, Level(1e-6), Reading((), nonfinite=True), Circumstances(1e-7, "a" * 40))
    assert (result.state, result.after, result.effect) == (State.REGRESS, None, None)
    assert result.level.top == NONFINITE


def test_a_level_set_survives_storage() -> None:
    levels: Levels = {
        7: {
            "cpu/1": {
                "step_peak_bytes": Level(B),
                "lp_abs_max": Level(1e-7, ((NONFINITE, "c" * 40),), measured=False),
                "operations": Level(24.0, pending=12.0),
            }
        }
    }
    digest, stored = dump(levels)
    assert load(stored) == levels
    assert dump(load(stored)) == (digest, stored)
    assert list(open_levels(levels)) == [(7, "lp_abs_max", "c" * 40)]
