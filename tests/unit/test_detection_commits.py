"""One commit against the levels of its baseline."""

from collections.abc import Mapping

from service.detection.commits import Judgement, Observation, judge_commit
from service.detection.level_sets import Levels
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


def fold(*commits: Mapping[str, float | None]) -> Judgement:
    """Commits one after the other on one series."""
    judgement = Judgement({}, ())
    for number, values in enumerate(commits):
        judgement = judge_commit(judgement.levels, [observe(values)], f"{number:040d}")
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
    assert states(judge_commit(judgement.levels, [observe({"step_peak_bytes": 2e6})], SHA)) == {
        "callable": "pass",
        "completes": "pass",
        "step_peak_bytes": "regress",
    }


def test_a_case_that_never_ended_well_is_invalid_each_time() -> None:
    assert states(fold({"completes": 0.0}, {"completes": 0.0}))["completes"] == "invalid"


def test_a_metric_that_vanishes_is_missing_once() -> None:
    judgement = fold({"operations": 5.0, "step_peak_bytes": 1e6}, {"operations": 5.0})
    assert states(judgement)["step_peak_bytes"] == "missing"
    judgement = judge_commit(judgement.levels, [observe({"operations": 5.0})], SHA)
    assert "step_peak_bytes" not in states(judgement)
    back = judge_commit(judgement.levels, [observe({"operations": 5.0, "step_peak_bytes": 1e6})], SHA)
    assert states(back)["step_peak_bytes"] == "no-baseline"


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
    before = judge_commit({}, [observe({"operations": 5.0})], SHA).levels
    judgement = judge_commit(before, [observe({"operations": 9.0}, segment="cpu/2")], SHA)
    assert set(states(judgement).values()) == {"incomparable"}
    again = judge_commit(judgement.levels, [observe({"operations": 5.0})], SHA)
    assert states(again)["operations"] == "pass"


def test_another_device_class_has_a_history_of_its_own() -> None:
    before = judge_commit({}, [observe({"operations": 5.0})], SHA).levels
    judgement = judge_commit(before, [observe({"operations": 9.0}, segment="cuda/1")], SHA)
    assert set(states(judgement).values()) == {"no-baseline"}


def test_the_levels_before_are_left_as_they_were() -> None:
    before: Levels = {1: {"cpu/1": {"operations": Level(5.0)}}, 2: {"cpu/1": {"operations": Level(5.0)}}}
    judge_commit(before, [observe({"operations": 9.0})], SHA)
    assert before == {1: {"cpu/1": {"operations": Level(5.0)}}, 2: {"cpu/1": {"operations": Level(5.0)}}}


def test_informational_values_are_not_compared() -> None:
    assert "perm_delta_lp" not in states(fold({"perm_delta_lp": 1.0}, {"perm_delta_lp": 9.0}))
