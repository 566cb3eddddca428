"""Findings as stored: opened, retracted, recovered and opened again as verdicts change, each step logged.

What a person decided about a finding (accepted, dismissed) stands as long as its results do.
"""

import shlex
from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from service.assessment import finding_key, plain
from service.detection.clusters import Cluster
from service.detection.levels import State
from service.detection.rules import RULE_VERSION
from service.history import ancestry
from service.models import Commit, Finding, FindingEvent
from service.plans import History

ACTOR = "judge"


def store_findings(session: Session, history: History, sha: str, clusters: Sequence[Cluster]) -> None:
    """Make the commit's stored findings those that it has now: open new ones, retract those that no longer hold."""
    commit = history.commits[sha]
    found = {row.key: row for row in session.scalars(select(Finding).where(Finding.commit_id == commit.id))}
    wanted = {finding_key(history.target, sha, item.kernel, item.family, item.direction): item for item in clusters}
    for key, item in wanted.items():
        evidence = _evidence(history, sha, item)
        row = found.get(key)
        if row is None:
            row = Finding(key=key, target_id=history.target_id, commit_id=commit.id, state=first_state(item))
            row.kernel, row.family, row.direction = item.kernel, str(item.family), str(item.direction)
            row.created_at = datetime.now(UTC)
            _write(row, item.sentence, evidence)
            session.add(row)
            session.flush()
            _log(session, row, "opened", item.sentence)
        elif (row.sentence, row.evidence) != (item.sentence, evidence):
            _write(row, item.sentence, evidence)
        if row.state == "retracted":
            _move(session, row, first_state(item), "reopened", "later results show it again")
    for key in found.keys() - wanted.keys():
        if found[key].state != "retracted":
            _move(session, found[key], "retracted", "retracted", "results that arrived later take it back")


def first_state(item: Cluster) -> str:
    """A regression is open; an improvement is accepted as it is found."""
    return "open" if item.direction is State.REGRESS else "accepted"


def _write(row: Finding, sentence: str, evidence: dict[str, Any]) -> None:
    row.sentence, row.evidence, row.updated_at = sentence, evidence, datetime.now(UTC)


def _evidence(history: History, sha: str, item: Cluster) -> dict[str, Any]:
    plan = history.plans[sha]
    return {
        "affected": [plain(change) | {"samples": list(change.samples)} for change in item.changes],
        "baseline_sha": plan.baseline.sha if plan.baseline else None,
        "baseline_distance": plan.baseline.distance if plan.baseline else None,
        "rule_version": RULE_VERSION,
        "reproduce": reproduce(history, sha, item),
        "required": item.required,
    }


def reproduce(history: History, sha: str, item: Cluster) -> str:
    """The command that measures the leading case again."""
    arguments = {
        "--target": f"{history.target}.toml",
        "--repo": history.definition["repository"],
        "--commit": sha,
        "--kernel": item.kernel,
        "--case": item.changes[0].case_id,
    }
    return "ulpwatch measure " + " ".join(f"{name} {shlex.quote(value)}" for name, value in arguments.items())


def _move(session: Session, row: Finding, state: str, action: str, reason: str) -> None:
    row.state, row.updated_at = state, datetime.now(UTC)
    _log(session, row, action, reason)


def _log(session: Session, row: Finding, action: str, reason: str) -> None:
    session.add(FindingEvent(finding_id=row.id, at=datetime.now(UTC), actor=ACTOR, action=action, reason=reason))


def settle_findings(session: Session, history: History, in_force: Collection[str]) -> None:
    """Mark findings recovered whose level no longer stands at the newest measured commit, and open those that do again.

    `in_force` holds the keys of those that stand there. Off the default branch, where every commit is compared with the
    merge base, a finding stands as long as the newest measured commits that descend from it have one like it.
    """
    rows = session.execute(
        select(Finding, Commit.sha)
        .join(Commit, Commit.id == Finding.commit_id)
        .where(
            Finding.target_id == history.target_id,
            Finding.direction == str(State.REGRESS),
            Finding.state.in_(("open", "acknowledged", "recovered")),
        )
        .order_by(Finding.id)
    ).all()
    shown = {(culprit, row.kernel, row.family) for row, culprit in rows}
    ends = branch_ends(history, {culprit for _, culprit in rows})
    for row, culprit in rows:
        newest = ends.get(culprit, ())
        stands = row.key in in_force or any((sha, row.kernel, row.family) in shown for sha in newest)
        if stands and row.state == "recovered":
            _move(session, row, "open", "reopened", "it stands again at the newest measured commit")
        elif not stands and row.state != "recovered":
            _move(session, row, "recovered", "recovered", "it no longer stands at the newest measured commit")


def branch_ends(history: History, culprits: Collection[str]) -> dict[str, list[str]]:
    """For each commit off the default branch, the newest measured commits off it that descend from it, or itself."""
    parents = history.parents
    off = [sha for sha in history.order if history.trunk and sha not in history.trunk and history.commits[sha].runs]
    lineage = {sha: ancestry(parents, sha) for sha in off}
    ends = {}
    for culprit in lineage.keys() & culprits:
        line = [sha for sha in off if culprit in lineage[sha]]
        ends[culprit] = [sha for sha in line if not any(sha in lineage[other] for other in line if other != sha)]
    return ends
