"""Findings as stored: opened, retracted, recovered and opened again as verdicts change, or moved by people; each step
is logged.

What a person decided about a finding (accepted, dismissed) is an input of the next judgement of its commit.
"""

import shlex
from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from typing import Any, Literal

from sqlalchemy import ScalarSelect, Select, select, update
from sqlalchemy.orm import Session

from service.assessment import finding_key, plain
from service.detection.clusters import Cluster
from service.detection.levels import State
from service.detection.rules import RULE_VERSION
from service.errors import Conflict, FieldError, Invalid, NotFound
from service.models import Commit, Finding, FindingEvent
from service.plans import History

ACTOR = "judge"
_DECIDED = ("accepted", "dismissed")


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
        elif item.decided and row.state in ("open", "acknowledged"):
            _move(
                session,
                row,
                item.decided,
                item.decided,
                "as was decided on these values, here or at a commit with the same content",
            )
        elif item.direction is State.REGRESS and not item.decided and row.state in _DECIDED:
            _move(session, row, "open", "reopened", "it shows more than was decided on, or that was taken back")
    for key in found.keys() - wanted.keys():
        if found[key].state != "retracted":
            _move(session, found[key], "retracted", "retracted", "results that arrived later take it back")


def first_state(item: Cluster) -> str:
    """A regression is open unless it was decided on; an improvement is accepted as it is found."""
    return item.decided or ("open" if item.direction is State.REGRESS else "accepted")


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


def _move(
    session: Session,
    row: Finding,
    state: str,
    action: str,
    reason: str,
    *,
    actor: str = ACTOR,
    until: datetime | None = None,
) -> None:
    row.state, row.until, row.updated_at = state, until, datetime.now(UTC)
    _log(session, row, action, reason, actor)


def _log(session: Session, row: Finding, action: str, reason: str, actor: str = ACTOR) -> None:
    session.add(FindingEvent(finding_id=row.id, at=datetime.now(UTC), actor=actor, action=action, reason=reason))


# --- What people decide -----------------------------------------------------------------------------------------------

Triage = Literal["acknowledge", "accept", "dismiss", "reopen"]
_MOVES: dict[Triage, tuple[frozenset[str], str]] = {
    "acknowledge": (frozenset({"open"}), "acknowledged"),
    "accept": (frozenset({"open", "acknowledged", "dismissed"}), "accepted"),
    "dismiss": (frozenset({"open", "acknowledged"}), "dismissed"),
    "reopen": (frozenset({"acknowledged", "accepted", "dismissed"}), "open"),
}


def triage(
    session: Session,
    finding_id: int,
    action: Triage,
    *,
    actor: str,
    reason: str,
    until: datetime | None = None,
    seen: str | None = None,
) -> None:
    """Move a regression by a person's decision, and ask for a new judgement of every commit that it is about.

    `accept` makes its value the new baseline, `dismiss` says that it is none, until `until` if that is given. It is
    about the values that the finding has, and holds for the same watched content at another commit. `seen` is the state
    that the person saw. NotFound without such a finding; Conflict if its state does not allow the action or is not the
    one that was seen; Invalid for an `until` that is past or means nothing.
    """
    row = session.scalars(select(Finding).where(Finding.id == finding_id).with_for_update()).first()
    if row is None:
        raise NotFound(f"finding {finding_id} is unknown")
    if seen is not None and seen != row.state:
        raise Conflict(f"finding {finding_id} is {row.state} by now, not {seen}: look again")
    allowed, state = _MOVES[action]
    if row.direction != str(State.REGRESS):
        raise Conflict(f"finding {finding_id} is an improvement: those are accepted as they are found")
    if row.state not in allowed:
        raise Conflict(f"finding {finding_id} is {row.state}: only {' or '.join(sorted(allowed))} can be {state} now")
    if until is not None and (action != "dismiss" or until <= datetime.now(UTC)):
        field = FieldError("body.until", "is for a dismissal, and lies in the future")
        raise Invalid("this decision cannot end then", errors=[field])
    row.decided = _of_its_values(row, state) if state in _DECIDED else {}
    if action == "reopen":
        for one in _like_it(session, row):  # what was decided there holds here
            one.decided = {}
    _move(session, row, state, state, reason, actor=actor, until=until)
    _judge_again(session, row)


def _of_its_values(row: Finding, decision: str) -> dict[str, Any]:
    values = [[one["case_id"], one["metric"], one["after"]] for one in row.evidence["affected"]]
    return {"decision": decision, "values": values}


def _like_it(session: Session, row: Finding) -> Sequence[Finding]:
    """The same family of the same kernel at other commits with the same watched content."""
    return session.scalars(
        select(Finding)
        .join(Commit, Commit.id == Finding.commit_id)
        .where(
            Finding.target_id == row.target_id,
            Finding.id != row.id,
            Finding.kernel == row.kernel,
            Finding.family == row.family,
            Finding.direction == row.direction,
            Commit.watched_digest == _content(row),
        )
        .order_by(Finding.id)
        .with_for_update(of=Finding)
    ).all()


def _content(row: Finding) -> ScalarSelect[str | None]:
    return select(Commit.watched_digest).where(Commit.id == row.commit_id).scalar_subquery()


def has_ended_dismissals(session: Session, now: datetime) -> bool:
    """Whether `end_dismissals` has something to do."""
    return session.scalars(_ended(now).limit(1)).first() is not None


def end_dismissals(session: Session, now: datetime) -> None:
    """Open again what was dismissed until a moment that has passed."""
    for row in session.scalars(_ended(now).with_for_update()).all():
        row.decided = {}
        _move(session, row, "open", "reopened", "the time of its dismissal is over")
        _judge_again(session, row)


def _ended(now: datetime) -> Select[Finding]:
    return select(Finding).where(Finding.state == "dismissed", Finding.until < now).order_by(Finding.id)


def _judge_again(session: Session, row: Finding) -> None:
    """The finding's commit, and those of the same watched content, which share its decision."""
    session.flush()
    session.execute(
        update(Commit)
        .where(
            Commit.target_id == row.target_id, (Commit.id == row.commit_id) | (Commit.watched_digest == _content(row))
        )
        .values(judge_generation=Commit.judge_generation + 1),
        execution_options={"synchronize_session": False},
    )


# --- Recovery ---------------------------------------------------------------------------------------------------------


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
            Finding.state != "retracted",
        )
        .order_by(Finding.id)
    ).all()
    shown = {(culprit, row.kernel, row.family) for row, culprit in rows}
    rows = [one for one in rows if one[0].state not in _DECIDED]
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
    off = [sha for sha in history.order if history.trunk and sha not in history.trunk]
    parents, found = history.parents, {sha: set[str]() for sha in off}
    for sha in reversed(off):
        if not found[sha] and history.commits[sha].runs:
            found[sha] = {sha}
        for parent in parents[sha]:
            if parent in found:
                found[parent] |= found[sha]
    return {culprit: sorted(found[culprit]) for culprit in culprits if culprit in found}
