"""The ASGI app: the REST API, and the judge that works beside it. Everything it does is in the modules it names."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.concurrency import run_in_threadpool
from starlette.routing import Match, Mount
from starlette.types import ASGIApp, Scope

from service import wire
from service.api import findings, health, jobs, problems, results, targets, tokens, verdicts
from service.api.access import Storage
from service.api.bodies import JsonBody
from service.api.limits import BodyLimit, SecurityHeaders
from service.db import SessionFactory, open_engine, reading_session_factory, require_current_schema, session_factory
from service.job_queue import expire_due
from service.judge import judge_pending
from service.settings import Settings

API_PREFIX = "/api/v1"
API_VERSION = "1"
ROUTERS = (targets, verdicts, findings, results, jobs, tokens, health)

_log = logging.getLogger(__name__)


def create_app(settings: Settings) -> FastAPI:
    """The service on the database of `settings`. `app.state.storage` holds its session factories.

    At start-up it raises SchemaBehind if the database needs `ulpwatch db upgrade`.
    """
    engine = open_engine(settings.database_url)
    storage = Storage(read=reading_session_factory(engine), write=session_factory(engine))

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.judge_wanted = asyncio.Event()
        try:
            await run_in_threadpool(require_current_schema, engine)
            interval_seconds = settings.judge_interval_seconds
            async with (
                _expiring(storage.write, interval_seconds),
                _judging(storage.write, app.state.judge_wanted, interval_seconds),
            ):
                yield
        finally:
            engine.dispose()

    app = FastAPI(
        title="ulpwatch",
        version=API_VERSION,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        generate_unique_id_function=lambda route: route.name,
        responses={"default": problems.RESPONSE},
    )
    app.state.settings, app.state.engine, app.state.storage = settings, engine, storage
    for module in ROUTERS:
        app.include_router(module.router, prefix=API_PREFIX)
    problems.install(app)
    app.add_middleware(BodyLimit, bytes_max=settings.body_bytes_max)
    app.add_middleware(SecurityHeaders)
    app.openapi = partial(_openapi, app)  # type: ignore[method-assign]
    return app


def add_pages(app: FastAPI, pages: ASGIApp) -> None:
    """Let `pages` answer for every address that is not the API's; unknown API addresses stay problem documents."""
    app.router.routes.append(_Pages("/", app=pages))


class _Pages(Mount):
    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Match every address outside the API."""
        if scope["path"].startswith("/api/"):
            return Match.NONE, {}
        return super().matches(scope)


def _openapi(app: FastAPI) -> dict[str, Any]:
    """FastAPI's document, and what it cannot see: the bodies that routes read themselves, the problem document."""
    document = FastAPI.openapi(app)
    bodies = {(path, method): model for path, method, model in _bodies()}
    models: list[type[BaseModel]] = [*bodies.values(), wire.Result, problems.Problem]
    names, schemas = models_json_schema(
        [(model, "validation") for model in models], ref_template="#/components/schemas/{model}"
    )
    document["components"]["schemas"] |= schemas["$defs"]
    for (path, method), model in bodies.items():
        content = {"application/json": {"schema": names[model, "validation"]}}
        document["paths"][path][method]["requestBody"] = {"required": True, "content": content}
    return document


def _bodies() -> Iterator[tuple[str, str, type[BaseModel]]]:
    """(path, method, model) of every route that reads a JSON body."""
    for module in ROUTERS:
        for route in module.router.routes:
            assert isinstance(route, APIRoute)
            for needed in route.dependant.dependencies:
                if isinstance(needed.call, JsonBody):
                    for method in route.methods or ():
                        yield API_PREFIX + route.path, method.lower(), needed.call.model


@asynccontextmanager
async def _judging(factory: SessionFactory, wanted: asyncio.Event, interval_seconds: float) -> AsyncIterator[None]:
    """Judge in the background until there is nothing to judge, then wait for `wanted`, at most for the interval.

    At the end a judgement in progress comes to its own end: a thread cannot be cancelled.
    """
    stopping = asyncio.Event()

    async def judge_until_stopped() -> None:
        while not stopping.is_set():
            wanted.clear()
            judged = await run_in_threadpool(_judge, factory)
            if not judged and not stopping.is_set():
                with suppress(TimeoutError):
                    await asyncio.wait_for(wanted.wait(), interval_seconds)

    task = asyncio.create_task(judge_until_stopped())
    try:
        yield
    finally:
        stopping.set()
        wanted.set()
        await task


@asynccontextmanager
async def _expiring(factory: SessionFactory, interval_seconds: float) -> AsyncIterator[None]:
    """Give jobs up in the background when their lease runs out, so that what anyone reads of them is true."""
    stopping = asyncio.Event()

    async def expire_until_stopped() -> None:
        while not stopping.is_set():
            await run_in_threadpool(_expire, factory)
            with suppress(TimeoutError):
                await asyncio.wait_for(stopping.wait(), interval_seconds)

    task = asyncio.create_task(expire_until_stopped())
    try:
        yield
    finally:
        stopping.set()
        await task


def _expire(factory: SessionFactory) -> None:
    try:
        expire_due(factory)
    except Exception:  # noqa: BLE001 (whatever it is: the next look may succeed)
        _log.exception("leases that ran out could not be given up; it tries again")


def _judge(factory: SessionFactory) -> int:
    try:
        return judge_pending(factory)
    except Exception:  # noqa: BLE001 (whatever it is: the API goes on, what was not judged stays pending)
        _log.exception("the judge failed; it tries again")
        return 0
