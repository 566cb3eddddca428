"""The job queue: enqueue, claim, renew, finish, fail, expire. Every function writes in the caller's transaction.

A job is claimed by one statement and held by a lease. Its attempt, a UUID made at the claim, is what renewals and the
result carry; whoever lost the lease is told so (LeaseLost) and has changed nothing. Each attempt is remembered with its
runner, so that a result that comes late is still known to be that runner's.
"""

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, and_, case, func, literal, or_, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from service.db import SessionFactory
from service.errors import Conflict, Forbidden, LeaseLost, NotFound
from service.models import Commit, Job, JobAttempt, Run, Runner, Target, TargetVersion, Token

LEASES_MAX = 20  # of one job, whatever ended them: it may be what takes its runner down
_UNSYNCHRONISED = {"synchronize_session": False}
_LEASE_RAN_OUT = "the lease ran out: the runner stopped renewing it"
_RUNNER_RESTARTED = "the runner started again while it held the job"


@dataclass(frozen=True, slots=True)
class Queued:
    """An open job; `created` is False if it was open already."""

    id: int
    state: str
    created: bool


@dataclass(frozen=True, slots=True)
class Claimed:
    """A job with its lease and all that a runner has to know; `target` and `commit` are payloads of the wire."""

    id: int
    attempt: str
    kind: str
    target: Mapping[str, Any]
    commit: str
    suite: str
    lease_seconds: float
    lease_expires_at: datetime


def enqueue(
    session: Session,
    *,
    target: str,
    commit: str,
    kind: str = "measure",
    suite: str | None = None,
    device_class: str = "cpu",
    priority: int = 0,
    attempts_allowed: int = 3,
) -> Queued:
    """Ask for a commit to be measured, with the target's own suite if none is named.

    The same open job is never made twice; asking again raises its priority. NotFound if target or commit is unknown.
    """
    found = session.execute(
        select(Commit.id, Commit.target_id)
        .join(Target, Target.id == Commit.target_id)
        .where(Target.name == target, Commit.sha == commit)
    ).first()
    if found is None:
        raise NotFound(f"commit {commit} of target {target!r} is unknown: post it to /api/v1/commits first")
    suite = suite or _definition(session, found.target_id)["suite"]
    row = {
        "target_id": found.target_id,
        "commit_id": found.id,
        "kind": kind,
        "suite": suite,
        "device_class": device_class,
        "priority": priority,
        "state": "queued",
        "open_key": f"{found.id}:{kind}:{suite}:{device_class}",
        "attempts_used": 0,
        "attempts_allowed": attempts_allowed,
        "progress": "",
        "created_at": datetime.now(UTC),
    }
    insert = postgresql.insert if session.get_bind().dialect.name == "postgresql" else sqlite.insert
    statement = insert(Job).values(row)
    higher = case((Job.priority < statement.excluded.priority, statement.excluded.priority), else_=Job.priority)
    stored = session.execute(
        statement.on_conflict_do_update(index_elements=[Job.open_key], set_={"priority": higher}).returning(
            Job.id, Job.state, Job.created_at
        )
    ).one()
    return Queued(id=stored.id, state=stored.state, created=stored.created_at == row["created_at"])


def claim(
    session: Session, *, runner: str, device_class: str, lease_seconds: float, token_target_id: int | None = None
) -> Claimed | None:
    """Lease the most urgent, then oldest, queued job of a device class to a runner; None if there is none.

    `token_target_id` restricts the choice to one target. Leases that ran out go back to the queue first. NotFound if
    the runner is not registered.
    """
    now = datetime.now(UTC)
    expire(session, now)
    runner_id = session.scalars(select(Runner.id).where(Runner.name == runner)).first()
    if runner_id is None:
        raise NotFound(f"runner {runner!r} is not registered: post it to /api/v1/runners first")
    eligible = [Job.state == "queued", Job.device_class == device_class]
    if token_target_id is not None:
        eligible.append(Job.target_id == token_target_id)
    next_job = (
        select(Job.id)
        .where(*eligible)
        .order_by(Job.priority.desc(), Job.id)
        .limit(1)
        .with_for_update(skip_locked=True)
        .scalar_subquery()
    )
    expires_at = now + timedelta(seconds=lease_seconds)
    job = session.execute(
        update(Job)
        .where(Job.id == next_job)
        .values(
            state="leased",
            attempt=str(uuid.uuid4()),
            attempts_used=Job.attempts_used + 1,
            leased_by=runner,
            lease_expires_at=expires_at,
            progress="",
        )
        .returning(Job.id, Job.attempt, Job.kind, Job.target_id, Job.commit_id, Job.suite),
        execution_options=_UNSYNCHRONISED,
    ).first()
    session.execute(update(Runner).where(Runner.id == runner_id).values(last_seen_at=now))
    if job is None:
        return None
    session.add(JobAttempt(attempt=job.attempt, job_id=job.id, runner_id=runner_id, leased_at=now))
    return Claimed(
        id=job.id,
        attempt=job.attempt,
        kind=job.kind,
        target=_definition(session, job.target_id),
        commit=session.scalars(select(Commit.sha).where(Commit.id == job.commit_id)).one(),
        suite=job.suite,
        lease_seconds=lease_seconds,
        lease_expires_at=expires_at,
    )


def renew(session: Session, job_id: int, attempt: str, *, lease_seconds: float, progress: str = "") -> datetime:
    """Keep a lease; when it expires now. LeaseLost if the attempt no longer holds the job."""
    now = datetime.now(UTC)
    expires_at = now + timedelta(seconds=lease_seconds)
    runner = _change_held(session, job_id, attempt, {"lease_expires_at": expires_at, "progress": progress})
    session.execute(update(Runner).where(Runner.name == runner).values(last_seen_at=now))
    return expires_at


def finish(session: Session, job_id: int, attempt: str) -> None:
    """End a job whose result is stored; storing the result has ended it already, so this only makes sure.

    Conflict if the attempt has no stored result.
    """
    if session.scalars(select(Run.id).where(Run.attempt == attempt, Run.job_id == job_id)).first() is None:
        raise Conflict(f"attempt {attempt} of job {job_id} has no stored result: post it to /api/v1/results first")


def fail(session: Session, job_id: int, attempt: str, *, transient: bool, reason: str) -> None:
    """Give a job up: a transient failure returns it to the queue until its attempts are used up, a permanent one ends
    it. LeaseLost if the attempt no longer holds the job.
    """
    now = datetime.now(UTC)
    _change_held(session, job_id, attempt, _given_up(now, reason) if transient else _failed(now, reason))


def give_back(session: Session, job_id: int, attempt: str, *, reason: str) -> None:
    """Return a job to the queue as if it had not been tried: its runner stops, which says nothing about the job.
    LeaseLost if the attempt no longer holds the job.
    """
    _change_held(session, job_id, attempt, _given_back(datetime.now(UTC), reason))


def expire(session: Session, now: datetime) -> None:
    """Give up the jobs whose lease ran out."""
    session.execute(
        update(Job).where(_ran_out(now)).values(_given_up(now, _LEASE_RAN_OUT)), execution_options=_UNSYNCHRONISED
    )


def expire_due(factory: SessionFactory) -> None:
    """Give up the jobs whose lease ran out, in transactions of its own; it writes only where there is something to
    write.
    """
    now = datetime.now(UTC)
    with factory() as session:
        session.connection(execution_options={"reading": True})
        is_due = session.scalars(select(Job.id).where(_ran_out(now)).limit(1)).first() is not None
    if is_due:
        with factory.begin() as session:
            expire(session, now)


def _ran_out(now: datetime) -> ColumnElement[bool]:
    return and_(Job.state == "leased", Job.lease_expires_at < now)


def has_given_up(session: Session, *, target: str, commit: str) -> bool:
    """Whether the newest job on a commit failed: no result comes unless someone asks again."""
    state = session.scalars(
        select(Job.state)
        .join(Commit, Commit.id == Job.commit_id)
        .join(Target, Target.id == Commit.target_id)
        .where(Target.name == target, Commit.sha == commit)
        .order_by(Job.id.desc())
        .limit(1)
    ).first()
    return state == "failed"


def register_runner(
    session: Session, *, name: str, device_class: str, capabilities: Mapping[str, Any], token_id: int
) -> None:
    """Make a runner known, with the token it came with; jobs it held in an earlier life go back to the queue, as if
    they had not been tried.

    Conflict if another token, still good, has the name.
    """
    now = datetime.now(UTC)
    insert = postgresql.insert if session.get_bind().dialect.name == "postgresql" else sqlite.insert
    told = {"token_id": token_id, "device_class": device_class, "capabilities": dict(capabilities), "last_seen_at": now}
    no_longer_good = select(Token.id).where(or_(Token.revoked_at.is_not(None), Token.expires_at <= now))
    stored = session.execute(
        insert(Runner)
        .values(name=name, registered_at=now, **told)
        .on_conflict_do_update(
            index_elements=[Runner.name],
            set_=told,
            where=or_(Runner.token_id == token_id, Runner.token_id.is_(None), Runner.token_id.in_(no_longer_good)),
        )
        .returning(Runner.id)
    ).first()
    if stored is None:
        raise Conflict(f"runner {name!r} belongs to another token: choose another name, or revoke that token")
    session.execute(
        update(Job).where(Job.state == "leased", Job.leased_by == name).values(_given_back(now, _RUNNER_RESTARTED)),
        execution_options=_UNSYNCHRONISED,
    )


def require_runner_of_token(session: Session, runner: str, token_id: int) -> None:
    """Raise Forbidden unless the runner was registered with this token."""
    owner = session.scalars(select(Runner.token_id).where(Runner.name == runner)).first()
    if owner != token_id:
        raise Forbidden(f"runner {runner!r} is not registered with this token: post it to /api/v1/runners first")


def require_attempt_of_token(session: Session, job_id: int, attempt: str, token_id: int) -> None:
    """Raise Forbidden unless the attempt is, or was, a lease of this job to a runner registered with this token."""
    owner = session.scalars(
        select(Runner.token_id)
        .join(JobAttempt, JobAttempt.runner_id == Runner.id)
        .where(JobAttempt.attempt == attempt, JobAttempt.job_id == job_id)
    ).first()
    if owner != token_id:
        raise Forbidden(f"attempt {attempt} of job {job_id} was not leased to a runner of this token")


def _definition(session: Session, target_id: int) -> Mapping[str, Any]:
    """The newest definition of a target."""
    newest = select(TargetVersion.definition).where(TargetVersion.target_id == target_id)
    definition: dict[str, Any] = session.scalars(newest.order_by(TargetVersion.number.desc()).limit(1)).one()
    return definition


def _change_held(session: Session, job_id: int, attempt: str, values: Mapping[str, Any]) -> str:
    """Change a job that the attempt holds; the runner's name."""
    runner = session.scalars(
        update(Job)
        .where(Job.id == job_id, Job.attempt == attempt, Job.state == "leased")
        .values(dict(values))
        .returning(Job.leased_by),
        execution_options=_UNSYNCHRONISED,
    ).first()
    if runner is None:
        raise LeaseLost(f"attempt {attempt} no longer holds job {job_id}: stop measuring for it and claim another job")
    return runner


def _failed(now: datetime, reason: str) -> dict[str, Any]:
    ended = {"state": "failed", "open_key": None, "lease_expires_at": None, "progress": ""}
    return ended | {"finished_at": now, "failure": reason}


def _given_up(now: datetime, reason: str) -> dict[str, Any]:
    """Back to the queue, or failed if that was the last allowed attempt."""
    return _requeued(now, reason, is_last=Job.attempts_used >= Job.attempts_allowed)


def _given_back(now: datetime, reason: str) -> dict[str, Any]:
    """Back to the queue without a failed attempt, unless the job was leased too often."""
    leases = select(func.count()).where(JobAttempt.job_id == Job.id).correlate(Job).scalar_subquery()
    values = _requeued(now, reason, is_last=leases >= LEASES_MAX)
    return values | {"attempts_used": Job.attempts_used - 1}


def _requeued(now: datetime, reason: str, *, is_last: ColumnElement[bool]) -> dict[str, Any]:
    return {
        "state": case((is_last, "failed"), else_="queued"),
        "open_key": case((is_last, None), else_=Job.open_key),
        "finished_at": case((is_last, literal(now, Job.finished_at.type)), else_=None),
        "lease_expires_at": None,
        "progress": "",
        "failure": reason,
    }
