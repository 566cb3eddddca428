"""The read side on both engines: what is stored comes back in the order of the graph."""

import hashlib
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import event
from sqlalchemy.orm import Session

from service import models, queries, wire
from service.db import SessionFactory
from service.errors import Conflict, NotFound
from service.ingest import ingest, register_commits, register_target
from service.judge import judge_pending

CASE = wire.Case(tokens=64, vocabulary=4096)
ENDINGS = ("callable", "completes")


@pytest.fixture
def store(session_factory: SessionFactory, payloads: SimpleNamespace) -> SimpleNamespace:
    """A target `demo` with commits a - b - c, of which a and c are measured and judged; c has doubled its peak."""
    chain = [payloads.commit("a"), payloads.commit("b", ("a",), minute=1), payloads.commit("c", ("b",), minute=2)]

    def post(commit: wire.Commit, *rows: wire.Measurement, **result: Any) -> None:
        payload = payloads.result(commit, rows, **result)
        digest = hashlib.sha256(payload.model_dump_json().encode()).hexdigest()
        with session_factory.begin() as session:
            ingest(session, payload, body_digest=digest, posted_by="test")

    with session_factory.begin() as session:
        register_target(session, payloads.target(), registered_by="test")
        register_commits(session, "demo", chain)
    post(chain[2], payloads.measurement(values={**payloads.values, "step_peak_bytes": [4194304.0] * 2}))
    post(chain[0], payloads.measurement(), payloads.measurement(kernel="legacy", role="control"))
    judge_pending(session_factory)
    return SimpleNamespace(post=post, chain=chain, factory=session_factory)


def job(session: Session, store: SimpleNamespace, *, state: str, **fields: Any) -> models.Job:
    commit = session.query(models.Commit).filter_by(sha=store.chain[1].sha).one()
    is_open = state in ("queued", "leased")
    row = models.Job(
        target_id=commit.target_id,
        commit_id=commit.id,
        kind="measure",
        suite="demo",
        device_class="cpu",
        priority=0,
        state=state,
        open_key="k" if is_open else None,
        created_at=datetime.now(UTC),
        **fields,
    )
    session.add(row)
    session.flush()
    return row


def test_targets_show_their_newest_judged_commit(session: Session, store: SimpleNamespace) -> None:
    (row,) = queries.targets(session)
    assert (row.name, row.branch, row.commits, row.open_findings) == ("demo", "main", 3, 1)
    assert (row.newest_sha, row.newest_state) == (store.chain[2].sha, "regress")


def test_commits_come_newest_first_page_by_page(session: Session, store: SimpleNamespace) -> None:
    first = queries.commits(session, "demo", limit=2)
    rest = queries.commits(session, "demo", limit=2, before=first[-1].sha)
    assert [row.sha for row in (*first, *rest)] == [commit.sha for commit in store.chain[::-1]]
    assert [row.state for row in (*first, *rest)] == ["regress", None, "no-baseline"]
    assert (first[0].baseline_sha, first[0].baseline_distance, first[0].new_findings) == (store.chain[0].sha, 2, 1)


def test_a_cursor_that_is_no_commit_is_refused(session: Session, store: SimpleNamespace) -> None:
    with pytest.raises(NotFound, match="to go on from"):
        queries.commits(session, "demo", before="0" * 40)


def test_a_commit_is_found_by_a_unique_prefix(session: Session, store: SimpleNamespace) -> None:
    sha = store.chain[0].sha
    found = queries.commit(session, "demo", sha[:7])
    assert found is not None
    assert found.sha == sha
    assert queries.commit(session, "demo", sha[:6]) is None
    assert queries.commit(session, "demo", "%" * 7) is None


def test_an_ambiguous_prefix_is_a_conflict_that_names_both(session: Session, store: SimpleNamespace) -> None:
    twin = store.chain[0].model_copy(update={"sha": store.chain[0].sha[:-1] + "0"})
    other = store.chain[0].model_copy(update={"sha": store.chain[0].sha[:-1] + "1"})
    register_commits(session, "demo", [twin, other])
    with pytest.raises(Conflict, match="give more digits"):
        queries.commit(session, "demo", twin.sha[:12])


def test_an_unknown_target_is_not_found(session: Session, store: SimpleNamespace) -> None:
    assert queries.target_definition(session, "nothing") is None
    for ask in (queries.commits, queries.series):
        with pytest.raises(NotFound, match="nothing"):
            ask(session, "nothing")


def test_a_verdict_explains_itself(session: Session, store: SimpleNamespace) -> None:
    view = queries.verdict(session, "demo", store.chain[2].sha[:10])
    assert (view.state, view.baseline_distance, view.counts["regress"]) == ("regress", 2, 1)
    (finding,) = view.findings
    (step,) = finding.affected
    assert (step.before, step.after, step.unit_bytes, step.kernel) == (2097152.0, 4194304.0, 1048576, "fused")
    assert step.samples == (4194304.0, 4194304.0)
    assert "--case n64-v4096-float32-gradient" in finding.reproduce
    assert [event.action for event in finding.events] == ["opened"]
    assert queries.finding(session, finding.id) == finding


@pytest.mark.parametrize(
    ("state", "fields", "words"),
    [
        ("queued", {}, "queued"),
        ("leased", {"leased_by": "box", "lease_expires_at": datetime(2030, 1, 1, tzinfo=UTC)}, "running on box"),
        ("failed", {"failure": "no such commit"}, "failed: no such commit"),
        ("done", {}, "left no result"),
    ],
)
def test_a_commit_without_a_verdict_says_what_its_job_does(
    session: Session, store: SimpleNamespace, state: str, fields: dict[str, Any], words: str
) -> None:
    job(session, store, state=state, **fields)
    view = queries.verdict(session, "demo", store.chain[1].sha)
    assert (view.state, view.judged_at) == ("missing", None)
    assert words in view.reason


def test_findings_are_filtered_and_paged(session: Session, store: SimpleNamespace) -> None:
    (open_,) = queries.findings(session, "demo", ("open",))
    assert queries.findings(session, states=("recovered",)) == ()
    assert queries.findings(session, before=open_.id) == ()
    assert queries.finding(session, open_.id + 1) is None


def test_measurements_come_back_as_posted_with_kernels_before_controls(
    session: Session, store: SimpleNamespace, payloads: SimpleNamespace
) -> None:
    rows = queries.measurements(session, "demo", store.chain[0].sha)
    assert [(row.kernel, row.role) for row in rows] == [("fused", "kernel"), ("legacy", "control")]
    assert rows[0].samples == {name: tuple(samples) for name, samples in payloads.values.items()}


def test_series_name_the_metrics_that_they_have(session: Session, store: SimpleNamespace) -> None:
    rows = queries.series(session, "demo")
    assert [(row.kernel, row.case_id) for row in rows] == [("fused", CASE.id), ("legacy", CASE.id)]
    assert rows[0].metrics == ("step_peak_bytes", "operations", "g_rel_l2_lp", "callable", "completes")


def test_points_follow_the_graph_and_end_segments(
    session_factory: SessionFactory, store: SimpleNamespace, payloads: SimpleNamespace
) -> None:
    broken = payloads.measurement(outcome="raised", values={}, notes={"outcome": "ValueError"})
    store.post(store.chain[1], broken, host=payloads.environment(torch="3.0"))
    with session_factory() as session:
        view = queries.points(session, "demo", "fused", CASE.id, "step_peak_bytes")
    assert [point.sha for point in view.points] == [commit.sha for commit in store.chain]
    assert [point.samples for point in view.points] == [(2097152.0,) * 2, (), (4194304.0,) * 2]
    assert [point.outcome for point in view.points] == ["ok", "raised", "ok"]
    assert view.points[0].segment == view.points[2].segment != view.points[1].segment
    assert (view.unit, view.unit_bytes) == ("byte", 1048576)


def test_a_point_has_the_state_of_its_own_series_and_metric(
    session_factory: SessionFactory, store: SimpleNamespace, payloads: SimpleNamespace
) -> None:
    later = [payloads.commit("d", ("c",), minute=3), payloads.commit("e", ("d",), minute=4)]
    slim = payloads.measurement(values={**payloads.values, "step_peak_bytes": [1048576.0] * 2})
    failed = payloads.measurement(outcome="raised", values={}, notes={"outcome": "ValueError"})
    with session_factory.begin() as session:
        register_commits(session, "demo", later)
    store.post(later[0], slim, payloads.measurement(kernel="legacy", role="control"))
    store.post(later[1], failed)

    def states(metric: str, kernel: str = "fused") -> list[str | None]:
        with session_factory() as session:
            return [point.state for point in queries.points(session, "demo", kernel, CASE.id, metric).points]

    assert states("step_peak_bytes")[2:] == [None, None]
    judge_pending(session_factory)
    assert states("step_peak_bytes") == ["no-baseline", "regress", "improve", "regress"]
    assert states("operations") == ["no-baseline", "pass", "pass", "regress"]
    assert states("g_rel_l2_lp") == ["no-baseline", "pass", "pass", "regress"]
    assert states("operations", kernel="legacy") == [None, None]


def test_a_series_keeps_the_metrics_that_its_newest_measurement_lacks(
    session_factory: SessionFactory, store: SimpleNamespace, payloads: SimpleNamespace
) -> None:
    later = [payloads.commit("d", ("c",), minute=3), payloads.commit("e", ("d",), minute=4)]
    store.post(later[0], payloads.measurement(values={**payloads.values, "step_cpu_seconds": [0.1]}))
    store.post(later[1], payloads.measurement(nonfinite=["ent_abs_max"]))
    with session_factory() as session:
        fused, legacy = queries.series(session, "demo")
    assert fused.metrics == (
        "step_peak_bytes",
        "operations",
        "ent_abs_max",
        "g_rel_l2_lp",
        "step_cpu_seconds",
        *ENDINGS,
    )
    assert legacy.metrics == ("step_peak_bytes", "operations", "g_rel_l2_lp", *ENDINGS)


def test_points_of_what_does_not_exist_are_not_found(session: Session, store: SimpleNamespace) -> None:
    with pytest.raises(NotFound, match="metric"):
        queries.points(session, "demo", "fused", CASE.id, "speed")
    with pytest.raises(NotFound, match="series"):
        queries.points(session, "demo", "fused", "n1", "operations")


def test_runners_say_which_job_they_hold(session: Session, store: SimpleNamespace) -> None:
    now = datetime.now(UTC)
    for name in ("box", "idle"):
        session.add(models.Runner(name=name, device_class="cpu", capabilities={}, registered_at=now, last_seen_at=now))
    held = job(session, store, state="leased", leased_by="box", lease_expires_at=now)
    assert [(row.name, row.working_on) for row in queries.runners(session)] == [("box", held.id), ("idle", None)]
    assert [row.leased_by for row in queries.jobs(session, "demo", "leased")] == ["box"]
    assert queries.jobs(session, state="done") == ()


def test_a_page_costs_the_same_number_of_queries_whatever_the_history(
    session: Session, store: SimpleNamespace, payloads: SimpleNamespace
) -> None:
    def cost() -> int:
        statements: list[str] = []
        listen = lambda *arguments: statements.append(arguments[2])  # noqa: E731 (event.remove needs the same object)
        event.listen(session.get_bind(), "before_cursor_execute", listen)
        queries.commits(session, "demo")
        queries.verdict(session, "demo", store.chain[2].sha)
        queries.points(session, "demo", "fused", CASE.id, "operations")
        queries.targets(session)
        queries.series(session, "demo")
        event.remove(session.get_bind(), "before_cursor_execute", listen)
        return len(statements)

    cost()  # begins the transaction
    before = cost()
    register_commits(session, "demo", [payloads.commit(f"x{index}", (), minute=9) for index in range(20)])
    assert cost() == before


def test_a_poll_with_nothing_to_judge_waits_for_no_writer(store: SimpleNamespace) -> None:
    with store.factory.begin() as writer:
        writer.query(models.Target).update({models.Target.name: "demo"})
        assert judge_pending(store.factory) == 0
