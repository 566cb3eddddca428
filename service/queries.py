"""The read side: frozen dataclasses out of the tables, for the API, the reports and the dashboards.

Functions take a session and never write. Summaries are computed here, when reading; nothing stored is averaged.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from sqlalchemy import Row, Select, and_, func, select
from sqlalchemy.orm import Session, aliased

from service import models
from service.catalogue import BY_NAME, Family, MetricClass
from service.detection.level_sets import segment
from service.detection.rules import RULE_VERSION
from service.errors import Conflict, NotFound
from service.history import Node, topological
from service.samples import unpack

OPEN_FINDING_STATES = ("open", "acknowledged")
CLOSED_FINDING_STATES = ("recovered", "accepted", "dismissed", "retracted")
_NEWEST = 20  # measurements of a series that tell which metrics it has
_PREFIX_MIN = 7
_SHA_LENGTH = 40


@dataclass(frozen=True, slots=True)
class TargetRow:
    """A target in a list, with the state of its newest judged commit."""

    name: str
    repository: str
    branch: str
    commits: int
    newest_sha: str | None
    newest_state: str | None
    open_findings: int


@dataclass(frozen=True, slots=True)
class CommitRow:
    """A commit in a list. `state` is None as long as nothing was judged; `jobs` counts its open jobs."""

    sha: str
    parents: tuple[str, ...]
    subject: str
    author: str
    committed_at: datetime
    state: str | None
    reason: str
    baseline_sha: str | None
    baseline_distance: int | None
    new_findings: int
    jobs: int


@dataclass(frozen=True, slots=True)
class Affected:
    """One series that a finding or a verdict speaks of. Values are in the metric's base unit, None where missing or not
    finite; `effect` is after/before as log2, None where one of them is 0 or missing. `unit_bytes` is the case's U."""

    case_id: str
    metric: str
    unit: str
    rule: str
    state: str
    before: float | None
    after: float | None
    limit: float | None
    effect: float | None
    unit_bytes: int
    reason: str
    samples: tuple[float, ...]
    device: str
    kernel: str = ""


@dataclass(frozen=True, slots=True)
class FindingEventRow:
    """One step in a finding's life."""

    at: datetime
    actor: str
    action: str
    reason: str


@dataclass(frozen=True, slots=True)
class FindingView:
    """A finding with its evidence. `reproduce` is the command that measures its worst case again; `required` says that
    the target's verdict counts it, `until` when its dismissal ends."""

    id: int
    target: str
    kernel: str
    family: str
    direction: str
    state: str
    sentence: str
    culprit_sha: str
    culprit_subject: str
    baseline_sha: str | None
    baseline_distance: int | None
    rule_version: int
    affected: tuple[Affected, ...]
    events: tuple[FindingEventRow, ...]
    reproduce: str
    required: bool
    created_at: datetime
    updated_at: datetime
    until: datetime | None


@dataclass(frozen=True, slots=True)
class VerdictView:
    """The verdict of a commit. `findings` are its own, `inherited` the open ones of its ancestors; `undecided` are the
    comparisons that are neither pass nor part of a finding, one per kernel, case and state; `notices` are doubts about
    comparisons that pass; `counts` counts the comparisons that the target requires by state; `ci` is what the state
    means to CI: pass, fail or undecided."""

    target: str
    sha: str
    state: str
    reason: str
    baseline_sha: str | None
    baseline_distance: int | None
    inherited_from: str | None
    counts: Mapping[str, int]
    findings: tuple[FindingView, ...]
    inherited: tuple[FindingView, ...]
    recovered: tuple[FindingView, ...]
    undecided: tuple[Affected, ...]
    rule_version: int
    judged_at: datetime | None
    notices: tuple[Affected, ...] = ()
    ci: str = "undecided"


@dataclass(frozen=True, slots=True)
class MeasurementRow:
    """One kernel on one case as measured in one run; `samples` by metric name, raw."""

    kernel: str
    role: str
    case_id: str
    unit_bytes: int
    outcome: str
    notes: Mapping[str, str]
    samples: Mapping[str, tuple[float, ...]]
    nonfinite: tuple[str, ...]
    attempt: str
    device: str
    finished_at: datetime


@dataclass(frozen=True, slots=True)
class SeriesRow:
    """A series in a list: a kernel on a case, and the metrics that it has values of."""

    kernel: str
    role: str
    case_id: str
    metrics: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Point:
    """One commit's raw samples of one metric, in commit order; `segment` changes where values stop being comparable.
    `state` is that of this metric's own comparison there, None where the judge makes none."""

    sha: str
    subject: str
    author: str
    committed_at: datetime
    samples: tuple[float, ...]
    nonfinite: bool
    outcome: str
    segment: str
    state: str | None


@dataclass(frozen=True, slots=True)
class SeriesView:
    """The history of one metric of one series, topological order, oldest first."""

    target: str
    kernel: str
    case_id: str
    metric: str
    unit: str
    title: str
    unit_bytes: int
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class JobRow:
    """A job in a list."""

    id: int
    target: str
    sha: str
    kind: str
    suite: str
    device_class: str
    state: str
    attempts_used: int
    leased_by: str | None
    progress: str
    failure: str | None
    created_at: datetime
    finished_at: datetime | None


@dataclass(frozen=True, slots=True)
class RunnerRow:
    """A runner in a list."""

    name: str
    device_class: str
    registered_at: datetime
    last_seen_at: datetime
    working_on: int | None


# --- Targets and commits --------------------------------------------------------------------------------------------


def targets(session: Session) -> tuple[TargetRow, ...]:
    """All targets by name; the newest commit is the newest judged one on any branch."""
    definitions = _newest_definitions(session)
    commit_counts = _count_by_target(session, models.Commit.target_id)
    finding_counts = _count_by_target(
        session,
        models.Finding.target_id,
        models.Finding.state.in_(OPEN_FINDING_STATES),
        models.Finding.direction == "regress",
    )
    newest = _newest_judged(session)
    rows = session.execute(select(models.Target.id, models.Target.name).order_by(models.Target.name)).all()
    return tuple(
        TargetRow(
            name=row.name,
            repository=definitions[row.id]["repository"],
            branch=definitions[row.id]["branch"],
            commits=commit_counts.get(row.id, 0),
            newest_sha=newest[row.id][0] if row.id in newest else None,
            newest_state=newest[row.id][1] if row.id in newest else None,
            open_findings=finding_counts.get(row.id, 0),
        )
        for row in rows
        if row.id in definitions
    )


def _newest_definitions(session: Session) -> dict[int, dict[str, Any]]:
    newest = (
        select(models.TargetVersion.target_id, func.max(models.TargetVersion.number).label("number"))
        .group_by(models.TargetVersion.target_id)
        .subquery()
    )
    on_newest = and_(
        models.TargetVersion.target_id == newest.c.target_id, models.TargetVersion.number == newest.c.number
    )
    rows = session.execute(
        select(models.TargetVersion.target_id, models.TargetVersion.definition).join(newest, on_newest)
    ).all()
    return {row.target_id: row.definition for row in rows}


def _count_by_target(session: Session, column: Any, *where: Any) -> dict[int, int]:
    rows = session.execute(select(column, func.count()).where(*where).group_by(column)).all()
    return {target_id: count for target_id, count in rows}  # noqa: C416 (a Row is no pair to dict's types)


def _newest_judged(session: Session) -> dict[int, tuple[str, str]]:
    """Target id -> (sha, state) of the judged commit with the latest committer time."""
    ranked = (
        select(
            models.Commit.target_id,
            models.Commit.sha,
            models.Verdict.state,
            func.row_number()
            .over(
                partition_by=models.Commit.target_id,
                order_by=(models.Commit.committed_at.desc(), models.Commit.id.desc()),
            )
            .label("place"),
        )
        .join(models.Verdict, models.Verdict.commit_id == models.Commit.id)
        .subquery()
    )
    rows = session.execute(select(ranked.c.target_id, ranked.c.sha, ranked.c.state).where(ranked.c.place == 1)).all()
    return {row.target_id: (row.sha, row.state) for row in rows}


def target_definition(session: Session, name: str) -> dict[str, Any] | None:
    """The target file as last registered, None for an unknown target."""
    return session.scalars(
        select(models.TargetVersion.definition)
        .join(models.Target, models.Target.id == models.TargetVersion.target_id)
        .where(models.Target.name == name)
        .order_by(models.TargetVersion.number.desc())
        .limit(1)
    ).first()


def _target_id(session: Session, target: str) -> int:
    target_id = session.scalars(select(models.Target.id).where(models.Target.name == target)).first()
    if target_id is None:
        raise NotFound(f"there is no target {target!r}")
    return target_id


def commits(session: Session, target: str, *, limit: int = 100, before: str | None = None) -> tuple[CommitRow, ...]:
    """A target's commits, newest first in the graph's order; `before` is the sha of the last one already seen.

    NotFound if the target, or the cursor, is unknown.
    """
    target_id = _target_id(session, target)
    order = commit_order(session, target_id)[::-1]
    if before is not None and before not in order:
        raise NotFound(f"there is no commit {before!r} to go on from in target {target!r}")
    first = 0 if before is None else order.index(before) + 1
    shas = order[first : first + limit]
    found = {row.sha: row for row in _commit_rows(session, target_id, models.Commit.sha.in_(shas))}
    return tuple(found[sha] for sha in shas)


def commit_order(session: Session, target_id: int) -> tuple[str, ...]:
    """All shas of a target, parents before children."""
    rows = session.execute(
        select(models.Commit.sha, models.Commit.parents, models.Commit.committed_at).where(
            models.Commit.target_id == target_id
        )
    ).all()
    return topological(Node(row.sha, tuple(row.parents), row.committed_at) for row in rows)


def commit(session: Session, target: str, sha: str) -> CommitRow | None:
    """The commit of a full sha or a prefix of at least 7 digits, None if there is none.

    Conflict if several commits begin with the prefix, NotFound if the target is unknown.
    """
    target_id = _target_id(session, target)
    full = _resolve(session, target_id, sha)
    if full is None:
        return None
    return _commit_rows(session, target_id, models.Commit.sha == full)[0]


def _resolve(session: Session, target_id: int, sha: str) -> str | None:
    if len(sha) < _PREFIX_MIN or not set(sha) <= set("0123456789abcdef"):
        return None
    column = models.Commit.sha
    matches = column == sha if len(sha) == _SHA_LENGTH else column.startswith(sha)
    shas = session.scalars(
        select(column).where(models.Commit.target_id == target_id, matches).order_by(column).limit(2)
    ).all()
    if len(shas) > 1:
        raise Conflict(f"commit {sha!r} is ambiguous: it begins {shas[0]} and {shas[1]}; give more digits")
    return shas[0] if shas else None


def _commit_rows(session: Session, target_id: int, where: Any) -> list[CommitRow]:
    baseline = aliased(models.Commit)
    open_jobs = (
        select(models.Job.commit_id, func.count().label("jobs"))
        .where(models.Job.target_id == target_id, models.Job.state.in_(("queued", "leased")))
        .group_by(models.Job.commit_id)
        .subquery()
    )
    own_findings = (
        select(models.Finding.commit_id, func.count().label("findings"))
        .where(models.Finding.target_id == target_id, models.Finding.state != "retracted")
        .group_by(models.Finding.commit_id)
        .subquery()
    )
    rows = session.execute(
        select(
            models.Commit,
            models.Verdict.state,
            models.Verdict.reason,
            models.Verdict.baseline_distance,
            baseline.sha.label("baseline_sha"),
            open_jobs.c.jobs,
            own_findings.c.findings,
        )
        .outerjoin(models.Verdict, models.Verdict.commit_id == models.Commit.id)
        .outerjoin(baseline, baseline.id == models.Verdict.baseline_commit_id)
        .outerjoin(open_jobs, open_jobs.c.commit_id == models.Commit.id)
        .outerjoin(own_findings, own_findings.c.commit_id == models.Commit.id)
        .where(models.Commit.target_id == target_id, where)
    ).all()
    return [
        CommitRow(
            sha=row.Commit.sha,
            parents=tuple(row.Commit.parents),
            subject=row.Commit.subject,
            author=row.Commit.author,
            committed_at=row.Commit.committed_at,
            state=row.state,
            reason=row.reason or "",
            baseline_sha=row.baseline_sha,
            baseline_distance=row.baseline_distance,
            new_findings=row.findings or 0,
            jobs=row.jobs or 0,
        )
        for row in rows
    ]


# --- Verdicts and findings ------------------------------------------------------------------------------------------


def verdict(session: Session, target: str, sha: str) -> VerdictView:
    """The verdict of a commit (full sha or unique prefix).

    A commit that is unknown or has no verdict that is up to date is `missing`, with what is going on as the reason.
    NotFound if the target is unknown.
    """
    target_id = _target_id(session, target)
    full = _resolve(session, target_id, sha)
    if full is None:
        return missing_verdict(target, sha, f"commit {sha} is unknown here: nobody registered or measured it")
    baseline, source = aliased(models.Commit), aliased(models.Commit)
    row = session.execute(
        select(
            models.Commit.id,
            models.Commit.judge_generation,
            models.Commit.judged_generation,
            models.Verdict,
            baseline.sha.label("baseline_sha"),
            source.sha.label("source_sha"),
        )
        .outerjoin(models.Verdict, models.Verdict.commit_id == models.Commit.id)
        .outerjoin(baseline, baseline.id == models.Verdict.baseline_commit_id)
        .outerjoin(source, source.id == models.Verdict.inherited_from_id)
        .where(models.Commit.target_id == target_id, models.Commit.sha == full)
    ).one()
    stored: models.Verdict | None = row.Verdict
    if stored is None or row.judge_generation != row.judged_generation:
        pending = row.judge_generation != row.judged_generation
        return missing_verdict(target, full, _why_no_verdict(session, row.id, pending=pending))
    document = stored.document
    keys = [*document["inherited"], *document["recovered"]]
    concerned = (models.Finding.commit_id == row.id) | models.Finding.key.in_(keys)
    views = _finding_views(session, _select_findings().where(models.Finding.target_id == target_id, concerned))
    by_key = dict(views)
    own = [view for key, view in views if view.culprit_sha == full and view.state != "retracted"]
    return VerdictView(
        target=target,
        sha=full,
        state=stored.state,
        reason=stored.reason,
        baseline_sha=row.baseline_sha,
        baseline_distance=stored.baseline_distance,
        inherited_from=row.source_sha,
        counts=stored.counts,
        findings=tuple(sorted(own, key=_severity)),
        inherited=tuple(by_key[key] for key in document["inherited"] if key in by_key and _stands(by_key[key])),
        recovered=tuple(by_key[key] for key in document["recovered"] if key in by_key),
        undecided=tuple(affected(item) for item in document["undecided"]),
        rule_version=stored.rule_version,
        judged_at=stored.judged_at,
        notices=tuple(affected(item) for item in document["notices"]),
        ci=ci_result(stored.state, _newest_definition(session, target_id)["ci"]),
    )


def ci_result(state: str, mapped: Mapping[str, str]) -> str:
    """What a commit's state means to CI, where a target's own map says nothing else. A state that is not known is
    undecided."""
    usual = {"pass": "pass", "improve": "pass", "regress": "fail"}
    return mapped.get(state) or usual.get(state, "undecided")


def _newest_definition(session: Session, target_id: int) -> Mapping[str, Any]:
    definition: Mapping[str, Any] = session.scalars(
        select(models.TargetVersion.definition)
        .where(models.TargetVersion.target_id == target_id)
        .order_by(models.TargetVersion.number.desc())
        .limit(1)
    ).one()
    return definition


def _stands(view: FindingView) -> bool:
    return view.state in ("open", "acknowledged")


def _severity(view: FindingView) -> tuple[bool, int, str]:
    """Sorts the most serious first."""
    return view.direction != "regress", Family(view.family).rank, view.kernel


def missing_verdict(target: str, sha: str, reason: str) -> VerdictView:
    """The verdict of a commit that nothing is known of: `missing`."""
    return VerdictView(
        target=target,
        sha=sha,
        state="missing",
        reason=reason,
        baseline_sha=None,
        baseline_distance=None,
        inherited_from=None,
        counts={},
        findings=(),
        inherited=(),
        recovered=(),
        undecided=(),
        rule_version=RULE_VERSION,
        judged_at=None,
    )


def _why_no_verdict(session: Session, commit_id: int, *, pending: bool) -> str:
    measured = session.scalars(select(models.Run.id).where(models.Run.commit_id == commit_id).limit(1)).first()
    if pending and measured is not None:
        return "measured, but not judged yet"
    job = session.scalars(
        select(models.Job).where(models.Job.commit_id == commit_id).order_by(models.Job.id.desc()).limit(1)
    ).first()
    if job is None:
        return "not judged yet" if pending else "not measured, and no job asks for it: queue one with `ulpwatch job`"
    if job.state == "queued":
        return f"job {job.id} is queued: no runner has taken it yet"
    if job.state == "leased":
        doing = f": {job.progress}" if job.progress else ""
        return f"job {job.id} is running on {job.leased_by}{doing}"
    if job.state == "failed":
        return f"job {job.id} failed: {job.failure or 'no reason was given'}"
    return f"job {job.id} is done, but left no result of this commit"


def affected(stored: Mapping[str, Any]) -> Affected:
    """An Affected out of a stored document or an API answer; unknown keys are ignored."""
    return Affected(
        case_id=stored["case_id"],
        metric=stored["metric"],
        unit=stored["unit"],
        rule=stored["rule"],
        state=stored["state"],
        before=stored["before"],
        after=stored["after"],
        limit=stored["limit"],
        effect=stored["effect"],
        unit_bytes=stored["unit_bytes"],
        reason=stored["reason"],
        samples=tuple(stored["samples"]),
        device=stored["device"],
        kernel=stored["kernel"],
    )


def findings(
    session: Session,
    target: str | None = None,
    states: Collection[str] | None = None,
    *,
    limit: int = 100,
    before: int | None = None,
) -> tuple[FindingView, ...]:
    """Findings, newest first; `before` is the id of the last one already seen. NotFound if the target is unknown."""
    query = _select_findings().order_by(models.Finding.id.desc()).limit(limit)
    if target is not None:
        query = query.where(models.Finding.target_id == _target_id(session, target))
    if states is not None:
        query = query.where(models.Finding.state.in_(states))
    if before is not None:
        query = query.where(models.Finding.id < before)
    return tuple(view for _, view in _finding_views(session, query))


def finding(session: Session, finding_id: int) -> FindingView | None:
    """One finding with its evidence and events, None if there is none."""
    views = _finding_views(session, _select_findings().where(models.Finding.id == finding_id))
    return views[0][1] if views else None


def _select_findings() -> Select[*tuple[Any, ...]]:
    return (
        select(models.Finding, models.Target.name, models.Commit.sha, models.Commit.subject)
        .join(models.Target, models.Target.id == models.Finding.target_id)
        .join(models.Commit, models.Commit.id == models.Finding.commit_id)
    )


def _finding_views(session: Session, query: Select[*tuple[Any, ...]]) -> list[tuple[str, FindingView]]:
    """(key, view) of each finding that the query selects, in its order."""
    rows = session.execute(query).all()
    events = _events(session, [row.Finding.id for row in rows])
    return [(row.Finding.key, _finding_view(row, events.get(row.Finding.id, ()))) for row in rows]


def _events(session: Session, finding_ids: Sequence[int]) -> dict[int, list[FindingEventRow]]:
    events: dict[int, list[FindingEventRow]] = {}
    rows = session.scalars(
        select(models.FindingEvent)
        .where(models.FindingEvent.finding_id.in_(finding_ids))
        .order_by(models.FindingEvent.id)
    )
    for row in rows:
        events.setdefault(row.finding_id, []).append(FindingEventRow(row.at, row.actor, row.action, row.reason))
    return events


def _finding_view(row: Row[*tuple[Any, ...]], events: Iterable[FindingEventRow]) -> FindingView:
    stored: models.Finding = row.Finding
    evidence = stored.evidence
    return FindingView(
        id=stored.id,
        target=row.name,
        kernel=stored.kernel,
        family=stored.family,
        direction=stored.direction,
        state=stored.state,
        sentence=stored.sentence,
        culprit_sha=row.sha,
        culprit_subject=row.subject,
        baseline_sha=evidence["baseline_sha"],
        baseline_distance=evidence["baseline_distance"],
        rule_version=evidence["rule_version"],
        affected=tuple(affected(item) for item in evidence["affected"]),
        events=tuple(events),
        reproduce=evidence["reproduce"],
        required=evidence["required"],
        until=stored.until,
        created_at=stored.created_at,
        updated_at=stored.updated_at,
    )


# --- Measurements and series ----------------------------------------------------------------------------------------


def unit_bytes(case: Mapping[str, Any]) -> int:
    """U of a case's stored parameters: N x V/TP x 4 bytes."""
    return int(case["tokens"]) * (int(case["vocabulary"]) // int(case["tensor_parallel"])) * 4


def measurements(session: Session, target: str, sha: str) -> tuple[MeasurementRow, ...]:
    """Everything measured on a commit (full sha), all runs, by kernel and case. NotFound if the target is unknown."""
    rows = session.execute(
        select(models.Measurement, models.Series, models.Run.attempt, models.Run.finished_at, models.Environment.device)
        .join(models.Series, models.Series.id == models.Measurement.series_id)
        .join(models.Run, models.Run.id == models.Measurement.run_id)
        .join(models.Environment, models.Environment.id == models.Run.environment_id)
        .join(models.Commit, models.Commit.id == models.Run.commit_id)
        .where(models.Commit.target_id == _target_id(session, target), models.Commit.sha == sha)
        .order_by(models.Series.role.desc(), models.Series.kernel, models.Measurement.id)
    ).all()
    found = []
    for row in rows:
        samples, nonfinite = unpack(row.Measurement.samples)
        found.append(
            MeasurementRow(
                kernel=row.Series.kernel,
                role=row.Series.role,
                case_id=row.Series.case_id,
                unit_bytes=unit_bytes(row.Series.case),
                outcome=row.Measurement.outcome,
                notes=row.Measurement.notes or {},
                samples=samples,
                nonfinite=nonfinite,
                attempt=row.attempt,
                device=row.device,
                finished_at=row.finished_at,
            )
        )
    return tuple(found)


def series(session: Session, target: str) -> tuple[SeriesRow, ...]:
    """A target's series with the metrics that any of their newest good measurements has. NotFound if the target is
    unknown.
    """
    of_target = models.Series.target_id == _target_id(session, target)
    place = func.row_number().over(partition_by=models.Measurement.series_id, order_by=models.Measurement.id.desc())
    ranked = (
        select(models.Measurement.series_id, models.Measurement.samples, place.label("place"))
        .join(models.Series, models.Series.id == models.Measurement.series_id)
        .where(models.Measurement.outcome == "ok", of_target)
        .subquery()
    )
    metrics: dict[int, set[str]] = {}
    for row in session.execute(select(ranked).where(ranked.c.place <= _NEWEST)):
        samples, nonfinite = unpack(row.samples)
        metrics.setdefault(row.series_id, set()).update(samples, nonfinite)
    rows = session.scalars(
        select(models.Series)
        .where(of_target)
        .order_by(models.Series.role.desc(), models.Series.kernel, models.Series.id)
    )
    return tuple(
        SeriesRow(row.kernel, row.role, row.case_id, tuple(filter(metrics.get(row.id, set()).__contains__, BY_NAME)))
        for row in rows
    )


def points(session: Session, target: str, kernel: str, case_id: str, metric: str) -> SeriesView:
    """The history of one metric of one series: a point per trusted run that has a value of it or did not end well.

    NotFound if target, series or metric is unknown.
    """
    if metric not in BY_NAME:
        raise NotFound(f"there is no metric {metric!r}")
    target_id = _target_id(session, target)
    of_series = (models.Series.target_id == target_id, models.Series.kernel == kernel, models.Series.case_id == case_id)
    found = session.scalars(select(models.Series).where(*of_series)).first()
    if found is None:
        raise NotFound(f"target {target!r} has no series of kernel {kernel!r} on case {case_id!r}")
    rows = session.execute(
        select(models.Measurement, models.Environment, models.Commit, models.Verdict.document)
        .join(models.Run, models.Run.id == models.Measurement.run_id)
        .join(models.Environment, models.Environment.id == models.Run.environment_id)
        .join(models.Commit, models.Commit.id == models.Run.commit_id)
        .outerjoin(models.Verdict, models.Verdict.commit_id == models.Commit.id)
        .where(models.Measurement.series_id == found.id, models.Run.quarantined.is_(False))
    ).all()
    place = {sha: index for index, sha in enumerate(commit_order(session, target_id))}
    ordered = sorted(rows, key=lambda row: (place[row.Commit.sha], row.Measurement.id))
    candidates: list[Point] = []
    met: set[str] = set()
    for row in ordered:
        point = _point(row, metric)
        state = _state_of(found, metric, point, row.document, is_first=point.segment not in met)
        candidates.append(replace(point, state=state))
        met.add(point.segment)
    return SeriesView(
        target=target,
        kernel=kernel,
        case_id=case_id,
        metric=metric,
        unit=BY_NAME[metric].unit,
        title=BY_NAME[metric].title,
        unit_bytes=unit_bytes(found.case),
        points=tuple(point for point in candidates if point.samples or point.nonfinite or point.outcome != "ok"),
    )


def _state_of(
    series: models.Series, metric: str, point: Point, document: Mapping[str, Any] | None, *, is_first: bool
) -> str | None:
    """What a verdict's document says of a point of a series; `is_first` where its segment begins. Where nothing can be
    compared, one entry stands for all such metrics of the kernel and case; where there is no value, for what ended it.
    """
    if document is None:
        return None
    here = [
        item
        for item in (*document["changes"], *document["undecided"])
        if (item["kernel"], item["case_id"]) == (series.kernel, series.case_id)
    ]
    if not point.samples and not point.nonfinite:
        return str(here[0]["state"]) if here else "missing"
    own = [item["state"] for item in here if item["metric"] == metric]
    shared = [item["state"] for item in here if item["state"] in ("no-baseline", "incomparable")] if is_first else []
    if own or shared:
        return str((own or shared)[0])
    is_judged = series.role == "kernel" and BY_NAME[metric].metric_class is not MetricClass.TIMING
    return "pass" if is_judged else None


def _point(row: Row[*tuple[Any, ...]], metric: str) -> Point:
    metric_class = BY_NAME[metric].metric_class
    samples, nonfinite = unpack(row.Measurement.samples)
    return Point(
        sha=row.Commit.sha,
        subject=row.Commit.subject,
        author=row.Commit.author,
        committed_at=row.Commit.committed_at,
        samples=samples.get(metric, ()),
        nonfinite=metric in nonfinite,
        outcome=row.Measurement.outcome,
        segment=segment(
            row.Environment.device_class,
            identity(row.Environment, metric_class),
            metric_class,
            row.Measurement.inputs_digest,
        ),
        state=None,
    )


def identity(environment: models.Environment, metric_class: MetricClass) -> str:
    """The environment's identity for a metric class; contract checks share the numeric one."""
    return {
        MetricClass.EXACT: environment.exact_identity,
        MetricClass.NUMERIC: environment.numeric_identity,
        MetricClass.CONTRACT: environment.numeric_identity,
        MetricClass.TIMING: environment.timing_identity,
    }[metric_class]


# --- Jobs and runners -----------------------------------------------------------------------------------------------


def jobs(
    session: Session, target: str | None = None, state: str | None = None, *, limit: int = 100
) -> tuple[JobRow, ...]:
    """Jobs, newest first. NotFound if the target is unknown."""
    query = (
        select(models.Job, models.Target.name, models.Commit.sha)
        .join(models.Target, models.Target.id == models.Job.target_id)
        .join(models.Commit, models.Commit.id == models.Job.commit_id)
        .order_by(models.Job.id.desc())
        .limit(limit)
    )
    if target is not None:
        query = query.where(models.Job.target_id == _target_id(session, target))
    if state is not None:
        query = query.where(models.Job.state == state)
    return tuple(_job_row(row) for row in session.execute(query))


def _job_row(row: Row[*tuple[Any, ...]]) -> JobRow:
    job: models.Job = row.Job
    return JobRow(
        id=job.id,
        target=row.name,
        sha=row.sha,
        kind=job.kind,
        suite=job.suite,
        device_class=job.device_class,
        state=job.state,
        attempts_used=job.attempts_used,
        leased_by=job.leased_by,
        progress=job.progress,
        failure=job.failure,
        created_at=job.created_at,
        finished_at=job.finished_at,
    )


def runners(session: Session) -> tuple[RunnerRow, ...]:
    """Runners by name; `working_on` is the id of the job that each holds."""
    held = (
        select(models.Job.leased_by, func.max(models.Job.id).label("job"))
        .where(models.Job.state == "leased")
        .group_by(models.Job.leased_by)
        .subquery()
    )
    rows = session.execute(
        select(models.Runner, held.c.job)
        .outerjoin(held, held.c.leased_by == models.Runner.name)
        .order_by(models.Runner.name)
    ).all()
    return tuple(
        RunnerRow(
            name=row.Runner.name,
            device_class=row.Runner.device_class,
            registered_at=row.Runner.registered_at,
            last_seen_at=row.Runner.last_seen_at,
            working_on=row.job,
        )
        for row in rows
    )
