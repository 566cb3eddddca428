"""Pages and API share one process, and each keeps its own addresses."""

import asyncio
from pathlib import Path

import httpx
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from service.app import add_pages, create_app
from service.settings import Settings


async def _page(scope: Scope, receive: Receive, send: Send) -> None:
    await PlainTextResponse("a page", headers={"Cache-Control": "max-age=60"})(scope, receive, send)


def test_pages_answer_for_every_address_that_is_not_the_apis(tmp_path: Path) -> None:
    app = create_app(Settings(database_url=f"sqlite:///{tmp_path}/unused.sqlite3"))
    add_pages(app, _page)

    async def ask() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://service") as client:
            asked = [("GET", "/"), ("GET", "/targets/demo"), ("GET", "/api/v1/nowhere"), ("DELETE", "/api/v1/results")]
            return [await client.request(method, path) for method, path in (*asked, ("GET", "/api/v1/health"))]

    answers = asyncio.run(ask())
    assert [answer.status_code for answer in answers] == [200, 200, 404, 405, 200]
    assert [answer.headers["content-type"] for answer in answers] == [
        "text/plain; charset=utf-8",
        "text/plain; charset=utf-8",
        "application/problem+json",
        "application/problem+json",
        "application/json",
    ]
    assert [answer.headers["cache-control"] for answer in answers] == ["max-age=60"] * 2 + ["no-store"] * 3
