"""What is posted is stored once, whole or not at all, on both engines."""

import threading
import uuid
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from sqlalchemy import func, select

from service.db import SessionFactory
from service.errors import Conflict, Forbidden, Invalid, NotFound
from service.ingest import ingest, register_commits, register_target
from service.models import Commit, Environment, Measurement, Run, Series, TargetVersion
from service.samples import unpack


def _at_once(*calls: Callable[[], object]) -> list[object]:
    """What the calls gave back or raised, run in threads that start together."""
    barrier = threading.Barrier(len(calls))
    outcomes: list[object] = [None] * len(calls)

    def run(index: int, call: Callable[[], object]) -> None:
        barrier.wait()
        try:
            outcomes[index] = call()
        except Exception as error:  # noqa: BLE001 (the test looks at it)
            outcomes[index] = error

    threads = [threading.Thread(target=run, args=item) for item in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def _count(session_factory: SessionFactory, model: type) -> int:
    with session_factory() as session:
        return session.scalar(select(func.count()).select_from(model)) or 0


def _generation(session_factory: SessionFactory, sha: str) -> int:
    with session_factory() as session:
        return session.scalars(select(Commit.judge_generation).where(Commit.sha == sha)).one()


@pytest.fixture(autouse=True)
def _target(session_factory: SessionFactory, payloads: SimpleNamespace) -> None:
    with session_factory.begin() as session:
        register_target(session, payloads.target(), registered_by="test")


def test_every_raw_sample_of_a_result_comes_back(session_factory: SessionFactory, payloads: SimpleNamespace) -> None:
    posted = payloads.measurement(nonfinite=["ent_abs_max"], notes={"g_bf16_grid": "not looked at"})
    with session_factory.begin() as session:
        ingest(session, payloads.result(payloads.commit("a"), [posted]), body_digest="1" * 64, posted_by="test")
    with session_factory() as session:
        row = session.scalars(select(Measurement)).one()
        values, nonfinite = unpack(row.samples)
        assert values == {name: tuple(samples) for name, samples in payloads.values.items()}
        assert nonfinite == ("ent_abs_max",)
        assert row.notes == {"g_bf16_grid": "not looked at"}
        assert session.scalars(select(Run)).one().volatile == {"mhz": 2400.0}


def test_the_same_attempt_again_changes_nothing(session_factory: SessionFactory, payloads: SimpleNamespace) -> None:
    result = payloads.result(payloads.commit("a"))
    with session_factory.begin() as session:
        first = ingest(session, result, body_digest="1" * 64, posted_by="test")
    generation = _generation(session_factory, payloads.sha("a"))
    with session_factory.begin() as session:
        again = ingest(session, result, body_digest="1" * 64, posted_by="test")
    assert (first.created, again.created, again.run_id) == (True, False, first.run_id)
    assert _generation(session_factory, payloads.sha("a")) == generation
    assert _count(session_factory, Measurement) == 1


def test_the_same_attempt_with_another_body_is_a_conflict(
    session_factory: SessionFactory, payloads: SimpleNamespace
) -> None:
    result = payloads.result(payloads.commit("a"))
    with session_factory.begin() as session:
        ingest(session, result, body_digest="1" * 64, posted_by="test")
    with pytest.raises(Conflict) as caught, session_factory.begin() as session:
        ingest(session, result, body_digest="2" * 64, posted_by="test")
    assert caught.value.errors[0].field == "body.attempt"


def test_the_same_attempt_twice_at_once_is_stored_once(
    session_factory: SessionFactory, payloads: SimpleNamespace
) -> None:
    result = payloads.result(payloads.commit("a"))

    def post() -> object:
        with session_factory.begin() as session:
            return ingest(session, result, body_digest="1" * 64, posted_by="test")

    outcomes = _at_once(*[post] * 4)
    assert sorted(outcome.created for outcome in outcomes) == [False, False, False, True]  # type: ignore[attr-defined]
    assert _count(session_factory, Run) == 1
    assert _generation(session_factory, payloads.sha("a")) == 2


def test_posts_at_once_share_commit_environment_and_series(
    session_factory: SessionFactory, payloads: SimpleNamespace
) -> None:
    cases = [payloads.measurement(kernel=f"k{number}") for number in range(20)]
    results = [payloads.result(payloads.commit("a"), cases[:: 1 if number % 2 else -1]) for number in range(4)]

    def post(number: int) -> Callable[[], object]:
        def call() -> object:
            with session_factory.begin() as session:
                return ingest(session, results[number], body_digest=str(number) * 64, posted_by="test")

        return call

    outcomes = _at_once(*[post(number) for number in range(4)])
    assert all(getattr(outcome, "created", False) for outcome in outcomes), outcomes
    assert [_count(session_factory, model) for model in (Commit, Environment, Series, Run)] == [1, 1, 20, 4]
    assert _generation(session_factory, payloads.sha("a")) == 5


def test_only_identity_makes_another_environment(session_factory: SessionFactory, payloads: SimpleNamespace) -> None:
    hosts = [
        payloads.environment(),
        payloads.environment(mhz=1580.0),
        payloads.environment(torch="2.14.0"),
    ]
    for host in hosts:
        with session_factory.begin() as session:
            ingest(session, payloads.result(payloads.commit("a"), host=host), body_digest="1" * 64, posted_by="test")
    assert _count(session_factory, Environment) == 2


def test_an_unknown_target_is_not_found_and_nothing_is_stored(
    session_factory: SessionFactory, payloads: SimpleNamespace
) -> None:
    with pytest.raises(NotFound, match="nowhere"), session_factory.begin() as session:
        ingest(session, payloads.result(payloads.commit("a"), target="nowhere"), body_digest="1" * 64, posted_by="test")
    assert _count(session_factory, Commit) == 0


def test_an_attempt_that_no_job_knows_is_forbidden(session_factory: SessionFactory, payloads: SimpleNamespace) -> None:
    with pytest.raises(Forbidden, match="no attempt of job 1"), session_factory.begin() as session:
        ingest(session, payloads.result(payloads.commit("a"), job=1), body_digest="1" * 64, posted_by="test")
    assert _count(session_factory, Run) == 0


def test_a_kernel_does_not_turn_into_a_control(session_factory: SessionFactory, payloads: SimpleNamespace) -> None:
    with session_factory.begin() as session:
        ingest(session, payloads.result(payloads.commit("a")), body_digest="1" * 64, posted_by="test")
    rows = [payloads.measurement(role="control")]
    with pytest.raises(Invalid) as caught, session_factory.begin() as session:
        ingest(session, payloads.result(payloads.commit("b"), rows), body_digest="2" * 64, posted_by="test")
    assert caught.value.errors[0].field == "body.measurements[0].role"


def test_parents_are_filled_in_and_never_replaced(session_factory: SessionFactory, payloads: SimpleNamespace) -> None:
    with session_factory.begin() as session:
        register_commits(session, "demo", [payloads.commit("b")])
    for parents in (["a"], []):
        with session_factory.begin() as session:
            register_commits(session, "demo", [payloads.commit("b", parents)])
    with session_factory() as session:
        assert session.scalars(select(Commit.parents)).one() == [payloads.sha("a")]
    assert _generation(session_factory, payloads.sha("b")) == 2
    with pytest.raises(Conflict) as caught, session_factory.begin() as session:
        register_commits(session, "demo", [payloads.commit("a"), payloads.commit("b", ["c"])])
    assert caught.value.errors[0].field == "body.commits[1].parents"
    assert _count(session_factory, Commit) == 1


def test_a_quarantined_result_changes_nothing_that_was_known_of_its_commit(
    session_factory: SessionFactory, payloads: SimpleNamespace
) -> None:
    with session_factory.begin() as session:
        register_commits(session, "demo", [payloads.commit("b", watched="true")])
    told = payloads.commit("b", ["evil"], watched="false")
    with session_factory.begin() as session:
        ingest(session, payloads.result(told), body_digest="1" * 64, posted_by="fork", quarantined=True)
    with session_factory() as session:
        commit = session.scalars(select(Commit)).one()
        assert (commit.parents, commit.watched_digest) == ([], payloads.commit("b", watched="true").watched_digest)
        assert session.scalars(select(Run)).one().quarantined


def test_a_moved_head_rejudges_what_entered_or_left_the_branch(
    session_factory: SessionFactory, payloads: SimpleNamespace
) -> None:
    names = {"a": [], "b": ["a"], "c": ["b"], "x": ["a"]}
    commits = [payloads.commit(name, parents) for name, parents in names.items()]
    with session_factory.begin() as session:
        register_commits(session, "demo", commits)
    with session_factory.begin() as session:
        register_commits(session, "demo", [], branch="main", head=payloads.sha("c"))
    first = {name: _generation(session_factory, payloads.sha(name)) for name in names}
    assert first == {"a": 1, "b": 1, "c": 1, "x": 2}, "until a head is known, every commit counts as on the branch"
    with session_factory.begin() as session:
        register_commits(session, "demo", [], branch="main", head=payloads.sha("x"))
    generations = {name: _generation(session_factory, payloads.sha(name)) for name in names}
    assert generations == {"a": 1, "b": 2, "c": 2, "x": 3}


def test_a_target_gets_a_new_version_only_when_it_changes(
    session_factory: SessionFactory, payloads: SimpleNamespace
) -> None:
    with session_factory.begin() as session:
        register_commits(session, "demo", [payloads.commit("a")])
        same = register_target(session, payloads.target(), registered_by="test")
        generation = session.scalars(select(Commit.judge_generation)).one()
        changed = register_target(session, payloads.target(suite="quick"), registered_by="Ada")
    assert (same.version, same.created, generation) == (1, False, 1)
    assert (changed.version, changed.created) == (2, True)
    assert _generation(session_factory, payloads.sha("a")) == 2
    with session_factory() as session:
        authors = session.scalars(select(TargetVersion.registered_by).order_by(TargetVersion.number)).all()
        assert authors == ["test", "Ada"]


def test_a_later_attempt_on_the_same_commit_is_a_repetition(
    session_factory: SessionFactory, payloads: SimpleNamespace
) -> None:
    for digest in "12":
        with session_factory.begin() as session:
            result = payloads.result(payloads.commit("a"), attempt=uuid.uuid4())
            assert ingest(session, result, body_digest=digest * 64, posted_by="test").created
    assert (_count(session_factory, Run), _count(session_factory, Series)) == (2, 1)
