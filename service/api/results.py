"""The route that takes results. The body is read as bytes, after authentication: its digest tells a repetition from a
contradiction, and pydantic parses JSON bytes faster than it walks objects.
"""

import hashlib
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse

from service import wire
from service.api.access import ServiceSettings, Storage, Store, Submitter
from service.api.bodies import parse, read_json
from service.auth import Caller
from service.errors import Forbidden
from service.ingest import Ingested, ingest
from service.job_queue import require_attempt_of_token

router = APIRouter(tags=["results"])

_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Result"}}},
    }
}


@dataclass(frozen=True, slots=True)
class StoredResult:
    """Where a result is stored; `created` is False if it was stored already."""

    run_id: int
    created: bool


@router.post(
    "/results",
    status_code=201,
    response_model=StoredResult,
    responses={200: {"model": StoredResult, "description": "The same attempt was stored before."}},
    openapi_extra=_BODY,
)
async def post_result(
    request: Request,
    storage: Store,
    settings: ServiceSettings,
    who: Submitter,
    quarantined: Annotated[bool, Query(description="of an untrusted pull request: never part of a baseline")] = False,
) -> JSONResponse:
    """Store one attempt's measurements of a commit. Idempotent by attempt.

    With a runner token: of a job that was leased to this runner. With a ci token: of no job.
    """
    body = await read_json(request, bytes_max=settings.body_bytes_max)
    stored = await run_in_threadpool(_store, storage, who, body, quarantined)
    request.app.state.judge_wanted.set()
    return JSONResponse(asdict(StoredResult(stored.run_id, stored.created)), status_code=201 if stored.created else 200)


def _store(storage: Storage, who: Caller, body: bytes, quarantined: bool) -> Ingested:
    result = parse(wire.Result, body)
    who.require_target(result.target)
    with storage.write.begin() as session:
        if result.job is None and not who.may("ci"):
            raise Forbidden("a runner token posts the results of its own jobs: name the job in `job`")
        if result.job is not None and not who.may("runner"):
            raise Forbidden("a ci token posts results of no job: leave `job` out")
        if result.job is not None and not who.may("admin"):
            assert who.token_id is not None
            require_attempt_of_token(session, result.job, str(result.attempt), who.token_id)
        return ingest(
            session,
            result,
            body_digest=hashlib.sha256(body).hexdigest(),
            posted_by=who.label,
            quarantined=quarantined,
        )
