"""The queue gives each job to one runner at a time, and gives up nothing silently, on both engines."""

import threading
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest
from sqlalchemy import select, update

from service import job_queue
from service.auth import create_token, revoke_token
from service.db import SessionFactory
from service.errors import Conflict, Forbidden, LeaseLost, NotFound
from service.ingest import ingest, register_commits, register_target
from service.job_queue import Claimed
from service.models import Job, Run


@pytest.fixture(autouse=True)
def token_id(session_factory: SessionFactory, payloads: SimpleNamespace) -> int:
    """A runner `host` with its token, and commits a to e of target demo."""
    with session_factory.begin() as session:
        register_target(session, payloads.target(), registered_by="test")
        register_target(session, payloads.target("other"), registered_by="test")
        register_commits(session, "demo", [payloads.commit(name) for name in "abcde"])
        register_commits(session, "other", [payloads.commit("a")])
        token = create_token(session, "runner")
        for name in ("host", "second"):
            job_queue.register_runner(session, name=name, device_class="cpu", capabilities={}, token_id=token.id)
    return token.id


@pytest.fixture
def queue(session_factory: SessionFactory, payloads: SimpleNamespace) -> SimpleNamespace:
    """The queue's functions, each in its own transaction."""

    def enqueue(name: str, **options: object) -> job_queue.Queued:
        options = {"target": "demo"} | options
        with session_factory.begin() as session:
            return job_queue.enqueue(session, commit=payloads.sha(name), **options)  # type: ignore[arg-type]

    def claim(runner: str = "host", *, lease_seconds: float = 60.0, **options: object) -> Claimed | None:
        options = {"device_class": "cpu"} | options
        with session_factory.begin() as session:
            return job_queue.claim(session, runner=runner, lease_seconds=lease_seconds, **options)  # type: ignore[arg-type]

    def call(name: str, /, *arguments: object, **options: object) -> object:
        with session_factory.begin() as session:
            return getattr(job_queue, name)(session, *arguments, **options)

    def job(job_id: int) -> Job:
        with session_factory() as session:
            return session.scalars(select(Job).where(Job.id == job_id)).one()

    def post(claimed: Claimed, name: str, **fields: object) -> None:
        result = payloads.result(payloads.commit(name), attempt=claimed.attempt, job=claimed.id, **fields)
        with session_factory.begin() as session:
            ingest(session, result, body_digest="1" * 64, posted_by="host")

    return SimpleNamespace(enqueue=enqueue, claim=claim, call=call, job=job, post=post)


def test_the_same_open_job_is_never_made_twice(queue: SimpleNamespace) -> None:
    first, again = queue.enqueue("a"), queue.enqueue("a", priority=5)
    assert (first.created, again.created, first.id) == (True, False, again.id)
    assert queue.job(first.id).priority == 5
    queue.enqueue("a", priority=-5)
    assert queue.job(first.id).priority == 5


def test_another_suite_or_device_is_another_job(queue: SimpleNamespace) -> None:
    jobs = {queue.enqueue("a").id, queue.enqueue("a", suite="quick").id, queue.enqueue("a", device_class="cuda").id}
    assert len(jobs) == 3


def test_a_job_names_the_targets_own_suite(queue: SimpleNamespace) -> None:
    assert queue.job(queue.enqueue("a").id).suite == "demo"


def test_an_unknown_commit_is_not_queued(queue: SimpleNamespace) -> None:
    with pytest.raises(NotFound, match="post it"):
        queue.enqueue("z")


def test_the_most_urgent_then_the_oldest_job_is_claimed(queue: SimpleNamespace, payloads: SimpleNamespace) -> None:
    for name, priority in (("a", 0), ("b", 0), ("c", 9)):
        queue.enqueue(name, priority=priority)
    assert [queue.claim().commit for _ in range(3)] == [payloads.sha(name) for name in "cab"]
    assert queue.claim() is None


def test_a_claim_respects_device_class_and_the_tokens_target(
    queue: SimpleNamespace, session_factory: SessionFactory
) -> None:
    job = queue.enqueue("a", device_class="cuda")
    assert queue.claim() is None
    with session_factory() as session:
        target_id = session.scalars(select(Job.target_id).where(Job.id == job.id)).one()
    assert queue.claim(device_class="cuda", token_target_id=target_id + 1) is None
    assert queue.claim(device_class="cuda", token_target_id=target_id).id == job.id


def test_an_unregistered_runner_claims_nothing(queue: SimpleNamespace) -> None:
    queue.enqueue("a")
    with pytest.raises(NotFound, match="not registered"):
        queue.claim("stranger")


def test_claims_at_once_never_share_a_job(queue: SimpleNamespace) -> None:
    wanted = {queue.enqueue(name, suite=suite).id for name in "abcde" for suite in ("demo", "quick", "third", "fourth")}
    claimed: list[int] = []

    def work() -> None:
        while (job := queue.claim()) is not None:
            claimed.append(job.id)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(claimed) == sorted(wanted)


def test_a_renewal_keeps_the_lease_and_tells_progress(queue: SimpleNamespace) -> None:
    queue.enqueue("a")
    job = queue.claim(lease_seconds=5.0)
    expires_at = queue.call("renew", job.id, job.attempt, lease_seconds=600.0, progress="case 3 of 7")
    assert expires_at > job.lease_expires_at
    assert queue.job(job.id).lease_expires_at == expires_at
    assert queue.job(job.id).progress == "case 3 of 7"


def test_a_lease_that_ran_out_is_claimed_by_another_and_lost_to_the_first(queue: SimpleNamespace) -> None:
    queue.enqueue("a")
    lost = queue.claim(lease_seconds=-1.0)
    held = queue.claim("second")
    assert (held.id, held.attempt == lost.attempt) == (lost.id, False)
    for call, options in (("renew", {"lease_seconds": 5.0}), ("fail", {"transient": True, "reason": "tired"})):
        with pytest.raises(LeaseLost):
            queue.call(call, lost.id, lost.attempt, **options)
    assert queue.job(held.id).leased_by == "second"


def test_a_lease_that_has_not_run_out_is_kept(queue: SimpleNamespace) -> None:
    queue.enqueue("a")
    queue.claim(lease_seconds=60.0)
    assert queue.claim("second") is None


def test_attempts_are_capped(queue: SimpleNamespace) -> None:
    queue.enqueue("a", attempts_allowed=2)
    for expected in ("queued", "failed"):
        job = queue.claim()
        queue.call("fail", job.id, job.attempt, transient=True, reason="no network")
        assert queue.job(job.id).state == expected
    assert queue.claim() is None
    failed = queue.job(job.id)
    assert (failed.failure, failed.open_key) == ("no network", None)
    assert abs(failed.finished_at - datetime.now(UTC)) < timedelta(hours=1)


def test_the_last_lease_that_runs_out_fails_the_job(queue: SimpleNamespace) -> None:
    queue.enqueue("a", attempts_allowed=1)
    job = queue.claim(lease_seconds=-1.0)
    assert queue.claim() is None
    assert queue.job(job.id).state == "failed"
    assert "lease ran out" in queue.job(job.id).failure


def test_a_permanent_failure_ends_the_job_at_once(queue: SimpleNamespace) -> None:
    queue.enqueue("a")
    job = queue.claim()
    queue.call("fail", job.id, job.attempt, transient=False, reason="no such commit")
    assert queue.job(job.id).state == "failed"
    assert queue.enqueue("a").id != job.id


def test_a_stored_result_ends_its_job(queue: SimpleNamespace) -> None:
    queue.enqueue("a")
    job = queue.claim()
    with pytest.raises(Conflict, match="no stored result"):
        queue.call("finish", job.id, job.attempt)
    queue.post(job, "a")
    assert (queue.job(job.id).state, queue.job(job.id).open_key) == ("done", None)
    queue.call("finish", job.id, job.attempt)


def test_a_late_result_is_stored_and_closes_the_requeued_job(
    queue: SimpleNamespace, session_factory: SessionFactory
) -> None:
    queue.enqueue("a")
    job = queue.claim(lease_seconds=-1.0)
    queue.call("expire", datetime.now(UTC))
    assert queue.job(job.id).state == "queued"
    queue.post(job, "a")
    assert queue.job(job.id).state == "done"
    with session_factory() as session:
        assert session.scalars(select(Run.job_id)).all() == [job.id]


def test_a_late_result_leaves_the_job_to_the_runner_that_holds_it_now(queue: SimpleNamespace) -> None:
    queue.enqueue("a")
    late = queue.claim(lease_seconds=-1.0)
    held = queue.claim("second")
    queue.post(late, "a")
    assert queue.job(held.id).state == "leased"
    queue.post(held, "a")
    assert queue.job(held.id).state == "done"


def test_a_result_for_another_commit_or_job_is_forbidden(
    queue: SimpleNamespace, session_factory: SessionFactory
) -> None:
    queue.enqueue("a")
    queue.enqueue("b")
    job, other = queue.claim(), queue.claim()
    with pytest.raises(Forbidden, match="is about commit"):
        queue.post(job, "b")
    with pytest.raises(Forbidden, match="no attempt of job"):
        queue.post(Claimed(**{name: getattr(job, name) for name in job.__slots__} | {"id": other.id}), "b")
    with session_factory() as session:
        assert session.scalars(select(Run)).all() == []


def test_a_result_of_another_suite_or_device_is_forbidden_and_leaves_the_job_open(
    queue: SimpleNamespace, payloads: SimpleNamespace, session_factory: SessionFactory
) -> None:
    queue.enqueue("a")
    job = queue.claim()
    for other in ({"suite": "quick"}, {"host": payloads.environment(device_class="cuda")}):
        with pytest.raises(Forbidden, match="is about suite 'demo' on cpu"):
            queue.post(job, "a", **other)
    assert queue.job(job.id).state == "leased"
    with session_factory() as session:
        assert session.scalars(select(Run)).all() == []


def test_a_runner_that_starts_again_gives_its_job_back(queue: SimpleNamespace, token_id: int) -> None:
    queue.enqueue("a")
    job = queue.claim()
    hello = {"device_class": "cpu", "capabilities": {}, "token_id": token_id}
    queue.call("register_runner", name="second", **hello)
    assert queue.job(job.id).state == "leased"
    queue.call("register_runner", name="host", **hello)
    assert queue.job(job.id).state == "queued"


def test_a_restart_is_no_failed_attempt(queue: SimpleNamespace, token_id: int) -> None:
    queue.enqueue("a", attempts_allowed=2)
    hello = {"name": "host", "device_class": "cpu", "capabilities": {}, "token_id": token_id}
    for _ in range(5):
        job = queue.claim()
        queue.call("register_runner", **hello)
        assert (queue.job(job.id).state, queue.job(job.id).attempts_used) == ("queued", 0)
    for expected in ("queued", "failed"):
        job = queue.claim()
        queue.call("fail", job.id, job.attempt, transient=True, reason="no network")
        assert queue.job(job.id).state == expected


def test_a_job_that_a_stopping_runner_gives_back_has_no_failed_attempt(queue: SimpleNamespace) -> None:
    queue.enqueue("a", attempts_allowed=1)
    job = queue.claim()
    queue.call("give_back", job.id, job.attempt, reason="stopped")
    assert (queue.job(job.id).state, queue.job(job.id).attempts_used) == ("queued", 0)
    with pytest.raises(LeaseLost):
        queue.call("give_back", job.id, job.attempt, reason="stopped")


def test_a_job_that_takes_its_runner_down_each_time_is_given_up_in_the_end(
    queue: SimpleNamespace, token_id: int
) -> None:
    queue.enqueue("a", attempts_allowed=1)
    for _ in range(job_queue.LEASES_MAX):
        job = queue.claim()
        assert job is not None
        hello = {"name": "host", "device_class": "cpu", "capabilities": {}, "token_id": token_id}
        queue.call("register_runner", **hello)
    failed = queue.job(job.id)
    assert (failed.state, "started again" in failed.failure) == ("failed", True)
    assert queue.claim() is None


def test_a_runners_name_is_its_tokens_until_that_is_revoked_or_expired(
    queue: SimpleNamespace, token_id: int, session_factory: SessionFactory
) -> None:
    with session_factory.begin() as session:
        thief, gone = (create_token(session, "runner").id for _ in range(2))
        job_queue.register_runner(session, name="gone", device_class="cpu", capabilities={}, token_id=gone)
        revoke_token(session, gone)
    hello = {"name": "host", "device_class": "cpu", "capabilities": {}, "token_id": thief}
    with pytest.raises(Conflict, match="another token"):
        queue.call("register_runner", **hello)
    with session_factory.begin() as session:
        revoke_token(session, token_id)
    queue.call("register_runner", **hello)
    queue.call("require_runner_of_token", "host", thief)
    with pytest.raises(Forbidden):
        queue.call("require_runner_of_token", "second", thief)


def test_an_attempt_stays_its_runners_after_the_lease_is_lost(queue: SimpleNamespace, token_id: int) -> None:
    queue.enqueue("a")
    lost = queue.claim(lease_seconds=-1.0)
    held = queue.claim("second")
    for attempt in (lost.attempt, held.attempt):
        queue.call("require_attempt_of_token", held.id, attempt, token_id)
        with pytest.raises(Forbidden):
            queue.call("require_attempt_of_token", held.id, attempt, token_id + 1)
        with pytest.raises(Forbidden):
            queue.call("require_attempt_of_token", held.id + 1, attempt, token_id)


def test_no_job_is_leased_without_an_expiry(session_factory: SessionFactory, queue: SimpleNamespace) -> None:
    job = queue.enqueue("a")
    with pytest.raises(Exception, match="ck_jobs_lease"), session_factory.begin() as session:
        session.execute(update(Job).where(Job.id == job.id).values(state="leased"))
