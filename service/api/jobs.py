"""Routes of the job queue and of the runners that work on it."""

from dataclasses import asdict
from datetime import datetime
from typing import Annotated, Literal
from uuid import UUID

from fastapi import APIRouter, Depends, Query
from pydantic import BaseModel
from sqlalchemy.orm import Session

from service import job_queue, queries, wire
from service.api.access import Contributor, PathId, Reader, RunnerCaller, ServiceSettings, Store
from service.api.bodies import SMALL, JsonBody
from service.api.paging import PAGE_SIZE, Page, PageSize
from service.auth import Caller

router = APIRouter(tags=["jobs"])

JobBody = Annotated[wire.JobRequest, Depends(JsonBody(wire.JobRequest, "ci", bytes_max=SMALL))]
HelloBody = Annotated[wire.RunnerHello, Depends(JsonBody(wire.RunnerHello, "runner", bytes_max=SMALL))]
ClaimBody = Annotated[wire.ClaimRequest, Depends(JsonBody(wire.ClaimRequest, "runner", bytes_max=SMALL))]
RenewalBody = Annotated[wire.Renewal, Depends(JsonBody(wire.Renewal, "runner", bytes_max=SMALL))]
FinishBody = Annotated[wire.Finish, Depends(JsonBody(wire.Finish, "runner", bytes_max=SMALL))]
FailureBody = Annotated[wire.Failure, Depends(JsonBody(wire.Failure, "runner", bytes_max=SMALL))]


class Renewed(BaseModel):
    """Until when the lease holds now."""

    lease_expires_at: datetime


@router.post("/jobs")
def post_job(request: JobBody, storage: Store, settings: ServiceSettings, who: Contributor) -> job_queue.Queued:
    """Ask for a commit to be measured. The same open job is never made twice."""
    who.require_target(request.target)
    with storage.write.begin() as session:
        return job_queue.enqueue(session, **dict(request), attempts_allowed=settings.attempts_allowed)


@router.get("/jobs")
def list_jobs(
    storage: Store,
    who: Reader,
    target: Annotated[wire.Name | None, Query()] = None,
    state: Annotated[Literal["queued", "leased", "done", "failed"] | None, Query()] = None,
    limit: PageSize = PAGE_SIZE,
) -> Page[queries.JobRow]:
    """Jobs, newest first."""
    target = who.target if target is None else target
    if target is not None:
        who.require_target(target)
    with storage.read() as session:
        return Page(items=queries.jobs(session, target, state, limit=limit))


@router.post("/jobs/claim")
def claim_job(
    request: ClaimBody, storage: Store, settings: ServiceSettings, who: RunnerCaller
) -> wire.LeasedJob | None:
    """Lease the next job that the runner can do; null if there is none."""
    with storage.write.begin() as session:
        if not who.may("admin"):
            assert who.token_id is not None
            job_queue.require_runner_of_token(session, request.runner, who.token_id)
        claimed = job_queue.claim(
            session,
            runner=request.runner,
            device_class=request.device_class,
            lease_seconds=settings.lease_seconds,
            token_target_id=who.target_id,
        )
    return None if claimed is None else wire.LeasedJob.model_validate(asdict(claimed))


@router.post("/jobs/{job_id}/renew")
def renew_job(
    job_id: PathId, renewal: RenewalBody, storage: Store, settings: ServiceSettings, who: RunnerCaller
) -> Renewed:
    """Keep a lease. 410 if the attempt no longer holds the job."""
    with storage.write.begin() as session:
        _require_own(session, who, job_id, renewal.attempt)
        expires_at = job_queue.renew(
            session,
            job_id,
            str(renewal.attempt),
            lease_seconds=settings.lease_seconds,
            progress=renewal.progress,
        )
    return Renewed(lease_expires_at=expires_at)


@router.post("/jobs/{job_id}/finish", status_code=204)
def finish_job(job_id: PathId, finish: FinishBody, storage: Store, who: RunnerCaller) -> None:
    """End a job whose result is stored. Storing the result ends it too."""
    with storage.write.begin() as session:
        _require_own(session, who, job_id, finish.attempt)
        job_queue.finish(session, job_id, str(finish.attempt))


@router.post("/jobs/{job_id}/fail", status_code=204)
def fail_job(job_id: PathId, failure: FailureBody, storage: Store, who: RunnerCaller) -> None:
    """Give a job up: back to the queue if the failure is transient. 410 if the attempt no longer holds the job."""
    with storage.write.begin() as session:
        _require_own(session, who, job_id, failure.attempt)
        if failure.given_back:
            job_queue.give_back(session, job_id, str(failure.attempt), reason=failure.reason)
        else:
            job_queue.fail(session, job_id, str(failure.attempt), transient=failure.transient, reason=failure.reason)


@router.post("/runners", status_code=204)
def post_runner(hello: HelloBody, storage: Store, who: RunnerCaller) -> None:
    """Introduce a runner. Jobs that it held in an earlier life go back to the queue."""
    assert who.token_id is not None
    with storage.write.begin() as session:
        job_queue.register_runner(session, **dict(hello), token_id=who.token_id)


@router.get("/runners")
def list_runners(storage: Store, who: Reader) -> Page[queries.RunnerRow]:
    """Runners by name, with the job that each works on."""
    who.require_all_targets()
    with storage.read() as session:
        return Page(items=queries.runners(session))


def _require_own(session: Session, who: Caller, job_id: int, attempt: UUID) -> None:
    if not who.may("admin"):
        assert who.token_id is not None
        job_queue.require_attempt_of_token(session, job_id, str(attempt), who.token_id)
