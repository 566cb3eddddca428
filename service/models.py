"""The tables, as SQLAlchemy models. Tables are made by migrations/ alone; a test proves both equal.

Nonsense is unstorable: what the wire refuses, the CHECK constraints refuse again.
"""

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import (
    JSON,
    CheckConstraint,
    DateTime,
    Dialect,
    ForeignKey,
    Index,
    LargeBinary,
    MetaData,
    String,
    Text,
    TypeDecorator,
    UniqueConstraint,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


class Instant(TypeDecorator[datetime]):
    """An aware UTC time. SQLite keeps no zone, so UTC is put back on reading; a naive time is refused."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Refuse naive times and store UTC."""
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError(f"naive time {value!r}: times are aware UTC")
        utc = value.astimezone(UTC)
        return utc.replace(tzinfo=None) if dialect.name == "sqlite" else utc

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Give back aware UTC."""
        del dialect
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


def _one_of(column: str, *words: str) -> str:
    return f"{column} IN ({', '.join(repr(word) for word in words)})"


class Base(DeclarativeBase):
    """Names every constraint, so that migrations can change it on both engines."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {datetime: Instant, dict[str, Any]: JSON, str: Text, bytes: LargeBinary}  # noqa: RUF012


class Target(Base):
    """A repository under watch; its definition is the newest of its versions."""

    __tablename__ = "targets"
    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(String(64), unique=True)


class TargetVersion(Base):
    """A target file as registered: who changed what when."""

    __tablename__ = "target_versions"
    __table_args__ = (UniqueConstraint("target_id", "number"),)
    id: Mapped[int] = mapped_column(primary_key=True)
    target_id: Mapped[int] = mapped_column(ForeignKey("targets.id"))
    number: Mapped[int]
    definition: Mapped[dict[str, Any]]
    registered_by: Mapped[str]
    registered_at: Mapped[datetime]


class Branch(Base):
    """The newest known head of a branch of a target's repository."""

    __tablename__ = "branches"
    __table_args__ = (UniqueConstraint("target_id", "name"),)
    id: Mapped[int] = mapped_column(primary_key=True)
    target_id: Mapped[int] = mapped_column(ForeignKey("targets.id"))
    name: Mapped[str] = mapped_column(String(200))
    head_sha: Mapped[str] = mapped_column(String(40))


class Commit(Base):
    """A commit of a target's repository. `parents` are shas, which may be unknown here yet.

    Until a `trusted` post has told of it, what is known comes from quarantined results and is replaced by the first
    trusted word. `watched_digest` covers the paths of the target's newest version.

    `judge_generation` counts what happened to the commit (a result, a new parent); the judge has caught up when
    `judged_generation` equals it. A crash between the two leaves work that any process can see.
    """

    __tablename__ = "commits"
    __table_args__ = (
        UniqueConstraint("target_id", "sha"),
        CheckConstraint("length(sha) = 40", "sha_is_full"),
        Index(None, "target_id", "committed_at"),
    )
    id: Mapped[int] = mapped_column(primary_key=True)
    target_id: Mapped[int] = mapped_column(ForeignKey("targets.id"))
    sha: Mapped[str] = mapped_column(String(40))
    parents: Mapped[list[str]] = mapped_column(JSON)
    author: Mapped[str]
    subject: Mapped[str]
    committed_at: Mapped[datetime]
    watched_digest: Mapped[str | None] = mapped_column(String(64))
    trusted: Mapped[bool]
    judge_generation: Mapped[int] = mapped_column(default=0)
    judged_generation: Mapped[int] = mapped_column(default=0)


class Environment(Base):
    """A measuring host's fingerprint; the three identities end segments per metric class."""

    __tablename__ = "environments"
    id: Mapped[int] = mapped_column(primary_key=True)
    digest: Mapped[str] = mapped_column(String(64), unique=True)
    device_class: Mapped[str] = mapped_column(String(16))
    device: Mapped[str]
    exact_identity: Mapped[str] = mapped_column(String(64))
    numeric_identity: Mapped[str] = mapped_column(String(64))
    timing_identity: Mapped[str] = mapped_column(String(64))
    facts: Mapped[dict[str, Any]]


class Series(Base):
    """A kernel on a case of a target: the line that its measurements form over commits. `role` is what the newest of
    the target's versions that declares the kernel says."""

    __tablename__ = "series"
    __table_args__ = (
        UniqueConstraint("target_id", "kernel", "case_id"),
        CheckConstraint(_one_of("role", "kernel", "control"), "role"),
    )
    id: Mapped[int] = mapped_column(primary_key=True)
    target_id: Mapped[int] = mapped_column(ForeignKey("targets.id"))
    kernel: Mapped[str] = mapped_column(String(64))
    role: Mapped[str] = mapped_column(String(8))
    case_id: Mapped[str] = mapped_column(String(200))
    case: Mapped[dict[str, Any]]


class Run(Base):
    """One attempt's results on one commit. `body_digest` tells a repeated POST from a contradicting one.

    `suite_digest` names what the suite asked. `volatile` holds the environment's momentary facts, which are no part of
    its identity.
    """

    __tablename__ = "runs"
    __table_args__ = (
        CheckConstraint("finished_at >= started_at", "ends_after_start"),
        Index(None, "commit_id"),
    )
    id: Mapped[int] = mapped_column(primary_key=True)
    attempt: Mapped[str] = mapped_column(String(36), unique=True)
    body_digest: Mapped[str] = mapped_column(String(64))
    target_id: Mapped[int] = mapped_column(ForeignKey("targets.id"))
    commit_id: Mapped[int] = mapped_column(ForeignKey("commits.id"))
    job_id: Mapped[int | None] = mapped_column(ForeignKey("jobs.id"))
    environment_id: Mapped[int] = mapped_column(ForeignKey("environments.id"))
    suite: Mapped[str] = mapped_column(String(64))
    suite_digest: Mapped[str | None] = mapped_column(String(64))
    posted_by: Mapped[str]
    volatile: Mapped[dict[str, Any]]
    quarantined: Mapped[bool] = mapped_column(default=False)
    started_at: Mapped[datetime]
    finished_at: Mapped[datetime]
    received_at: Mapped[datetime]


class Measurement(Base):
    """One kernel on one case in one run. `samples` packs every metric's raw samples (service.samples)."""

    __tablename__ = "measurements"
    __table_args__ = (
        UniqueConstraint("run_id", "series_id"),
        Index(None, "series_id", "run_id"),
        CheckConstraint(
            _one_of(
                "outcome",
                "ok",
                "unmeasurable",
                "raised",
                "out_of_memory",
                "killed",
                "timeout",
                "exited",
                "garbage",
            ),
            "outcome",
        ),
    )
    id: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"))
    series_id: Mapped[int] = mapped_column(ForeignKey("series.id"))
    outcome: Mapped[str] = mapped_column(String(16))
    inputs_digest: Mapped[str | None] = mapped_column(String(64))
    samples: Mapped[bytes]
    notes: Mapped[dict[str, Any] | None]


class Job(Base):
    """A commit to be measured. `attempt` is the current lease's idempotency key; its result carries it.

    `open_key` names the work while the job is queued or leased and is NULL afterwards: unique, so that the same open
    job is never made twice.
    """

    __tablename__ = "jobs"
    __table_args__ = (
        CheckConstraint(_one_of("state", "queued", "leased", "done", "failed"), "state"),
        CheckConstraint("attempts_used <= attempts_allowed", "attempts"),
        CheckConstraint("(state = 'leased') = (lease_expires_at IS NOT NULL)", "lease"),
        CheckConstraint("(state IN ('queued', 'leased')) = (open_key IS NOT NULL)", "open_key"),
        Index(None, "state", "priority", "id"),
        Index(None, "commit_id"),
    )
    id: Mapped[int] = mapped_column(primary_key=True)
    target_id: Mapped[int] = mapped_column(ForeignKey("targets.id"))
    commit_id: Mapped[int] = mapped_column(ForeignKey("commits.id"))
    kind: Mapped[str] = mapped_column(String(16))
    suite: Mapped[str] = mapped_column(String(64))
    device_class: Mapped[str] = mapped_column(String(16))
    priority: Mapped[int]
    state: Mapped[str] = mapped_column(String(8))
    open_key: Mapped[str | None] = mapped_column(String(200), unique=True)
    attempts_used: Mapped[int] = mapped_column(default=0)
    attempts_allowed: Mapped[int] = mapped_column(default=3)
    attempt: Mapped[str | None] = mapped_column(String(36), unique=True)
    leased_by: Mapped[str | None]
    lease_expires_at: Mapped[datetime | None]
    progress: Mapped[str] = mapped_column(default="")
    failure: Mapped[str | None]
    created_at: Mapped[datetime]
    finished_at: Mapped[datetime | None]


class JobAttempt(Base):
    """One lease of a job: which runner may post the result that carries this attempt, even after the lease ran out."""

    __tablename__ = "job_attempts"
    __table_args__ = (Index(None, "job_id"),)
    attempt: Mapped[str] = mapped_column(String(36), primary_key=True)
    job_id: Mapped[int] = mapped_column(ForeignKey("jobs.id"))
    runner_id: Mapped[int] = mapped_column(ForeignKey("runners.id"))
    leased_at: Mapped[datetime]


class Runner(Base):
    """A runner daemon, by the name it gives itself, with the token it came with."""

    __tablename__ = "runners"
    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(String(64), unique=True)
    token_id: Mapped[int | None] = mapped_column(ForeignKey("tokens.id"))
    device_class: Mapped[str] = mapped_column(String(16))
    capabilities: Mapped[dict[str, Any]]
    registered_at: Mapped[datetime]
    last_seen_at: Mapped[datetime]


class Token(Base):
    """An API token; only its SHA-256 is kept. Without a target it is good for all targets."""

    __tablename__ = "tokens"
    __table_args__ = (CheckConstraint(_one_of("scope", "read", "ci", "runner", "admin"), "scope"),)
    id: Mapped[int] = mapped_column(primary_key=True)
    digest: Mapped[str] = mapped_column(String(64), unique=True)
    scope: Mapped[str] = mapped_column(String(8))
    target_id: Mapped[int | None] = mapped_column(ForeignKey("targets.id"))
    label: Mapped[str]
    created_at: Mapped[datetime]
    expires_at: Mapped[datetime | None]
    revoked_at: Mapped[datetime | None]


class LevelSet(Base):
    """The accepted and open levels of all series after a commit, compressed; equal sets share one row."""

    __tablename__ = "level_sets"
    id: Mapped[int] = mapped_column(primary_key=True)
    digest: Mapped[str] = mapped_column(String(64), unique=True)
    levels: Mapped[bytes]


class Verdict(Base):
    """What the judge says of a commit against its baseline. `document` explains it and can be replayed."""

    __tablename__ = "verdicts"
    __table_args__ = (
        CheckConstraint(
            _one_of(
                "state",
                "pass",
                "improve",
                "regress",
                "inconclusive",
                "no-baseline",
                "missing",
                "incomparable",
                "invalid",
            ),
            "state",
        ),
    )
    id: Mapped[int] = mapped_column(primary_key=True)
    target_id: Mapped[int] = mapped_column(ForeignKey("targets.id"))
    commit_id: Mapped[int] = mapped_column(ForeignKey("commits.id"), unique=True)
    state: Mapped[str] = mapped_column(String(16))
    reason: Mapped[str]
    baseline_commit_id: Mapped[int | None] = mapped_column(ForeignKey("commits.id"))
    baseline_distance: Mapped[int | None]
    inherited_from_id: Mapped[int | None] = mapped_column(ForeignKey("commits.id"))
    rule_version: Mapped[int]
    counts: Mapped[dict[str, Any]]
    document: Mapped[dict[str, Any]]
    level_set_id: Mapped[int] = mapped_column(ForeignKey("level_sets.id"))
    judged_at: Mapped[datetime]


class Finding(Base):
    """One cause: what a commit changed in one family of one kernel's metrics. `key` makes it unique in any race;
    `decided` is what a person made of it, and of which values, empty without; `until` is when a dismissal ends."""

    __tablename__ = "findings"
    __table_args__ = (
        CheckConstraint(_one_of("direction", "regress", "improve"), "direction"),
        CheckConstraint(
            _one_of("state", "open", "acknowledged", "accepted", "dismissed", "recovered", "retracted"), "state"
        ),
        Index(None, "target_id", "state"),
        Index(None, "commit_id"),
    )
    id: Mapped[int] = mapped_column(primary_key=True)
    key: Mapped[str] = mapped_column(String(64), unique=True)
    target_id: Mapped[int] = mapped_column(ForeignKey("targets.id"))
    commit_id: Mapped[int] = mapped_column(ForeignKey("commits.id"))
    kernel: Mapped[str] = mapped_column(String(64))
    family: Mapped[str] = mapped_column(String(16))
    direction: Mapped[str] = mapped_column(String(8))
    state: Mapped[str] = mapped_column(String(16))
    sentence: Mapped[str]
    evidence: Mapped[dict[str, Any]]
    decided: Mapped[dict[str, Any]] = mapped_column(default=dict)
    until: Mapped[datetime | None]
    created_at: Mapped[datetime]
    updated_at: Mapped[datetime]


class FindingEvent(Base):
    """What happened to a finding: when, by whom, why."""

    __tablename__ = "finding_events"
    __table_args__ = (Index(None, "finding_id"),)
    id: Mapped[int] = mapped_column(primary_key=True)
    finding_id: Mapped[int] = mapped_column(ForeignKey("findings.id"))
    at: Mapped[datetime]
    actor: Mapped[str]
    action: Mapped[str] = mapped_column(String(16))
    reason: Mapped[str]
