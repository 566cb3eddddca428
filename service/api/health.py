"""Routes for whoever watches the service: does it run, can it work. They need no token and tell nothing else."""

from typing import Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel
from sqlalchemy import Engine

from service.db import require_current_schema

router = APIRouter(tags=["health"])


class Health(BaseModel):
    """The one answer; a service that is not well answers with a problem document."""

    status: Literal["ok"] = "ok"


@router.get("/health")
async def get_health() -> Health:
    """The process runs."""
    return Health()


@router.get("/ready")
def get_ready(request: Request) -> Health:
    """The database answers and its tables are those of this version."""
    engine: Engine = request.app.state.engine
    require_current_schema(engine)
    return Health()
