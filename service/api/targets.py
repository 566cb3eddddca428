"""Routes of targets and of the commits of their repositories."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query
from pydantic import BaseModel, ConfigDict, Field

from service import queries, wire
from service.api.access import Administrator, CommitId, Contributor, ReadableTarget, Reader, Store, found_or_404
from service.api.bodies import COMMITS, TARGET, JsonBody
from service.api.paging import PAGE_SIZE, Page, PageSize, page
from service.errors import FieldError, Invalid
from service.ingest import RegisteredTarget, register_commits, register_target

CaseId = Annotated[str, Path(pattern=r"^[A-Za-z0-9.+-]{1,200}$")]

router = APIRouter(tags=["targets"])


class CommitsBody(BaseModel):
    """Commits of a target's repository and, with `branch` and `head`, the newest one of a branch."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    target: wire.Name
    branch: wire.Branch | None = None
    head: wire.Sha | None = None
    commits: list[wire.Commit] = Field(max_length=10_000, fail_fast=True)


TargetBody = Annotated[wire.Target, Depends(JsonBody(wire.Target, "admin", bytes_max=TARGET))]
PostedCommits = Annotated[CommitsBody, Depends(JsonBody(CommitsBody, "ci", bytes_max=COMMITS))]


@router.get("/targets")
def list_targets(storage: Store, who: Reader) -> Page[queries.TargetRow]:
    """Targets by name, with the state of each one's newest judged commit."""
    with storage.read() as session:
        rows = queries.targets(session)
    return Page(items=[row for row in rows if who.target in {None, row.name}])


@router.post("/targets")
def post_target(target: TargetBody, storage: Store, who: Administrator) -> RegisteredTarget:
    """Register a target, or a new version of it if it changed."""
    who.require_target(target.name)
    with storage.write.begin() as session:
        return register_target(session, target, registered_by=who.label)


@router.put("/targets/{name}")
def put_target(name: wire.Name, target: TargetBody, storage: Store, who: Administrator) -> RegisteredTarget:
    """Register a target under its address, or a new version of it if it changed."""
    if name != target.name:
        raise Invalid(f"body.name is not {name!r}", errors=[FieldError("body.name", f"is not {name!r}")])
    return post_target(target, storage, who)


@router.get("/targets/{target}")
def get_target(target: ReadableTarget, storage: Store) -> dict[str, Any]:
    """The newest definition of a target."""
    with storage.read() as session:
        return found_or_404(queries.target_definition(session, target), f"target {target!r}")


@router.post("/commits", status_code=204)
def post_commits(body: PostedCommits, storage: Store, who: Contributor) -> None:
    """Tell of commits and of a branch's newest one. Telling again changes nothing."""
    who.require_target(body.target)
    with storage.write.begin() as session:
        register_commits(session, body.target, body.commits, branch=body.branch, head=body.head)


@router.get("/targets/{target}/commits")
def list_commits(
    target: ReadableTarget,
    storage: Store,
    limit: PageSize = PAGE_SIZE,
    cursor: Annotated[str | None, Query(pattern="^[0-9a-f]{40}$")] = None,
) -> Page[queries.CommitRow]:
    """Commits of a target, newest first, each with the state of its verdict."""
    with storage.read() as session:
        return page(queries.commits(session, target, limit=limit, before=cursor), limit, lambda row: row.sha)


@router.get("/targets/{target}/commits/{sha}")
def get_commit(target: ReadableTarget, sha: CommitId, storage: Store) -> queries.CommitRow:
    """One commit."""
    with storage.read() as session:
        return found_or_404(queries.commit(session, target, sha), f"commit {sha} of target {target!r}")


@router.get("/targets/{target}/commits/{sha}/measurements")
def list_measurements(target: ReadableTarget, sha: CommitId, storage: Store) -> Page[queries.MeasurementRow]:
    """Everything measured on a commit, with all raw samples."""
    with storage.read() as session:
        commit = found_or_404(queries.commit(session, target, sha), f"commit {sha} of target {target!r}")
        return Page(items=queries.measurements(session, target, commit.sha))


@router.get("/targets/{target}/series")
def list_series(target: ReadableTarget, storage: Store) -> Page[queries.SeriesRow]:
    """A target's series and the metrics that each has."""
    with storage.read() as session:
        return Page(items=queries.series(session, target))


@router.get("/targets/{target}/series/{kernel}/{case_id}/{metric}")
def get_series(
    target: ReadableTarget, kernel: wire.Name, case_id: CaseId, metric: wire.Name, storage: Store
) -> queries.SeriesView:
    """The history of one metric of one series, oldest commit first, as raw samples."""
    with storage.read() as session:
        return queries.points(session, target, kernel, case_id, metric)
