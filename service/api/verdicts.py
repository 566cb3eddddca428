"""Route of verdicts. One can be waited for; waiting holds no thread and no connection."""

import asyncio
import time
from typing import Annotated

from fastapi import APIRouter, Query
from starlette.concurrency import run_in_threadpool

from service import job_queue, judge, queries
from service.api.access import CommitId, ReadableTarget, ServiceSettings, Storage, Store

_POLL_SECONDS = 0.25

router = APIRouter(tags=["verdicts"])


@router.get("/targets/{target}/commits/{sha}/verdict")
async def get_verdict(
    target: ReadableTarget,
    sha: CommitId,
    storage: Store,
    settings: ServiceSettings,
    base: Annotated[str | None, Query(pattern="^[0-9a-f]{7,40}$", description="judge against this commit")] = None,
    wait: Annotated[float, Query(ge=0, description="seconds to wait for a verdict while it is missing")] = 0.0,
) -> queries.VerdictView:
    """What a commit changed, against its baseline or against `base`."""
    deadline = time.monotonic() + min(wait, settings.verdict_wait_seconds_max)
    while True:
        view, is_settled = await run_in_threadpool(_look, storage, target, sha, base)
        left = deadline - time.monotonic()
        if is_settled or left <= 0:
            return view
        await asyncio.sleep(min(_POLL_SECONDS, left))


def _look(storage: Storage, target: str, sha: str, base: str | None) -> tuple[queries.VerdictView, bool]:
    """The verdict as it is now, and whether waiting is of no use."""
    with storage.read() as session:
        view = queries.verdict(session, target, sha)
        if base is not None and view.judged_at is not None:
            view = judge.compare(session, target, base, view.sha)
        return view, view.state != "missing" or job_queue.has_given_up(session, target=target, commit=view.sha)
