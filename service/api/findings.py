"""Routes of findings: the list, one with its history, and what people decide about it."""

from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Query
from pydantic import BaseModel, ConfigDict, Field

from service import queries, wire
from service.api.access import Administrator, PathId, Reader, Storage, Store, found_or_404
from service.api.bodies import SMALL, JsonBody
from service.api.paging import PAGE_SIZE, Page, PageSize, page
from service.auth import Caller
from service.findings import Triage, triage

FindingState = Literal["open", "acknowledged", "accepted", "dismissed", "recovered", "retracted"]

router = APIRouter(tags=["findings"])


class Decision(BaseModel):
    """Why, and on what: `seen` is the state that the decision was made on, which must still be the finding's."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    reason: Annotated[wire.Line, Field(min_length=1)]
    seen: FindingState | None = None


class Dismissal(Decision):
    """A decision that may end: from `until` on the finding is open again."""

    until: wire.Moment | None = None


DecisionBody = Annotated[Decision, Depends(JsonBody(Decision, "admin", bytes_max=SMALL))]
DismissalBody = Annotated[Dismissal, Depends(JsonBody(Dismissal, "admin", bytes_max=SMALL))]


@router.get("/findings")
def list_findings(
    storage: Store,
    who: Reader,
    target: Annotated[wire.Name | None, Query()] = None,
    state: Annotated[list[FindingState] | None, Query(description="only findings in one of these states")] = None,
    limit: PageSize = PAGE_SIZE,
    cursor: Annotated[int | None, Query(ge=1, lt=1 << 31)] = None,
) -> Page[queries.FindingView]:
    """Findings, newest first."""
    target = who.target if target is None else target
    if target is not None:
        who.require_target(target)
    with storage.read() as session:
        rows = queries.findings(session, target, state, limit=limit, before=cursor)
    return page(rows, limit, lambda row: row.id)


@router.get("/findings/{finding_id}")
def get_finding(finding_id: PathId, storage: Store, who: Reader) -> queries.FindingView:
    """One finding with its evidence and its history."""
    view = _find(storage, finding_id)
    who.require_target(view.target)
    return view


@router.post("/findings/{finding_id}/acknowledge")
def acknowledge_finding(
    finding_id: PathId, decision: DecisionBody, storage: Store, who: Administrator
) -> queries.FindingView:
    """Say that somebody looks after it. It stays a regression."""
    return _triage(storage, who, finding_id, "acknowledge", decision)


@router.post("/findings/{finding_id}/accept")
def accept_finding(
    finding_id: PathId, decision: DecisionBody, storage: Store, who: Administrator
) -> queries.FindingView:
    """Make its values the new baseline, here and where a commit with the same watched content lands."""
    return _triage(storage, who, finding_id, "accept", decision)


@router.post("/findings/{finding_id}/dismiss")
def dismiss_finding(
    finding_id: PathId, decision: DismissalBody, storage: Store, who: Administrator
) -> queries.FindingView:
    """Say that it is no regression. The baseline stays as it was."""
    return _triage(storage, who, finding_id, "dismiss", decision)


@router.post("/findings/{finding_id}/reopen")
def reopen_finding(
    finding_id: PathId, decision: DecisionBody, storage: Store, who: Administrator
) -> queries.FindingView:
    """Take a decision back."""
    return _triage(storage, who, finding_id, "reopen", decision)


def _find(storage: Storage, finding_id: int) -> queries.FindingView:
    with storage.read() as session:
        return found_or_404(queries.finding(session, finding_id), f"finding {finding_id}")


def _triage(storage: Storage, who: Caller, finding_id: int, action: Triage, decision: Decision) -> queries.FindingView:
    who.require_target(_find(storage, finding_id).target)
    until = decision.until if isinstance(decision, Dismissal) else None
    with storage.write.begin() as session:
        triage(session, finding_id, action, actor=who.label, reason=decision.reason, until=until, seen=decision.seen)
    return _find(storage, finding_id)
