"""What there is to judge: a target's commits, their runs, and for each the baseline and whose results count.

Reads tables and decides nothing about values.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from service.detection.levels import Decision
from service.history import Ancestor, Node, ancestry, baselines, nearest, topological
from service.models import Branch, Commit, Finding, Run, Series, Target, TargetVersion
from service.queries import unit_bytes


@dataclass(frozen=True, slots=True)
class CommitFacts:
    """A commit as the judge sees it. `vouched` says that a trusted post has told of it, and so of its watched content;
    `runs` are the ids of the runs that count for it, `trusted` says that they may be
    a baseline."""

    id: int
    sha: str
    parents: tuple[str, ...]
    watched_digest: str | None
    generation: int
    pending: bool
    runs: tuple[int, ...]
    trusted: bool
    vouched: bool


@dataclass(frozen=True, slots=True)
class Decided:
    """What a person decided about a finding of `culprit`: of each (case id, metric) up to which values, one a device,
    None where one was not finite."""

    culprit: str
    decision: Decision
    values: Mapping[tuple[str, str], Sequence[float | None]]


@dataclass(frozen=True, slots=True)
class SeriesFacts:
    """A kernel on a case. `unit_bytes` is the case's U, `case` its parameters."""

    kernel: str
    case_id: str
    case: Mapping[str, Any]
    unit_bytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """How a commit is to be judged: against which baseline, and on whose results; `source` is the commit itself, or
    the ancestor that it inherits from."""

    baseline: Ancestor | None
    source: str


@dataclass(frozen=True, slots=True)
class History:
    """A target's commits and what is known of them. `trunk` is the default branch, empty while its head is unknown.

    `decisions` holds what people decided about regressions, by (commit or watched digest, kernel, family): what holds
    for a pull request's content holds for the commit that lands it.
    """

    target_id: int
    target: str
    definition: Mapping[str, Any]
    commits: Mapping[str, CommitFacts]
    order: tuple[str, ...]
    trunk: frozenset[str]
    head: str | None
    series: Mapping[int, SeriesFacts]
    plans: Mapping[str, Plan]
    decisions: Mapping[tuple[str, str, str], Sequence[Decided]]

    @property
    def parents(self) -> dict[str, tuple[str, ...]]:
        """The parents of every commit, by sha."""
        return {commit.sha: commit.parents for commit in self.commits.values()}


def load_history(session: Session, target: Target) -> History:
    """A target's commits, runs and series, in a fixed number of queries, and the plan of every commit."""
    definition = session.scalars(
        select(TargetVersion.definition)
        .where(TargetVersion.target_id == target.id)
        .order_by(TargetVersion.number.desc())
        .limit(1)
    ).one()
    rows = session.execute(
        select(
            Commit.id,
            Commit.sha,
            Commit.parents,
            Commit.watched_digest,
            Commit.trusted,
            Commit.committed_at,
            Commit.judge_generation,
            Commit.judged_generation,
        ).where(Commit.target_id == target.id)
    ).all()
    runs = _runs_by_commit(session, target.id)
    commits = {
        row.sha: CommitFacts(
            id=row.id,
            sha=row.sha,
            parents=tuple(row.parents),
            watched_digest=row.watched_digest,
            generation=row.judge_generation,
            pending=row.judge_generation != row.judged_generation,
            runs=runs.get(row.id, ((), False))[0],
            trusted=runs.get(row.id, ((), False))[1],
            vouched=row.trusted,
        )
        for row in rows
    }
    order = topological(Node(row.sha, tuple(row.parents), row.committed_at) for row in rows)
    parents = {commit.sha: commit.parents for commit in commits.values()}
    head = session.scalars(
        select(Branch.head_sha).where(Branch.target_id == target.id, Branch.name == definition["branch"])
    ).first()
    trunk = frozenset(ancestry(parents, head)) if head else frozenset()
    return History(
        target_id=target.id,
        target=target.name,
        definition=definition,
        commits=commits,
        order=order,
        trunk=trunk,
        head=head if trunk else None,
        series=_series(session, target.id),
        plans=_plans(commits, order, head if trunk else None),
        decisions=_decisions(session, target.id),
    )


def _decisions(session: Session, target_id: int) -> dict[tuple[str, str, str], list[Decided]]:
    """By the commit that was decided on, and by its watched content where a trusted post told of that."""
    rows = session.execute(
        select(Commit.sha, Commit.watched_digest, Commit.trusted, Finding.kernel, Finding.family, Finding.decided)
        .join(Commit, Commit.id == Finding.commit_id)
        .where(Finding.target_id == target_id, Finding.direction == "regress")
        .order_by(Finding.id)
    ).all()
    found: dict[tuple[str, str, str], list[Decided]] = {}
    for row in rows:
        if row.decided:
            values: dict[tuple[str, str], list[float | None]] = {}
            for case_id, metric, value in row.decided["values"]:
                values.setdefault((case_id, metric), []).append(value)
            one = Decided(row.sha, row.decided["decision"], values)
            for name in filter(None, (row.sha, row.watched_digest if row.trusted else None)):
                found.setdefault((name, row.kernel, row.family), []).append(one)
    return found


def _series(session: Session, target_id: int) -> dict[int, SeriesFacts]:
    rows = session.execute(
        select(Series.id, Series.kernel, Series.case_id, Series.case).where(Series.target_id == target_id)
    ).all()
    return {row.id: SeriesFacts(row.kernel, row.case_id, row.case, unit_bytes(row.case)) for row in rows}


def _runs_by_commit(session: Session, target_id: int) -> dict[int, tuple[tuple[int, ...], bool]]:
    """Commit id -> (ids of the runs that count, are they trusted). Quarantined runs count where there are no others."""
    rows = session.execute(
        select(Run.id, Run.commit_id, Run.quarantined).where(Run.target_id == target_id).order_by(Run.id)
    ).all()
    found: dict[int, list[tuple[int, bool]]] = {}
    for row in rows:
        found.setdefault(row.commit_id, []).append((row.id, row.quarantined))
    counted = {}
    for commit_id, runs in found.items():
        trusted = tuple(run for run, quarantined in runs if not quarantined)
        counted[commit_id] = (trusted, True) if trusted else (tuple(run for run, _ in runs), False)
    return counted


def _plans(commits: Mapping[str, CommitFacts], order: Sequence[str], head: str | None) -> dict[str, Plan]:
    """The commits that can be judged: measured ones, and those that inherit because the watched paths are equal."""
    parents = {commit.sha: commit.parents for commit in commits.values()}
    measured = {commit.sha for commit in commits.values() if commit.trusted}
    bases = baselines(order, parents, measured=measured, head=head)
    ancestors = nearest(order, parents, lambda sha: sha in measured)
    plans = {}
    for sha in order:
        base = bases.get(sha)
        if commits[sha].runs:
            plans[sha] = Plan(base, sha)
            continue
        digest = commits[sha].watched_digest
        equal = [found.sha for found in (base, ancestors.get(sha)) if found and _digest(commits, found) == digest]
        if digest is not None and equal:
            plans[sha] = Plan(base, equal[0])
    return plans


def _digest(commits: Mapping[str, CommitFacts], ancestor: Ancestor) -> str | None:
    return commits[ancestor.sha].watched_digest


def planned(history: History, sha: str, plan: Plan) -> tuple[int | None, int | None, int | None]:
    """(baseline's id, distance, id of the commit inherited from) as they are stored."""
    baseline = plan.baseline
    return (
        history.commits[baseline.sha].id if baseline else None,
        baseline.distance if baseline else None,
        history.commits[plan.source].id if plan.source != sha else None,
    )


def tips(history: History) -> list[str]:
    """The newest measured commit of the default branch; without a known head all measured commits that are nobody's
    baseline."""
    if history.head is None:
        bases = {plan.baseline.sha for sha, plan in history.plans.items() if plan.baseline and plan.source == sha}
        return [sha for sha in history.order if history.commits[sha].trusted and sha not in bases]
    if history.commits[history.head].trusted:
        return [history.head]
    found = nearest(history.order, history.parents, lambda sha: history.commits[sha].trusted).get(history.head)
    return [found.sha] if found else []
