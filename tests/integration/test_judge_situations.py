"""Situations from cases/tracker at the judge: payloads in, verdicts and findings out, on both engines."""

import hashlib
import random
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import delete, select

from service import judge, models, queries, wire
from service.db import SessionFactory
from service.errors import Invalid, ServiceError
from service.findings import end_dismissals, triage
from service.ingest import ingest, register_commits, register_target

B = 8_000_000.0  # bytes


class Story:
    """A target on a database: commits are posted by name and judged when asked for."""

    def __init__(self, factory: SessionFactory, payloads: SimpleNamespace, **target: Any) -> None:
        self.factory, self.payloads = factory, payloads
        with factory.begin() as session:
            register_target(session, payloads.target(**target), registered_by="test")

    def commit(self, name: str, *parents: str, watched: str | None = None, minute: int = 0) -> wire.Commit:
        commit: wire.Commit = self.payloads.commit(name, parents, watched=watched, minute=minute)
        return commit

    def post(self, commit: wire.Commit, *rows: wire.Measurement, quarantined: bool = False, **result: Any) -> None:
        payload = self.payloads.result(commit, rows, **result)
        digest = hashlib.sha256(payload.model_dump_json().encode()).hexdigest()
        with self.factory.begin() as session:
            ingest(session, payload, body_digest=digest, posted_by="test", quarantined=quarantined)

    def register(self, *commits: wire.Commit, head: str | None = None) -> None:
        branch = {"branch": "main", "head": self.payloads.sha(head)} if head else {}
        with self.factory.begin() as session:
            register_commits(session, "demo", commits, **branch)

    def row(self, peak: float = B, *, tokens: int = 64, **changes: Any) -> wire.Measurement:
        """A healthy case with this peak, measured twice; `values` adds to it or replaces."""
        values = {**self.payloads.values, "step_peak_bytes": [peak, peak], **changes.pop("values", {})}
        case = changes.pop("case", None) or wire.Case(tokens=tokens, vocabulary=4096)
        row: wire.Measurement = self.payloads.measurement(case=case, values=values, **changes)
        return row

    def judge(self) -> int:
        return judge.judge_pending(self.factory)

    def verdict(self, name: str) -> queries.VerdictView:
        with self.factory() as session:
            return queries.verdict(session, "demo", self.payloads.sha(name))

    def findings(self, *states: str) -> tuple[queries.FindingView, ...]:
        with self.factory() as session:
            return queries.findings(session, "demo", states or None, limit=1000)

    def line(self, peaks: Sequence[float], **row: Any) -> None:
        """A straight history c0, c1, ... with these peaks, judged."""
        for index, peak in enumerate(peaks):
            self.post(self.at(index), self.row(peak, **row))
        self.judge()

    def at(self, index: int, **changes: Any) -> wire.Commit:
        parents = (f"c{index - 1}",) if index else ()
        return self.commit(f"c{index}", *parents, minute=index, **changes)


@pytest.fixture
def story(session_factory: SessionFactory, payloads: SimpleNamespace) -> Story:
    return Story(session_factory, payloads)


def test_a_step_after_a_flat_history_is_flagged_from_one_commit_and_only_there(story: Story) -> None:
    story.line([B] * 40 + [B * 1.1] * 2)
    assert story.verdict("c0").state == "no-baseline"
    assert {story.verdict(f"c{index}").state for index in range(1, 40)} == {"pass"}
    flagged, after = story.verdict("c40"), story.verdict("c41")
    assert flagged.state == "regress"
    assert [finding.family for finding in flagged.findings] == ["memory"]
    assert flagged.baseline_sha == story.payloads.sha("c39")
    assert after.state == "pass"
    assert not after.findings
    assert [finding.culprit_sha for finding in after.inherited] == [story.payloads.sha("c40")]
    assert len(story.findings()) == 1


@pytest.mark.parametrize(
    ("dtype", "error", "state"),
    [("bfloat16", 1e-3, "pass"), ("float32", 1e-3, "regress"), ("bfloat16", 1e-2, "regress")],
)
def test_a_zero_baseline_is_decided_by_the_floor(story: Story, dtype: Any, error: float, state: str) -> None:
    case = wire.Case(tokens=64, vocabulary=4096, dtype=dtype)
    for index in range(21):
        story.post(story.at(index), story.row(case=case, values={"g_rel_l2_lp": [0.0 if index < 20 else error]}))
    story.judge()
    verdict = story.verdict("c20")
    assert verdict.state == state
    if state == "pass":
        assert "exactness lost" in verdict.reason
        assert [notice.metric for notice in verdict.notices] == ["g_rel_l2_lp"]


def test_an_error_that_goes_to_zero_is_an_improvement(story: Story) -> None:
    for index, error in enumerate([1e-3, 0.0]):
        story.post(story.at(index), story.row(values={"g_rel_l2_lp": [error]}))
    story.judge()
    assert story.verdict("c1").state == "improve"


def test_a_tiny_error_that_grows_a_thousandfold_regresses(story: Story) -> None:
    for index, error in enumerate([1e-6, 1e-3]):
        story.post(story.at(index), story.row(values={"g_rel_l2_lp": [error]}))
    story.judge()
    assert story.verdict("c1").state == "regress"


def test_the_second_push_of_a_pull_request_is_compared_with_the_merge_base(story: Story) -> None:
    main = story.commit("main")
    story.post(main, story.row())
    story.register(main, head="main")
    story.post(story.commit("p1", "main", minute=1), story.row(2 * B))
    story.post(story.commit("p2", "p1", minute=2), story.row(2 * B))
    story.judge()
    second = story.verdict("p2")
    assert (story.verdict("p1").state, second.state) == ("regress", "regress")
    assert (second.baseline_sha, second.baseline_distance) == (story.payloads.sha("main"), 2)


def test_a_documentation_commit_on_a_pull_request_does_not_hide_its_regression(story: Story) -> None:
    main = story.commit("main")
    story.post(main, story.row())
    story.post(story.commit("p1", "main", minute=1), story.row(2 * B))
    story.register(main, story.commit("docs", "p1", watched="p1", minute=2), head="main")
    story.judge()
    verdict = story.verdict("docs")
    assert verdict.state == "regress"
    assert verdict.inherited_from == story.payloads.sha("p1")


def test_merging_a_pull_request_moves_its_findings_to_the_culprit(story: Story) -> None:
    main = story.commit("main")
    story.post(main, story.row())
    story.register(main, head="main")
    story.post(story.commit("p1", "main", minute=1), story.row(2 * B))
    story.post(story.commit("p2", "p1", minute=2), story.row(2 * B))
    story.judge()
    assert len(story.findings("open")) == 2
    story.register(head="p2")
    story.judge()
    assert story.verdict("p2").state == "pass"
    assert [finding.culprit_sha for finding in story.findings("open")] == [story.payloads.sha("p1")]
    assert len(story.findings("retracted")) == 1


def test_a_base_without_results_is_passed_over_and_named_with_its_distance(story: Story) -> None:
    story.post(story.at(0), story.row())
    story.register(story.at(1))
    story.post(story.at(2), story.row())
    story.judge()
    verdict = story.verdict("c2")
    assert (verdict.state, verdict.baseline_sha, verdict.baseline_distance) == ("pass", story.payloads.sha("c0"), 2)
    assert story.verdict("c1").state == "missing"


def test_sizes_that_the_base_lacks_have_no_baseline_and_the_whole_is_no_pass(story: Story) -> None:
    both = [story.row(), story.row(tokens=128)]
    story.post(story.at(0), *both)
    story.post(story.at(1), story.row())
    story.post(story.at(2), *both)
    story.post(story.at(3), *both)
    story.judge()
    assert [story.verdict(f"c{index}").state for index in range(4)] == ["no-baseline", "missing", "no-baseline", "pass"]
    assert {item.case_id for item in story.verdict("c2").undecided} == {both[1].case.id}


def test_what_is_missing_stays_missing_until_it_is_measured(story: Story) -> None:
    both = [story.row(), story.row(tokens=128)]
    story.post(story.at(0), *both)
    story.post(story.at(1), story.row())
    story.post(story.at(2), story.row(), suite="another")
    story.register(story.at(3, watched="c2"))
    story.post(story.at(4), story.row(), story.row(2 * B, tokens=128))
    story.judge()
    assert [story.verdict(f"c{index}").state for index in range(1, 5)] == ["missing", "missing", "missing", "regress"]
    assert story.verdict("c4").findings[0].affected[0].reason == (
        f"the commits after {story.payloads.sha('c0')[:7]} did not measure it"
    )


def test_a_kernel_that_the_target_no_longer_declares_is_not_missing(
    session_factory: SessionFactory, payloads: SimpleNamespace
) -> None:
    (fused,) = payloads.target().kernels
    second = fused.model_copy(update={"name": "second", "control": None})
    story = Story(session_factory, payloads, kernels=[fused.model_dump(), second.model_dump()])
    story.post(story.at(0), story.row(), story.row(kernel="second"))
    story.post(story.at(1), story.row())
    story.judge()
    assert story.verdict("c1").state == "missing"
    with session_factory.begin() as session:
        register_target(session, payloads.target(), registered_by="test")
    story.judge()
    assert story.verdict("c1").state == "pass"


def test_nothing_is_made_of_a_base_that_could_not_be_measured(story: Story) -> None:
    story.post(story.at(0), story.row(outcome="unmeasurable", values={}, notes={"outcome": "no such module"}))
    story.register(story.at(1, watched="c0"))
    story.judge()
    verdict = story.verdict("c1")
    assert (verdict.state, verdict.inherited_from) == ("invalid", story.payloads.sha("c0"))


def test_a_history_that_begins_in_the_middle_says_so(story: Story) -> None:
    story.post(story.at(1), story.row())
    story.judge()
    assert f"ancestor {story.payloads.sha('c0')[:7]} is unknown here" in story.verdict("c1").reason
    story.register(story.at(0))
    story.judge()
    assert story.verdict("c1").reason == "no ancestor is measured: this is the first measurement"


def test_a_merge_base_that_is_not_measured_is_queued_once(story: Story, session_factory: SessionFactory) -> None:
    story.post(story.at(0), story.row())
    story.register(story.at(1), head="c1")
    for index in range(2):
        story.post(story.commit(f"p{index}", "c1", minute=9), story.row())
        story.judge()
    with session_factory() as session:
        jobs = session.execute(select(models.Commit.sha, models.Job.suite).join(models.Job)).all()
    assert [tuple(job) for job in jobs] == [(story.payloads.sha("c1"), "demo")]
    assert (story.verdict("p0").state, story.verdict("p0").baseline_distance) == ("pass", 2)


def test_a_push_that_repairs_a_pull_request_closes_its_finding(story: Story) -> None:
    main = story.commit("main")
    story.post(main, story.row())
    story.register(main, head="main")
    story.post(story.commit("p1", "main", minute=1), story.row(2 * B))
    story.post(story.commit("p2", "p1", minute=2), story.row(2 * B))
    story.judge()
    assert len(story.findings("open")) == 2
    story.post(story.commit("p3", "p2", minute=3), story.row(B))
    story.judge()
    assert (len(story.findings("open")), len(story.findings("recovered"))) == (0, 2)


def test_quarantined_results_are_no_base_to_compare_with(story: Story) -> None:
    story.post(story.at(0), story.row(), quarantined=True)
    story.post(story.at(1), story.row())
    with story.factory() as session, pytest.raises(Invalid, match="quarantined"):
        judge.compare(session, "demo", story.payloads.sha("c0"), story.payloads.sha("c1"))


def test_a_failed_base_measurement_keeps_the_level_before_it(story: Story) -> None:
    story.post(story.at(0), story.row())
    story.post(story.at(1), story.row(outcome="killed", values={}, notes={"outcome": "killed by signal 9"}))
    story.post(story.at(2), story.row(B * 2))
    story.judge()
    assert [story.verdict(f"c{index}").state for index in range(1, 3)] == ["regress", "regress"]
    assert story.verdict("c2").findings[0].family == "memory"
    assert "killed by signal 9" in story.verdict("c1").reason
    assert [finding.family for finding in story.verdict("c2").recovered] == ["contract"]


def test_a_late_result_moves_the_culprit_and_leaves_one_finding(story: Story) -> None:
    story.register(story.at(11))
    for index in [*range(11), *range(12, 20)]:
        story.post(story.at(index), story.row(B if index < 12 else 2 * B))
        story.judge()
    assert [finding.culprit_sha for finding in story.findings("open")] == [story.payloads.sha("c12")]
    story.post(story.at(11), story.row(2 * B))
    story.judge()
    assert [finding.culprit_sha for finding in story.findings("open")] == [story.payloads.sha("c11")]
    (retracted,) = story.findings("retracted")
    assert [event.action for event in retracted.events] == ["opened", "retracted"]
    assert {story.verdict(f"c{index}").state for index in range(12, 20)} == {"pass"}


def test_repetitions_that_agree_change_nothing_and_differing_ones_are_undecided(story: Story) -> None:
    story.line([B, B])
    story.post(story.at(1), story.row())
    story.judge()
    assert story.verdict("c1").state == "pass"
    story.post(story.at(1), story.row(2 * B))
    story.post(story.at(1), story.row())
    story.judge()
    verdict = story.verdict("c1")
    assert verdict.state == "inconclusive"
    assert [item.samples for item in verdict.undecided] == [(B, B, B, B, B, B, 2 * B, 2 * B)]


def test_uploads_that_race_make_one_finding(story: Story) -> None:
    story.line([B])
    errors: list[BaseException] = []

    def upload(tokens: int) -> None:
        try:
            story.post(story.at(1), story.row(2 * B), story.row(tokens=tokens))
            story.judge()
        except BaseException as error:  # noqa: BLE001 (reported by the test's own thread)
            errors.append(error)

    threads = [threading.Thread(target=upload, args=(65 + index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    story.judge()
    assert not errors
    assert [finding.direction for finding in story.findings()] == ["regress"]
    assert story.verdict("c1").state == "regress"


def test_a_commit_with_equal_watched_paths_inherits_and_passes(story: Story) -> None:
    story.line([B, 2 * B])
    story.register(story.at(2, watched="c1"))
    story.judge()
    verdict = story.verdict("c2")
    assert (verdict.state, verdict.inherited_from) == ("pass", story.payloads.sha("c1"))
    assert [finding.culprit_sha for finding in verdict.inherited] == [story.payloads.sha("c1")]


def test_an_inheriting_commit_that_is_measured_on_request_is_compared_exactly(story: Story) -> None:
    story.line([B])
    story.register(story.at(1, watched="c0"))
    story.judge()
    story.post(story.at(1, watched="c0"), story.row(B + 8192, values={"step_wall_seconds": [9.0]}))
    story.judge()
    verdict = story.verdict("c1")
    assert (verdict.state, verdict.inherited_from) == ("regress", None)
    assert {item.metric for item in verdict.findings[0].affected} == {"step_peak_bytes"}


def test_a_loss_after_an_accepted_improvement_regresses_against_the_new_level(story: Story) -> None:
    story.line([B, 0.75 * B, 0.75 * B, 0.9 * B])
    assert [story.verdict(f"c{index}").state for index in range(1, 4)] == ["improve", "pass", "regress"]
    (step,) = story.verdict("c3").findings[0].affected
    assert (step.before, step.after) == (0.75 * B, 0.9 * B)


def test_volatile_facts_do_not_end_a_series_and_another_device_does(story: Story) -> None:
    host = story.payloads.environment
    story.post(story.at(0), story.row(), host=host())
    story.post(story.at(1), story.row(), host=host(mhz=1200.0))
    story.post(story.at(2), story.row(), host=host(torch="3.0"))
    story.post(story.at(3), story.row(), host=host(torch="3.0"))
    story.judge()
    assert [story.verdict(f"c{index}").state for index in range(1, 4)] == ["pass", "incomparable", "pass"]


def test_other_inputs_void_the_comparison_of_errors(story: Story) -> None:
    story.post(story.at(0), story.row())
    story.post(story.at(1), story.row(inputs="other"))
    story.judge()
    verdict = story.verdict("c1")
    assert verdict.state == "incomparable"
    assert {item.metric for item in verdict.undecided} == {"g_rel_l2_lp"}


def test_a_wrong_gradient_is_named_with_dtype_and_scale_and_its_memory_is_not_celebrated(story: Story) -> None:
    cases = [
        wire.Case(tokens=64, vocabulary=4096, dtype=dtype, temperature=temperature)
        for dtype in ("float32", "bfloat16")
        for temperature in (1.0, 0.02)
    ]
    story.post(story.at(0), *[story.row(case=case, values={"lp_abs_max": [1e-6]}) for case in cases])
    bad = [story.row(B / 2, case=cases[3], values={"lp_abs_max": [2e-6], "g_rel_l2_lp": [0.12]})]
    story.post(story.at(1), *[story.row(case=case, values={"lp_abs_max": [1e-6]}) for case in cases[:3]], *bad)
    story.judge()
    verdict = story.verdict("c1")
    assert verdict.state == "regress"
    (finding,) = verdict.findings
    assert "log-prob gradient" in finding.sentence
    assert "bfloat16" in finding.sentence
    assert "t0.02" in finding.sentence


def test_going_back_is_a_pass_that_recovers_the_finding(story: Story) -> None:
    story.line([B, 2 * B, 2 * B, B])
    verdict = story.verdict("c3")
    assert verdict.state == "pass"
    assert [finding.culprit_sha for finding in verdict.recovered] == [story.payloads.sha("c1")]
    (finding,) = story.findings()
    assert finding.state == "recovered"
    assert [event.action for event in finding.events] == ["opened", "recovered"]


def test_a_finding_recovers_only_when_the_default_branch_does(story: Story) -> None:
    story.line([B, 2 * B])
    story.register(head="c1")
    story.post(story.commit("fix", "c1", minute=9), story.row())
    story.judge()
    assert [finding.state for finding in story.findings()] == ["open"]
    story.register(head="fix")
    story.judge()
    assert [finding.state for finding in story.findings()] == ["recovered"]


def test_an_entry_that_was_never_callable_is_invalid_and_one_that_was_regresses(story: Story) -> None:
    broken = story.row(outcome="unmeasurable", values={}, notes={"outcome": "no module named lossfn"})
    for index, row in enumerate([broken, broken, story.row(), broken, broken, story.row()]):
        story.post(story.at(index), row)
    story.judge()
    states = [story.verdict(f"c{index}").state for index in range(6)]
    assert states == ["invalid", "invalid", "no-baseline", "regress", "pass", "pass"]
    assert "no module named lossfn" in story.verdict("c0").reason
    assert story.verdict("c5").recovered


def test_quarantined_results_get_a_verdict_and_are_nobodys_baseline(story: Story) -> None:
    story.line([B])
    story.post(story.at(1), story.row(2 * B), quarantined=True)
    story.post(story.at(2), story.row(2 * B))
    story.judge()
    assert story.verdict("c1").state == "regress"
    verdict = story.verdict("c2")
    assert (verdict.state, verdict.baseline_sha) == ("regress", story.payloads.sha("c0"))


def test_a_control_is_never_judged(story: Story) -> None:
    for index, peak in enumerate([B, 4 * B]):
        control = story.row(peak, kernel="legacy", role="control")
        story.post(story.at(index), story.row(), control)
    story.judge()
    assert story.verdict("c1").state == "pass"


def test_a_required_device_that_did_not_measure_makes_the_verdict_missing(
    session_factory: SessionFactory, payloads: SimpleNamespace
) -> None:
    story = Story(session_factory, payloads, require={"devices": ["cpu", "cuda"], "metrics": ["exact"]})
    story.line([B, B])
    verdict = story.verdict("c1")
    assert verdict.state == "missing"
    assert "cuda" in verdict.reason
    story.register(story.at(2, watched="c1"))
    story.post(story.at(3), story.row(2 * B))
    story.register(story.at(4, watched="c3"))
    story.judge()
    assert [story.verdict(f"c{index}").state for index in (2, 3, 4)] == ["missing", "regress", "missing"]


def test_a_metric_class_that_is_not_required_decides_nothing(
    session_factory: SessionFactory, payloads: SimpleNamespace
) -> None:
    story = Story(session_factory, payloads, require={"devices": ["cpu"], "metrics": ["numeric"]})
    story.line([B, 2 * B])
    verdict = story.verdict("c1")
    assert verdict.state == "pass"
    assert [finding.family for finding in verdict.findings] == ["memory"]


def test_a_target_maps_states_to_what_ci_sees(session_factory: SessionFactory, payloads: SimpleNamespace) -> None:
    story = Story(session_factory, payloads, ci={"no-baseline": "pass", "missing": "pass", "improve": "fail"})
    story.line([B, B / 2, B])
    assert [story.verdict(f"c{index}").ci for index in range(3)] == ["pass", "fail", "fail"]
    story.register(story.at(3))
    assert (story.verdict("c3").state, story.verdict("c3").ci) == ("missing", "undecided")


def test_a_budget_fails_whatever_the_history_says(session_factory: SessionFactory, payloads: SimpleNamespace) -> None:
    (fused,) = payloads.target().kernels
    unit = 64 * 4096 * 4
    budget = {"step_peak_bytes": {"units": 2.0, "slack_bytes": 4096}}
    story = Story(session_factory, payloads, kernels=[fused.model_dump() | {"budget": budget}])
    story.line([3.0 * unit, 3.0 * unit, 2.0 * unit + 4096, 2.0 * unit + 4097])
    assert [story.verdict(f"c{index}").state for index in range(4)] == ["regress", "pass", "improve", "regress"]
    (finding,) = story.verdict("c0").findings
    assert finding.affected[0].metric == "within_budget"
    assert finding.affected[0].reason == "step_peak_bytes 3,145,728 bytes over 2,101,248"
    assert [one.culprit_sha for one in story.verdict("c2").recovered] == [story.payloads.sha("c0")]


def test_a_kernel_over_its_budget_is_held_to_its_improvements(
    session_factory: SessionFactory, payloads: SimpleNamespace
) -> None:
    (fused,) = payloads.target().kernels
    story = Story(
        session_factory, payloads, kernels=[fused.model_dump() | {"budget": {"step_peak_bytes": {"units": 1.0}}}]
    )
    unit = 64 * 4096 * 4
    story.line([4.0 * unit, 2.0 * unit, 4.0 * unit])
    assert [story.verdict(f"c{index}").state for index in range(3)] == ["regress", "improve", "regress"]
    assert "does not hold" in story.verdict("c0").reason


def test_an_unjudged_commit_is_missing_and_says_why(story: Story) -> None:
    story.post(story.at(0), story.row())
    story.register(story.at(1))
    assert "not judged yet" in story.verdict("c0").reason
    story.judge()
    assert "no job" in story.verdict("c1").reason
    assert "unknown" in story.verdict("nowhere").reason


def test_judging_again_finds_nothing_to_do(story: Story) -> None:
    story.line([B, 2 * B])
    assert story.judge() == 0


def test_a_commit_is_compared_with_any_base_without_storing_it(story: Story) -> None:
    story.line([B, 2 * B, 2 * B])
    with story.factory() as session:
        verdict = judge.compare(session, "demo", story.payloads.sha("c0"), story.payloads.sha("c2")[:8])
        assert (verdict.state, verdict.baseline_distance) == ("regress", 2)
        assert verdict.findings[0].culprit_sha == story.payloads.sha("c2")
        assert not session.dirty
        assert not session.new
    assert len(story.findings()) == 1


# --- What people decide -----------------------------------------------------------------------------------------------


def decide(story: Story, action: Any, *, finding: int | None = None, **more: Any) -> None:
    found = finding if finding is not None else story.findings("open")[0].id
    with story.factory.begin() as session:
        triage(session, found, action, actor="Ada", reason="it has to be", **more)
    story.judge()


def test_an_accepted_regression_is_the_new_baseline(story: Story) -> None:
    story.line([B, 2 * B, 2 * B])
    decide(story, "accept")
    accepted, after = story.verdict("c1"), story.verdict("c2")
    assert (accepted.state, after.state) == ("pass", "pass")
    assert "accepted: peak memory" in accepted.reason
    assert not after.inherited
    assert [finding.state for finding in accepted.findings] == ["accepted"]
    story.post(story.at(3), story.row(3 * B))
    story.post(story.at(4), story.row(B))
    story.judge()
    worse, better = story.verdict("c3"), story.verdict("c4")
    assert (worse.state, worse.findings[0].affected[0].before) == ("regress", 2 * B)
    assert (better.state, better.findings[0].affected[0].before) == ("improve", 2 * B)


def test_a_dismissed_regression_moves_no_baseline(story: Story) -> None:
    story.line([B, 2 * B, 2 * B])
    decide(story, "dismiss")
    assert [story.verdict(f"c{index}").state for index in (1, 2)] == ["pass", "pass"]
    assert not story.verdict("c2").inherited
    story.post(story.at(3), story.row(B))
    story.judge()
    assert story.verdict("c3").state == "pass"  # back, and no improvement


def test_a_decision_can_be_taken_back(story: Story) -> None:
    story.line([B, 2 * B])
    decide(story, "accept")
    decide(story, "reopen", finding=story.findings("accepted")[0].id)
    assert story.verdict("c1").state == "regress"
    (finding,) = story.findings("open")
    assert [(event.actor, event.action) for event in finding.events] == [
        ("judge", "opened"),
        ("Ada", "accepted"),
        ("Ada", "open"),
    ]


def test_a_dismissal_ends(story: Story) -> None:
    story.line([B, 2 * B])
    decide(story, "dismiss", until=datetime.now(UTC) + timedelta(days=1))
    assert story.verdict("c1").state == "pass"
    with story.factory.begin() as session:
        end_dismissals(session, datetime.now(UTC) + timedelta(days=2))
    story.judge()
    assert story.verdict("c1").state == "regress"


def test_an_acceptance_on_a_pull_request_holds_for_the_commit_that_lands_it(story: Story) -> None:
    main = story.commit("main")
    story.post(main, story.row())
    story.register(main, head="main")
    story.post(story.commit("p1", "main", watched="new", minute=1), story.row(2 * B))
    story.judge()
    decide(story, "accept")
    story.post(story.commit("squashed", "main", watched="new", minute=2), story.row(2 * B))
    story.register(head="squashed")
    story.judge()
    assert (story.verdict("p1").state, story.verdict("squashed").state) == ("pass", "pass")
    assert len(story.findings("accepted")) == 2
    decide(story, "reopen", finding=story.findings("accepted")[0].id)
    assert (story.verdict("p1").state, story.verdict("squashed").state) == ("regress", "regress")
    assert not story.findings("accepted")


def test_a_decision_is_about_the_values_that_were_seen(story: Story) -> None:
    both = [story.row(), story.row(tokens=128)]
    story.post(story.at(0), *both)
    story.post(story.at(1), story.row(2 * B), both[1])
    story.judge()
    decide(story, "accept")
    assert story.verdict("c1").state == "pass"
    story.post(story.at(2), story.row(2 * B), story.row(90 * B, tokens=128))
    with story.factory.begin() as session:  # a later result of the same commit shows more
        run = session.scalars(select(models.Run).order_by(models.Run.id)).all()[1]
        session.execute(delete(models.Measurement).where(models.Measurement.run_id == run.id))
    story.post(story.at(1), story.row(2 * B), story.row(90 * B, tokens=128))
    story.judge()
    (memory,) = story.verdict("c1").findings
    assert (story.verdict("c1").state, memory.state) == ("regress", "open")


def test_a_decision_covers_every_device_that_it_was_made_on(
    session_factory: SessionFactory, payloads: SimpleNamespace
) -> None:
    story = Story(session_factory, payloads, require={"devices": ["cpu", "cuda"], "metrics": ["exact"]})
    hosts = [payloads.environment(), payloads.environment(device_class="cuda")]
    for index, peaks in enumerate([(B, B), (2 * B, 9 * B)]):
        for host, peak in zip(hosts, peaks, strict=True):
            story.post(story.at(index), story.row(peak), host=host)
    story.judge()
    assert story.verdict("c1").state == "regress"
    decide(story, "accept")
    assert story.verdict("c1").state == "pass"


def test_going_back_to_what_was_accepted_is_no_landing_of_it(story: Story) -> None:
    story.post(story.at(0), story.row())
    story.post(story.at(1, watched="old"), story.row(2 * B))
    story.judge()
    decide(story, "accept")
    story.post(story.at(2), story.row(B / 4))
    story.post(story.at(3, watched="old"), story.row(2 * B))
    story.judge()
    assert [story.verdict(f"c{index}").state for index in (1, 2, 3)] == ["pass", "improve", "regress"]


def test_what_an_untrusted_post_says_of_its_content_shares_no_decision(story: Story) -> None:
    main = story.commit("main")
    story.post(main, story.row())
    story.register(main, head="main")
    story.post(story.commit("p1", "main", watched="new", minute=1), story.row(2 * B))
    story.judge()
    decide(story, "accept")
    story.post(story.commit("fork", "main", watched="new", minute=2), story.row(2 * B), quarantined=True)
    story.judge()
    assert (story.verdict("p1").state, story.verdict("fork").state) == ("pass", "regress")


def test_an_acknowledged_regression_stays_one(story: Story) -> None:
    story.line([B, 2 * B])
    decide(story, "acknowledge")
    assert story.verdict("c1").state == "regress"
    story.post(story.at(2), story.row(B))
    story.judge()
    assert [finding.state for finding in story.findings()] == ["recovered"]


def test_a_decision_is_made_on_what_was_seen(story: Story) -> None:
    story.line([B, 2 * B])
    (finding,) = story.findings()
    for action, more, error in (
        ("reopen", {}, "only accepted or acknowledged or dismissed"),
        ("accept", {"seen": "acknowledged"}, "is open by now"),
        ("accept", {"until": datetime.now(UTC) + timedelta(days=1)}, "cannot end then"),
        ("dismiss", {"until": datetime.now(UTC) - timedelta(days=1)}, "cannot end then"),
    ):
        with pytest.raises(ServiceError, match=error):
            decide(story, action, finding=finding.id, **more)
    with pytest.raises(ServiceError, match="unknown"):
        decide(story, "accept", finding=99)
    assert story.findings() == (finding,)


def test_an_improvement_needs_no_decision(story: Story) -> None:
    story.line([B, B / 2])
    with pytest.raises(ServiceError, match="improvement"):
        decide(story, "accept", finding=story.findings()[0].id)


# --- Order of arrival -------------------------------------------------------------------------------------------------


def _random_history(story: Story, seed: int) -> list[Callable[[], None]]:
    """Arrivals of a history with merges, repetitions, gaps and inheriting commits, in the order of the graph."""
    chance = random.Random(seed)
    arrivals: list[Callable[[], None]] = []
    for index in range(9):
        parents = [f"c{index - 1 - chance.choice([0, 0, 0, 1]) * (index > 1)}"] if index else []
        if index > 3 and chance.random() < 0.2:
            parents.append(f"c{index - 3}")
        watched = parents[0] if parents and chance.random() < 0.2 else None
        commit = story.commit(f"c{index}", *parents, watched=watched, minute=index)
        kind = chance.random()
        if kind < 0.15 or watched:
            arrivals.append(lambda commit=commit: story.register(commit))
            continue
        for _ in range(1 + (chance.random() < 0.2)):
            rows = [_random_row(story, chance, tokens) for tokens in (64, 128) if chance.random() < 0.85]
            host = story.payloads.environment(torch=chance.choice(["2.13.0"] * 4 + ["3.0"]))
            attempt = uuid.UUID(int=chance.getrandbits(128))
            arrivals.append(
                lambda commit=commit, rows=rows, host=host, attempt=attempt: story.post(
                    commit, *(rows or [story.row()]), host=host, attempt=attempt
                )
            )
    return arrivals


def _random_row(story: Story, chance: random.Random, tokens: int) -> wire.Measurement:
    if chance.random() < 0.1:
        return story.row(tokens=tokens, outcome="raised", values={}, notes={"outcome": f"ValueError: not {tokens}"})
    values = {
        "g_rel_l2_lp": [chance.choice([3e-8, 3e-8, 1e-3])],
        "operations": [float(chance.choice([24, 24, 40]))],
        "gradient_defined": [float(chance.random() < 0.85)],
    }
    return story.row(chance.choice([B, B, 2 * B, 3 * B]), tokens=tokens, values=values)


def _outcome(story: Story) -> tuple[Any, ...]:
    """Everything that the judge decided, without ids, times and findings that were taken back."""
    with story.factory() as session:
        rows = session.execute(
            select(models.Commit.sha, models.Verdict.state, models.Verdict.reason, models.Verdict.document)
            .join(models.Commit, models.Commit.id == models.Verdict.commit_id)
            .order_by(models.Commit.sha)
        ).all()
    findings = sorted(
        (finding.culprit_sha, finding.kernel, finding.family, finding.direction, finding.state, finding.sentence)
        for finding in story.findings()
        if finding.state != "retracted"
    )
    return tuple((row.sha, row.state, row.reason, row.document) for row in rows), findings


@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_arrival_gives_the_same_verdicts(
    session_factory: SessionFactory, payloads: SimpleNamespace, seed: int
) -> None:
    outcomes = []
    for order in range(3):
        story = Story(session_factory, payloads)
        _empty(session_factory)
        arrivals = _random_history(story, seed)
        chance = random.Random(order)
        chance.shuffle(arrivals)
        for arrive in arrivals:
            arrive()
            if order and chance.random() < 0.7:
                story.judge()
        story.judge()
        outcomes.append(_outcome(story))
    assert outcomes[0] == outcomes[1] == outcomes[2]
    assert outcomes[0][0]


def _empty(factory: SessionFactory) -> None:
    """Forget all commits and what hangs on them; the target stays."""
    tables: Sequence[Any] = (
        models.FindingEvent,
        models.Finding,
        models.Verdict,
        models.LevelSet,
        models.Measurement,
        models.Run,
        models.Commit,
    )
    with factory.begin() as session:
        for table in tables:
            session.query(table).delete()


def test_a_number_that_is_not_finite_is_found_and_never_stored_as_one(story: Story) -> None:
    story.post(story.at(0), story.row())
    values: Mapping[str, Sequence[float]] = {
        name: samples for name, samples in story.payloads.values.items() if name != "g_rel_l2_lp"
    }
    bad = story.payloads.measurement(values=values, nonfinite=["g_rel_l2_lp"])
    story.post(story.at(1), bad)
    story.post(story.at(2), bad)
    story.judge()
    assert [story.verdict(f"c{index}").state for index in (1, 2)] == ["regress", "pass"]
    (step,) = [item for item in story.verdict("c1").findings[0].affected if item.metric == "g_rel_l2_lp"]
    assert step.after is None
