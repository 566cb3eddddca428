"""How a level is carried from commit to commit."""

from itertools import count

from service.catalogue import BY_NAME
from service.detection.level_sets import Levels, Roster, Standing, carry, dump, expected, load, open_levels, redefined
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


def test_after_a_gap_what_stood_before_it_is_compared_with() -> None:
    culprit, facts = "c" * 40, Circumstances(0.0, "d" * 40)
    gap = Level(B, ((2 * B, culprit),), lapsed="b" * 40)
    same = resume(BYTES, gap, Reading(twice(2 * B)), facts)
    assert (same.state, same.level) == (State.NO_BASELINE, Level(B, ((2 * B, culprit),)))
    worse = resume(BYTES, gap, Reading(twice(5 * B)), facts)
    assert (worse.state, worse.before) == (State.REGRESS, 2 * B)
    assert worse.level == Level(B, ((2 * B, culprit), (5 * B, "d" * 40)))
    assert worse.reason == "the commits after bbbbbbb did not measure it"
    back = resume(BYTES, gap, Reading(twice(B)), facts)
    assert (back.state, back.recovered, back.level) == (State.NO_BASELINE, (culprit,), Level(B))
    better = resume(BYTES, Level(B, lapsed="b" * 40), Reading(twice(B / 2)), facts)
    assert (better.state, better.level) == (State.IMPROVE, Level(B / 2))


def test_what_stays_bad_passes_with_a_notice() -> None:
    facts = Circumstances(1e-7, "a" * 40)
    infinite = advance(BY_NAME["lp_abs_max"], Level(NONFINITE), Reading((), nonfinite=True), facts)
    assert (infinite.state, infinite.reason) == (State.PASS, "is not finite, as it was")
    failing = advance(BY_NAME["empty_batch"], Level(0.0), Reading((0.0,)), facts)
    assert (failing.state, failing.reason) == (State.PASS, "fails, as it did")


def test_bytes_that_differ_between_repetitions_are_noted() -> None:
    result = step(Level(B), B, B + 8)
    assert (result.state, result.reason) == (State.PASS, "not deterministic: 1000000 to 1000008 in 2 calls")
    assert start(BYTES, Reading((B, B + 8)), "").reason == "not deterministic: 1000000 to 1000008 in 2 calls"
    assert not step(Level(B), B, B).reason


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


def test_what_stands_survives_storage() -> None:
    levels: Levels = {
        7: {
            "cpu/1": {
                "step_peak_bytes": Level(B),
                "lp_abs_max": Level(1e-7, ((NONFINITE, "c" * 40),), lapsed="b" * 40),
                "operations": Level(24.0, pending=12.0),
            }
        }
    }
    standing = Standing(levels, {("cpu", "quick"): Roster("e" * 64, frozenset({7, 9}))})
    digest, stored = dump(standing)
    assert load(stored) == standing
    assert dump(load(stored)) == (digest, stored)
    assert list(open_levels(levels)) == [(7, "lp_abs_max", "c" * 40)]


# --- What a suite is expected to measure ------------------------------------------------------------------------------

QUICK, CORE = ("cpu", "quick"), ("cpu", "core")


def roster(*series: int, digest: str | None = "e") -> Roster:
    return Roster(digest, frozenset(series))


def test_a_suite_is_expected_to_measure_what_it_did() -> None:
    known = {QUICK: roster(1, 2), CORE: roster(3)}
    assert expected(known, {QUICK: roster(1)}, "quick") == {("cpu", 1), ("cpu", 2)}
    assert expected(known, {CORE: roster(3)}, "core") == {("cpu", 3)}


def test_the_targets_own_suite_is_expected_wherever_it_was_run_before() -> None:
    known = {QUICK: roster(1, 2), CORE: roster(3)}
    assert expected(known, {CORE: roster(3)}, "quick") == {("cpu", 1), ("cpu", 2), ("cpu", 3)}
    assert expected({CORE: roster(3)}, {CORE: roster(3)}, "quick") == {("cpu", 3)}


def test_a_suite_that_is_new_does_not_stand_in_for_another() -> None:
    assert expected({CORE: roster(3)}, {("cpu", "mine"): roster(1)}, "quick") == {("cpu", 3)}
    assert expected({CORE: roster(3)}, {("cuda", "core"): roster(3)}, "quick") == set()


def test_a_suite_keeps_what_it_lacked_until_it_asks_for_something_else() -> None:
    known = {QUICK: roster(1, 2)}
    assert carry(known, {QUICK: roster(1)}) == {QUICK: roster(1, 2)}
    assert carry(known, {QUICK: roster(1, digest="f")}) == {QUICK: roster(1, digest="f")}
    assert carry(known, {CORE: roster(3)}) == {QUICK: roster(1, 2), CORE: roster(3)}
    assert redefined(known, {QUICK: roster(1, digest="f")}) == {QUICK}
    assert redefined(known, {QUICK: roster(1, digest=None), CORE: roster(3)}) == set()
