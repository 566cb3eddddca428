"""Payload -> rows: what is told is stored, once, whole or not at all. No statistics and no network here.

Every function writes in the caller's transaction. Rows that several posts may create at once (commits, environments,
series) are inserted in one order, so that two posts wait for each other instead of deadlocking.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeVar

from sqlalchemy import Table, insert, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import InstrumentedAttribute, Session

from service import wire
from service.catalogue import MetricClass
from service.errors import Conflict, FieldError, Forbidden, Invalid, NotFound
from service.models import (
    Branch,
    Commit,
    Environment,
    Job,
    JobAttempt,
    Measurement,
    Run,
    Series,
    Target,
    TargetVersion,
)
from service.samples import pack

_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True)
class Ingested:
    """Where a result is stored; `created` is False if an equal post had already stored it."""

    run_id: int
    created: bool


@dataclass(frozen=True, slots=True)
class RegisteredTarget:
    """The version under which a target file is now known; `created` is False if it was already the newest."""

    name: str
    version: int
    created: bool


def ingest(
    session: Session, result: wire.Result, *, body_digest: str, posted_by: str, quarantined: bool = False
) -> Ingested:
    """Store one attempt's result and close the job that it belongs to.

    Idempotent by `result.attempt`: the same body again changes nothing, another body is a Conflict. A result whose
    lease ran out is stored all the same, as a repetition. NotFound if the target is unknown, Forbidden if the job is
    another attempt's or about something else, Invalid if no version of the target declares a kernel in its role.
    """
    target_id = _target_id(session, result.target)
    attempt = str(result.attempt)
    if (stored := _stored_run(session, attempt, body_digest)) is not None:
        return stored
    _require_job_of(session, result, target_id)
    _require_declared(session, target_id, result.measurements)
    commit_ids = _store_commits(session, target_id, {"body.commit": result.commit}, trusted=not quarantined)
    commit_id = commit_ids[result.commit.sha]
    environment_id = _environment_id(session, result.environment)
    series_ids = _series_ids(session, target_id, result.measurements)
    run_id = _insert_new(
        session,
        Run,
        Run.id,
        {
            "attempt": attempt,
            "body_digest": body_digest,
            "target_id": target_id,
            "commit_id": commit_id,
            "job_id": result.job,
            "environment_id": environment_id,
            "suite": result.suite,
            "suite_digest": result.suite_digest,
            "posted_by": posted_by,
            "volatile": result.environment.volatile,
            "quarantined": quarantined,
            "started_at": result.started_at,
            "finished_at": result.finished_at,
            "received_at": datetime.now(UTC),
        },
    )
    if run_id is None:  # an equal post was faster by less than this transaction
        stored = _stored_run(session, attempt, body_digest)
        assert stored is not None
        return stored
    session.execute(
        insert(_table(Measurement)),
        [_measurement_row(run_id, series_ids[_series_key(row)], row) for row in result.measurements],
    )
    _bump(session, [commit_id])
    _close_job(session, result)
    return Ingested(run_id=run_id, created=True)


def register_target(session: Session, target: wire.Target, *, registered_by: str) -> RegisteredTarget:
    """Make `target` the definition of its name: a new version if it differs from the newest one.

    A new version may change what a verdict needs, so every commit of the target is judged again. One with other paths
    makes what was known of the watched content worthless; one that declares a kernel decides the role of its series.
    """
    definition = target.model_dump(mode="json")
    _insert_new(session, Target, Target.id, {"name": target.name})
    target_id = session.scalars(
        select(Target.id).where(Target.name == target.name).with_for_update()  # waits for posts under the last version
    ).one()
    newest = session.scalars(
        select(TargetVersion).where(TargetVersion.target_id == target_id).order_by(TargetVersion.number.desc()).limit(1)
    ).first()
    if newest is not None and newest.definition == definition:
        return RegisteredTarget(name=target.name, version=newest.number, created=False)
    number = 1 if newest is None else newest.number + 1
    session.execute(
        insert(_table(TargetVersion)),
        {
            "target_id": target_id,
            "number": number,
            "definition": definition,
            "registered_by": registered_by,
            "registered_at": datetime.now(UTC),
        },
    )
    worthless = {}
    if newest is not None and _paths_digest(newest.definition) != _paths_digest(definition):
        worthless = {"watched_digest": None}
    session.execute(
        update(Commit)
        .where(Commit.target_id == target_id)
        .values(judge_generation=Commit.judge_generation + 1, **worthless)
    )
    for kernel, role in _roles(definition).items():
        session.execute(update(Series).where(Series.target_id == target_id, Series.kernel == kernel).values(role=role))
    return RegisteredTarget(name=target.name, version=number, created=True)


def register_commits(
    session: Session, target: str, commits: Sequence[wire.Commit], *, branch: str | None = None, head: str | None = None
) -> None:
    """Store commits and their places in the graph, and, if given, the head of a branch; all are judged.

    What is stored of a sha only ever grows: parents and watched content that were unknown are filled in, others than
    the stored ones are a Conflict. When a head moves, the commits that entered or left the branch are judged again.
    """
    if (branch is None) != (head is None):
        raise Invalid(
            "branch and head go together", errors=[FieldError("body.head", "needs body.branch and vice versa")]
        )
    target_id = _target_id(session, target)
    _store_commits(session, target_id, {f"body.commits[{i}]": commit for i, commit in enumerate(commits)}, trusted=True)
    if branch is not None and head is not None:
        _move_head(session, target_id, branch, head)


# --- Commits and branches ---------------------------------------------------------------------------------------------


def _store_commits(
    session: Session, target_id: int, commits: Mapping[str, wire.Commit], *, trusted: bool
) -> dict[str, int]:
    """Row ids by sha of commits, given by field path. An untrusted post makes new rows, and changes none."""
    paths = _paths_digest(_definitions(session, target_id)[-1])
    ordered = [
        (field, _about_paths(commit, paths)) for field, commit in sorted(commits.items(), key=lambda item: item[1].sha)
    ]
    _insert_all_new(session, Commit, [_commit_row(target_id, commit, trusted=trusted) for _, commit in ordered])
    shas = [commit.sha for _, commit in ordered]
    rows = _commit_rows(session, target_id, shas)
    if trusted and any(_is_news(rows[commit.sha], commit) for _, commit in ordered):
        rows = _commit_rows(session, target_id, shas, lock=True)
    if trusted:
        for field, commit in ordered:
            _learn(rows[commit.sha], commit, field=field)
        session.flush()
    return {sha: row.id for sha, row in rows.items()}


def _commit_rows(session: Session, target_id: int, shas: Sequence[str], *, lock: bool = False) -> dict[str, Commit]:
    """Commits by sha; with `lock` as they are now, whoever else was changing them."""
    found: dict[str, Commit] = {}
    for batch in _batches(shas):
        query = select(Commit).where(Commit.target_id == target_id, Commit.sha.in_(batch)).order_by(Commit.id)
        if lock:
            query = query.with_for_update(key_share=True).execution_options(populate_existing=True)
        found |= {row.sha: row for row in session.scalars(query)}
    return found


def _about_paths(commit: wire.Commit, paths: str) -> wire.Commit:
    """The commit, without a digest that covers other paths than the target watches now."""
    if commit.watched_paths in {None, paths}:
        return commit
    return commit.model_copy(update={"watched_digest": None})


def _commit_row(target_id: int, commit: wire.Commit, *, trusted: bool) -> dict[str, Any]:
    return {
        "target_id": target_id,
        "sha": commit.sha,
        "parents": commit.parents,
        "author": commit.author,
        "subject": commit.subject,
        "committed_at": commit.committed_at,
        "watched_digest": commit.watched_digest,
        "trusted": trusted,
        "judge_generation": 1,
        "judged_generation": 0,
    }


def _is_news(known: Commit, told: wire.Commit) -> bool:
    """Whether a trusted post changes what is stored of a commit, or contradicts it."""
    place = (told.parents or known.parents, told.watched_digest or known.watched_digest)
    words = (known.author or told.author, known.subject or told.subject)
    return not known.trusted or (*place, *words) != (
        known.parents,
        known.watched_digest,
        known.author,
        known.subject,
    )


def _learn(known: Commit, told: wire.Commit, *, field: str) -> None:
    """Fill in what was not known of a commit, and replace what only an untrusted post said; judge it again if its place
    or its watched content is news.
    """
    if not known.trusted:
        known.trusted = True
        known.parents, known.watched_digest = told.parents, told.watched_digest
        known.author, known.subject, known.committed_at = told.author, told.subject, told.committed_at
        known.judge_generation += 1
        return
    if known.parents and told.parents and known.parents != told.parents:
        raise Conflict(
            f"commit {told.sha} is known with other parents ({', '.join(known.parents)}): a sha has one history",
            errors=[FieldError(f"{field}.parents", "differ from the stored ones")],
        )
    if known.watched_digest and told.watched_digest and known.watched_digest != told.watched_digest:
        raise Conflict(
            f"commit {told.sha} is known with another content of the watched paths: a sha has one tree",
            errors=[FieldError(f"{field}.watched_digest", "differs from the stored one")],
        )
    parents = known.parents or told.parents
    watched = known.watched_digest or told.watched_digest
    if (parents, watched) != (known.parents, known.watched_digest):
        known.parents, known.watched_digest = parents, watched
        known.judge_generation += 1
    known.author = known.author or told.author
    known.subject = known.subject or told.subject


def _move_head(session: Session, target_id: int, name: str, head: str) -> None:
    known = select(Commit.id).where(Commit.target_id == target_id, Commit.sha == head, Commit.trusted)
    if session.scalars(known).first() is None:
        raise NotFound(
            f"commit {head} of branch {name!r} is unknown: post it with its branch",
            errors=[FieldError("body.head", "is no known commit")],
        )
    row = {"target_id": target_id, "name": name, "head_sha": head}
    is_first = _insert_new(session, Branch, Branch.id, row) is not None
    branch = session.scalars(
        select(Branch).where(Branch.target_id == target_id, Branch.name == name).with_for_update()
    ).one()
    if branch.head_sha == head and not is_first:
        return
    parents = {
        row.sha: row.parents
        for row in session.execute(select(Commit.sha, Commit.parents).where(Commit.target_id == target_id))
    }
    if is_first:  # without a head every commit was taken to be on the branch
        moved = sorted(parents.keys() - _ancestry(parents, head))
    else:
        moved = sorted(_ancestry(parents, branch.head_sha) ^ _ancestry(parents, head))
    branch.head_sha = head
    _bump(session, _commit_ids(session, target_id, moved))


def _ancestry(parents: Mapping[str, Sequence[str]], head: str) -> set[str]:
    """`head` and the known commits that it descends from."""
    found: set[str] = set()
    waiting = [head]
    while waiting:
        sha = waiting.pop()
        if sha in parents and sha not in found:
            found.add(sha)
            waiting.extend(parents[sha])
    return found


def _commit_ids(session: Session, target_id: int, shas: Sequence[str]) -> list[int]:
    return [
        commit_id
        for batch in _batches(shas)
        for commit_id in session.scalars(
            select(Commit.id).where(Commit.target_id == target_id, Commit.sha.in_(batch)).order_by(Commit.sha)
        )
    ]


def _bump(session: Session, commit_ids: Sequence[int]) -> None:
    """Ask for a new judgement of these commits."""
    for batch in _batches(commit_ids):
        session.execute(
            update(Commit).where(Commit.id.in_(batch)).values(judge_generation=Commit.judge_generation + 1),
            execution_options={"synchronize_session": False},
        )


# --- Environments, series, measurements -------------------------------------------------------------------------------


def _environment_id(session: Session, environment: wire.Environment) -> int:
    facts = {"exact": environment.exact, "numeric": environment.numeric, "timing": environment.timing}
    identity = json.dumps([environment.device_class, environment.device, facts], sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(identity.encode()).hexdigest()
    _insert_new(
        session,
        Environment,
        Environment.id,
        {
            "digest": digest,
            "device_class": environment.device_class,
            "device": environment.device,
            "exact_identity": environment.identity(MetricClass.EXACT),
            "numeric_identity": environment.identity(MetricClass.NUMERIC),
            "timing_identity": environment.identity(MetricClass.TIMING),
            "facts": facts,
        },
    )
    return session.scalars(select(Environment.id).where(Environment.digest == digest)).one()


def _require_declared(session: Session, target_id: int, measurements: Sequence[wire.Measurement]) -> None:
    """Invalid unless a version of the target declares each kernel; the newest that does decides its role. Older ones
    count because a result may have been measured under them.
    """
    roles: dict[str, str] = {}
    for definition in _definitions(session, target_id):
        roles |= _roles(definition)
    for index, row in enumerate(measurements):
        field = f"body.measurements[{index}]"
        role = roles.get(row.kernel)
        if role is None:
            known = f"its kernels and controls are {', '.join(sorted(roles))}"
            raise Invalid(
                f"the target declares no kernel {row.kernel!r}: {known}",
                errors=[FieldError(f"{field}.kernel", f"{row.kernel!r} is not declared by the target")],
            )
        if role != row.role:
            raise Invalid(
                f"the target declares {row.kernel!r} as a {role}, not as a {row.role}",
                errors=[
                    FieldError(f"{field}.kernel", f"{row.kernel!r} is declared as a {role}"),
                    FieldError(f"{field}.role", f"is {row.role!r}, declared as {role!r}"),
                ],
            )


def _series_key(row: wire.Measurement) -> tuple[str, str]:
    return row.kernel, row.case.id


def _series_ids(
    session: Session, target_id: int, measurements: Sequence[wire.Measurement]
) -> dict[tuple[str, str], int]:
    """Row ids by kernel and case id; series that are new are made."""
    known = _known_series(session, target_id, measurements)
    missing = sorted((row for row in measurements if _series_key(row) not in known), key=_series_key)
    if missing:
        _insert_all_new(session, Series, [_series_row(target_id, row) for row in missing])
        known = _known_series(session, target_id, measurements)
    return known


def _series_row(target_id: int, row: wire.Measurement) -> dict[str, Any]:
    return {
        "target_id": target_id,
        "kernel": row.kernel,
        "role": row.role,
        "case_id": row.case.id,
        "case": row.case.model_dump(mode="json"),
    }


def _known_series(
    session: Session, target_id: int, measurements: Sequence[wire.Measurement]
) -> dict[tuple[str, str], int]:
    kernels = sorted({row.kernel for row in measurements})
    rows = session.execute(
        select(Series.kernel, Series.case_id, Series.id).where(
            Series.target_id == target_id, Series.kernel.in_(kernels)
        )
    )
    return {(kernel, case_id): series_id for kernel, case_id, series_id in rows}


def _measurement_row(run_id: int, series_id: int, row: wire.Measurement) -> dict[str, Any]:
    return {
        "run_id": run_id,
        "series_id": series_id,
        "outcome": row.outcome,
        "inputs_digest": row.inputs_digest,
        "samples": pack(row.values, row.nonfinite),
        "notes": row.notes or None,
    }


# --- Runs and jobs ----------------------------------------------------------------------------------------------------


def _stored_run(session: Session, attempt: str, body_digest: str) -> Ingested | None:
    row = session.execute(select(Run.id, Run.body_digest).where(Run.attempt == attempt)).first()
    if row is None:
        return None
    if row.body_digest != body_digest:
        raise Conflict(
            f"attempt {attempt} is stored with another body: measure again under a new attempt",
            errors=[FieldError("body.attempt", "was used for another body")],
        )
    return Ingested(run_id=row.id, created=False)


def _require_job_of(session: Session, result: wire.Result, target_id: int) -> None:
    """The result names the job whose attempt it is, and is what that job asked for."""
    leased_for = session.scalars(select(JobAttempt.job_id).where(JobAttempt.attempt == str(result.attempt))).first()
    if result.job is None and leased_for is None:
        return
    if leased_for != result.job:
        raise Forbidden(f"attempt {result.attempt} is no attempt of job {result.job}")
    wanted = session.execute(
        select(Commit.target_id, Commit.sha, Job.suite, Job.device_class)
        .join(Job, Job.commit_id == Commit.id)
        .where(Job.id == result.job)
    ).one()
    if (wanted.target_id, wanted.sha) != (target_id, result.commit.sha):
        raise Forbidden(f"job {result.job} is about commit {wanted.sha}, not {result.commit.sha} of {result.target!r}")
    told = (result.suite, result.environment.device_class)
    if (wanted.suite, wanted.device_class) != told:
        raise Forbidden(f"job {result.job} is about suite {wanted.suite!r} on {wanted.device_class}, not {told}")


def _close_job(session: Session, result: wire.Result) -> None:
    """The job is done, unless a later attempt holds it now: that one goes on."""
    if result.job is None:
        return
    held_by_another = (Job.state == "leased") & (Job.attempt != str(result.attempt))
    session.execute(
        update(Job)
        .where(Job.id == result.job, ~held_by_another)
        .values(
            state="done", open_key=None, lease_expires_at=None, failure=None, progress="", finished_at=datetime.now(UTC)
        ),
        execution_options={"synchronize_session": False},
    )


# --- Statements -------------------------------------------------------------------------------------------------------


def _target_id(session: Session, name: str) -> int:
    """The target's row, which gets no new version before this transaction ends."""
    target_id = session.scalars(
        select(Target.id).where(Target.name == name).with_for_update(read=True, key_share=True)
    ).first()
    if target_id is None:
        raise NotFound(f"target {name!r} is unknown: register its target file first")
    return target_id


def _definitions(session: Session, target_id: int) -> Sequence[Mapping[str, Any]]:
    """The definitions of all versions of a target, the newest last."""
    return session.scalars(
        select(TargetVersion.definition).where(TargetVersion.target_id == target_id).order_by(TargetVersion.number)
    ).all()


def _roles(definition: Mapping[str, Any]) -> dict[str, str]:
    """The role of each kernel that a definition declares, controls included."""
    kernels = definition["kernels"]
    return {kernel["control"]: "control" for kernel in kernels if kernel["control"]} | {
        kernel["name"]: "kernel" for kernel in kernels
    }


def _paths_digest(definition: Mapping[str, Any]) -> str:
    return wire.paths_digest(definition["paths"])


def _table(model: type[Any]) -> Table:
    table = model.__table__
    assert isinstance(table, Table)
    return table


def _insert_unless_known(session: Session, model: type[Any]) -> postgresql.Insert | sqlite.Insert:
    """INSERT ... ON CONFLICT DO NOTHING: it waits for an unfinished rival, then leaves the rival's row alone."""
    if session.get_bind().dialect.name == "postgresql":
        return postgresql.insert(_table(model)).on_conflict_do_nothing()
    return sqlite.insert(_table(model)).on_conflict_do_nothing()


def _insert_new(
    session: Session, model: type[Any], key: InstrumentedAttribute[int], row: Mapping[str, Any]
) -> int | None:
    """Insert a row unless a unique constraint holds it already; its `key`, or None."""
    return session.scalars(_insert_unless_known(session, model).values(dict(row)).returning(key)).first()


def _insert_all_new(session: Session, model: type[Any], rows: Sequence[Mapping[str, Any]]) -> None:
    """Insert the rows that no unique constraint holds already, in their order."""
    if rows:
        session.execute(_insert_unless_known(session, model), [dict(row) for row in rows])


def _batches(items: Sequence[_Item], size: int = 500) -> Iterable[Sequence[_Item]]:
    """Slices short enough for the engines' limits on parameters."""
    return (items[start : start + size] for start in range(0, len(items), size))
