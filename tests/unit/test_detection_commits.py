"""One commit against the levels of its baseline."""

from collections.abc import Mapping

from service.detection.commits import Judgement, Measured, Observation, judge_commit
from service.detection.level_sets import Roster, Standing
from service.detection.levels import Level
from service.detection.rules import Reading

SHA = "a" * 40


def observe(
    values: Mapping[str, float | None], *, series: int = 1, segment: str = "cpu/1", dtype: str = "float32"
) -> Observation:
    """One sample per metric; None is a value that is not finite."""
    readings = {
        name: Reading((), nonfinite=True) if value is None else Reading((value, value))
        for name, value in ({"callable": 1.0, "completes": 1.0} | dict(values)).items()
    }
    return Observation(series, segment, "Test CPU", dtype, readings)


def judge(before: Standing, *observations: Observation, sha: str = SHA, digest: str = "e") -> Judgement:
    """One run of suite "quick"."""
    rosters = {
        (device, "quick"): Roster(
            digest, frozenset(one.series for one in observations if one.segment.startswith(f"{device}/"))
        )
        for device in {one.segment.partition("/")[0] for one in observations}
    }
    return judge_commit(before, Measured(observations, rosters), sha, baseline="b" * 40, required="quick")


def fold(*commits: Mapping[str, float | None]) -> Judgement:
    """Commits one after the other on one series."""
    judgement = Judgement(Standing(), ())
    for number, values in enumerate(commits):
        judgement = judge(judgement.standing, observe(values), sha=f"{number:040d}")
    return judgement


def states(judgement: Judgement) -> dict[str, str]:
    return {item.metric: str(item.step.state) for item in judgement.comparisons}


def test_the_reorder_noise_of_the_case_raises_the_floor() -> None:
    quiet, noisy = {"perm_delta_g_lp": 0.0}, {"perm_delta_g_lp": 1e-6}
    assert states(fold({"g_rel_l2_lp": 1e-7} | quiet, {"g_rel_l2_lp": 3e-6} | quiet))["g_rel_l2_lp"] == "regress"
    assert states(fold({"g_rel_l2_lp": 1e-7} | noisy, {"g_rel_l2_lp": 3e-6} | noisy))["g_rel_l2_lp"] == "pass"


def test_a_fault_cannot_hide_behind_the_noise_that_it_makes() -> None:
    before = {"g_rel_l2_lp": 1e-7, "perm_delta_g_lp": 1e-7}
    after = {"g_rel_l2_lp": 1e-1, "perm_delta_g_lp": 1.0}
    assert states(fold(before, after))["g_rel_l2_lp"] == "regress"


def test_less_memory_of_a_case_whose_gradient_is_wrong_is_not_accepted() -> None:
    before = {"step_peak_bytes": 1e6, "g_rel_l2_lp": 1e-7}
    wrong = {"step_peak_bytes": 5e5, "g_rel_l2_lp": 1e-1}
    assert states(fold(before, wrong)) == {
        "callable": "pass",
        "completes": "pass",
        "g_rel_l2_lp": "regress",
        "step_peak_bytes": "pass",
    }
    assert states(fold(before, wrong, before | {"step_peak_bytes": 5e5}))["step_peak_bytes"] == "improve"


def test_a_check_that_never_passed_is_the_kernels_known_state() -> None:
    never = {"empty_batch": 0.0}
    assert states(fold({"step_peak_bytes": 1e6} | never, {"step_peak_bytes": 5e5} | never)) == {
        "callable": "pass",
        "completes": "pass",
        "empty_batch": "pass",
        "step_peak_bytes": "improve",
    }


def test_a_case_that_did_not_end_well_keeps_its_levels() -> None:
    good = {"step_peak_bytes": 1e6}
    judgement = fold(good, {"completes": 0.0})
    assert states(judgement) == {"callable": "pass", "completes": "regress"}
    assert states(judge(judgement.standing, observe({"step_peak_bytes": 2e6}))) == {
        "callable": "pass",
        "completes": "pass",
        "step_peak_bytes": "regress",
    }


def test_a_case_that_never_ended_well_is_invalid_each_time() -> None:
    assert states(fold({"completes": 0.0}, {"completes": 0.0}))["completes"] == "invalid"


def test_a_metric_that_vanishes_stays_missing_and_keeps_its_level() -> None:
    some, all_of = {"operations": 5.0}, {"operations": 5.0, "step_peak_bytes": 1e6}
    judgement = fold(all_of, some)
    for _ in range(2):
        assert states(judgement)["step_peak_bytes"] == "missing"
        judgement = judge(judgement.standing, observe(some))
    assert states(judge(judgement.standing, observe(all_of)))["step_peak_bytes"] == "no-baseline"
    assert states(judge(judgement.standing, observe(all_of | {"step_peak_bytes": 2e6})))["step_peak_bytes"] == "regress"


def test_a_case_that_vanishes_stays_missing_and_keeps_its_findings() -> None:
    small, large = observe({"operations": 5.0}), observe({"operations": 9.0}, series=2)
    judgement = judge(Standing(), small, large)
    judgement = judge(judgement.standing, small, observe({"operations": 99.0}, series=2), sha="c" * 40)
    for _ in range(2):
        judgement = judge(judgement.standing, small)
        assert {item.series for item in judgement.comparisons if item.step.state == "missing"} == {2}
    judgement = judge(judgement.standing, small, observe({"operations": 9.0}, series=2))
    assert [item.step.recovered for item in judgement.comparisons if item.step.recovered] == [("c" * 40,)]


def test_what_a_changed_suite_drops_is_missing_once() -> None:
    small, large = observe({"operations": 5.0}), observe({"operations": 9.0}, series=2)
    judgement = judge(Standing(), observe({"operations": 5.0, "step_peak_bytes": 1e6}), large)
    judgement = judge(judgement.standing, small, digest="f")
    lost = {(item.series, item.metric) for item in judgement.comparisons if item.step.state == "missing"}
    assert lost == {(1, "step_peak_bytes"), (2, "operations"), (2, "callable"), (2, "completes")}
    judgement = judge(judgement.standing, small, digest="f")
    assert {item.step.state for item in judgement.comparisons} == {"pass"}


def test_a_check_that_is_new_to_a_known_case_needs_no_baseline_if_it_holds() -> None:
    known = {"step_peak_bytes": 1e6}
    assert states(fold(known, known | {"entropy_requires_grad": 1.0}))["entropy_requires_grad"] == "pass"
    assert states(fold(known, known | {"entropy_requires_grad": 0.0}))["entropy_requires_grad"] == "no-baseline"
    assert states(fold({"entropy_requires_grad": 1.0}))["entropy_requires_grad"] == "no-baseline"


def test_collectives_that_go_back_to_their_number_recover() -> None:
    two, three = {"collectives": 2.0}, {"collectives": 3.0}
    assert states(fold(two, three))["collectives"] == "regress"
    back = fold(two, three, two)
    assert states(back)["collectives"] == "pass"
    assert next(item.step.recovered for item in back.comparisons if item.metric == "collectives")


def test_an_error_over_the_gate_of_a_contract_fails_at_once_and_is_flagged_once() -> None:
    over = {"within_gates": 0.0}
    assert states(fold(over))["within_gates"] == "regress"
    assert states(fold(over, over))["within_gates"] == "pass"
    assert states(fold(over, over, {"within_gates": 1.0}))["within_gates"] == "pass"


def test_what_was_measured_in_another_environment_alone_is_incomparable() -> None:
    before = judge(Standing(), observe({"operations": 5.0})).standing
    judgement = judge(before, observe({"operations": 9.0}, segment="cpu/2"))
    assert set(states(judgement).values()) == {"incomparable"}
    again = judge(judgement.standing, observe({"operations": 5.0}))
    assert states(again)["operations"] == "pass"


def test_another_device_class_has_a_history_of_its_own() -> None:
    before = judge(Standing(), observe({"operations": 5.0})).standing
    judgement = judge(before, observe({"operations": 9.0}, segment="cuda/1"))
    assert set(states(judgement).values()) == {"no-baseline"}


def test_what_stood_before_is_left_as_it_was() -> None:
    before, same = (
        Standing(
            {one: {"cpu/1": {"operations": Level(5.0)}} for one in (1, 2)}, {("cpu", "quick"): Roster("e", {1, 2})}
        )
        for _ in range(2)
    )
    judgement = judge(before, observe({"operations": 9.0}))
    assert before == same
    assert judgement.standing != same


def test_informational_values_are_not_compared() -> None:
    assert "perm_delta_lp" not in states(fold({"perm_delta_lp": 1.0}, {"perm_delta_lp": 9.0}))


def test_a_changed_suite_forgets_no_open_finding() -> None:
    judgement = fold({"empty_batch": 1.0}, {"empty_batch": 0.0})
    judgement = judge(judgement.standing, observe({}), digest="f")
    assert states(judgement)["empty_batch"] == "missing"
    again = judge(judgement.standing, observe({"empty_batch": 0.0}), digest="f")
    assert states(again)["empty_batch"] == "no-baseline"
    assert next(level.opened for name, level in again.standing.levels[1]["cpu/1"].items() if name == "empty_batch")
