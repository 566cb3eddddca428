"""What is posted is stored once, whole or not at all, on both engines."""

import threading
import uuid
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from sqlalchemy import func, select

from service import wire
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
    cases = [payloads.measurement(case=wire.Case(tokens=number, vocabulary=8)) for number in range(20)]
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


@pytest.mark.parametrize(
    ("kernel", "role", "fields"),
    [
        ("stranger", "kernel", ["kernel"]),
        ("stranger", "control", ["kernel"]),
        ("fused", "control", ["kernel", "role"]),
        ("legacy", "kernel", ["kernel", "role"]),
    ],
)
def test_a_kernel_that_the_target_declares_otherwise_is_refused_and_nothing_stored(
    kernel: str, role: str, fields: list[str], session_factory: SessionFactory, payloads: SimpleNamespace
) -> None:
    rows = [
        payloads.measurement(),
        payloads.measurement(kernel=kernel, role=role, case=wire.Case(tokens=1, vocabulary=2)),
    ]
    with pytest.raises(Invalid) as caught, session_factory.begin() as session:
        ingest(session, payloads.result(payloads.commit("b"), rows), body_digest="2" * 64, posted_by="test")
    assert [error.field for error in caught.value.errors] == [f"body.measurements[1].{field}" for field in fields]
    assert [_count(session_factory, model) for model in (Commit, Series, Run)] == [0, 0, 0]


def test_the_newest_version_that_declares_a_kernel_decides_its_role(
    session_factory: SessionFactory, payloads: SimpleNamespace
) -> None:
    def post(name: str, kernel: str, role: str) -> None:
        rows = [payloads.measurement(kernel=kernel, role=role)]
        with session_factory.begin() as session:
            result = payloads.result(payloads.commit(name), rows)
            ingest(session, result, body_digest=name * 64, posted_by="test")

    post("a", "legacy", "control")
    (declared,) = payloads.target().model_dump()["kernels"]
    with session_factory.begin() as session:
        kernels = [declared | {"name": "legacy", "control": None}]
        register_target(session, payloads.target(kernels=kernels), registered_by="test")
    post("b", "legacy", "kernel")
    post("c", "fused", "kernel")  # measured under the version before
    with session_factory() as session:
        roles = {row.kernel: row.role for row in session.execute(select(Series.kernel, Series.role))}
        assert roles == {"legacy": "kernel", "fused": "kernel"}
    with pytest.raises(Invalid, match="declares 'legacy' as a kernel"):
        post("d", "legacy", "control")


def test_a_trusted_word_replaces_what_only_an_untrusted_one_said(
    session_factory: SessionFactory, payloads: SimpleNamespace
) -> None:
    lie = payloads.commit("b", ["evil"], watched="false", minute=9).model_copy(update={"author": "E", "subject": "e"})
    with session_factory.begin() as session:
        ingest(session, payloads.result(lie), body_digest="1" * 64, posted_by="fork", quarantined=True)
    told = payloads.commit("b", ["a"], watched="true")
    generation = _generation(session_factory, told.sha)
    with session_factory.begin() as session:
        ingest(session, payloads.result(told), body_digest="2" * 64, posted_by="ci")
    with session_factory() as session:
        commit = session.scalars(select(Commit)).one()
        known = (commit.parents, commit.watched_digest, commit.author, commit.subject, commit.committed_at)
        assert known == (told.parents, told.watched_digest, told.author, told.subject, told.committed_at)
    assert _generation(session_factory, told.sha) > generation + 1
    with session_factory.begin() as session:
        ingest(session, payloads.result(lie), body_digest="3" * 64, posted_by="fork", quarantined=True)
    with session_factory() as session:
        assert session.scalars(select(Commit.parents)).one() == told.parents
    with pytest.raises(Conflict), session_factory.begin() as session:
        register_commits(session, "demo", [payloads.commit("b", ["c"], watched="true")])


def test_a_branch_does_not_move_to_a_commit_that_only_an_untrusted_result_tells_of(
    session_factory: SessionFactory, payloads: SimpleNamespace
) -> None:
    told = payloads.commit("b", ["evil"])
    with session_factory.begin() as session:
        ingest(session, payloads.result(told), body_digest="1" * 64, posted_by="fork", quarantined=True)
    with pytest.raises(NotFound, match="post it with its branch"), session_factory.begin() as session:
        register_commits(session, "demo", [], branch="main", head=told.sha)
    with session_factory.begin() as session:
        register_commits(session, "demo", [payloads.commit("b")], branch="main", head=told.sha)


@pytest.mark.parametrize("order", [("x", "y"), ("y", "x")])
def test_contradicting_words_on_the_watched_content_are_a_conflict_in_either_order(
    order: tuple[str, str], session_factory: SessionFactory, payloads: SimpleNamespace
) -> None:
    first, second = (payloads.commit("b", watched=content) for content in order)
    with session_factory.begin() as session:
        register_commits(session, "demo", [first])
    for _ in range(2):
        with pytest.raises(Conflict) as caught, session_factory.begin() as session:
            ingest(session, payloads.result(second), body_digest="1" * 64, posted_by="test")
        assert caught.value.errors[0].field == "body.commit.watched_digest"
        with pytest.raises(Conflict) as caught, session_factory.begin() as session:
            register_commits(session, "demo", [payloads.commit("a"), second])
        assert caught.value.errors[0].field == "body.commits[1].watched_digest"
    with session_factory() as session:
        assert session.scalars(select(Commit.watched_digest)).all() == [first.watched_digest]


def test_contradicting_words_at_once_leave_one_of_them_in_conflict(
    session_factory: SessionFactory, payloads: SimpleNamespace
) -> None:
    with session_factory.begin() as session:
        register_commits(session, "demo", [payloads.commit("b").model_copy(update={"watched_digest": None})])

    def post(content: str) -> Callable[[], object]:
        def call() -> object:
            with session_factory.begin() as session:
                return register_commits(session, "demo", [payloads.commit("b", watched=content)])

        return call

    outcomes = _at_once(*[post(content) for content in "uvwxyz"])
    assert sorted(type(outcome).__name__ for outcome in outcomes) == ["Conflict"] * 5 + ["NoneType"]


def test_digests_of_other_paths_are_neither_kept_nor_compared(
    session_factory: SessionFactory, payloads: SimpleNamespace
) -> None:
    def told(name: str, content: str, paths: list[str]) -> wire.Commit:
        commit: wire.Commit = payloads.commit(name, watched=content)
        return commit.model_copy(update={"watched_paths": wire.paths_digest(paths)})

    def digests() -> dict[str, str | None]:
        with session_factory() as session:
            rows = session.execute(select(Commit.sha, Commit.watched_digest))
            return {row.sha: row.watched_digest for row in rows}

    before, after = ["lossfn.py"], ["lossfn.py", "other.py"]
    first, unknown = told("a", "one", before), payloads.commit("b", watched="one")
    with session_factory.begin() as session:
        register_commits(session, "demo", [first, unknown])
    assert digests() == {first.sha: first.watched_digest, unknown.sha: unknown.watched_digest}
    with session_factory.begin() as session:
        register_target(session, payloads.target(paths=after), registered_by="test")
    assert digests() == {first.sha: None, unknown.sha: None}
    again, late = told("a", "two", after), told("c", "one", before)
    with session_factory.begin() as session:
        register_commits(session, "demo", [again, late, told("b", "one", before)])
    with session_factory.begin() as session:
        register_commits(session, "demo", [first])
    assert digests() == {first.sha: again.watched_digest, unknown.sha: None, late.sha: None}
    with session_factory.begin() as session:
        register_target(session, payloads.target(paths=after, suite="quick"), registered_by="test")
    assert digests()[first.sha] == again.watched_digest


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
