"""The dashboards as an ASGI app of their own: routes, who may look, and what a failure looks like.

It reads through service.queries and changes nothing. Mounted at / beside the API by `ulpwatch serve`.
"""

from collections.abc import Callable
from http import HTTPStatus

from sqlalchemy.orm import Session
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import Response

from dashboards.access import CHALLENGE, SECURITY_HEADERS, ReadersOnly, SecurityHeaders
from dashboards.pages import page
from dashboards.routes import ROUTES
from service.errors import ServiceError

PROBLEMS = {
    401: "A read token opens these pages",
    404: "Not found",
    405: "These pages are only read",
    500: "Something broke on our side",
}


def create_app(
    session_factory: Callable[[], Session], *, public_read: bool, authenticate: Callable[[str], bool] | None
) -> Starlette:
    """The pages over a session factory. Unless `public_read`, they want a token that `authenticate` accepts, as the
    password of HTTP Basic or as Bearer; ValueError where there is nothing to check a token with.
    """
    middleware = [Middleware(SecurityHeaders), Middleware(GZipMiddleware, minimum_size=1024)]
    if not public_read:
        if authenticate is None:
            raise ValueError("pages that are not public need `authenticate`, which says whether a token may read")
        middleware.append(Middleware(ReadersOnly, authenticate=authenticate, refuse=_refuse, open_paths="/static/"))
    app = Starlette(
        routes=ROUTES,
        middleware=middleware,
        exception_handlers={HTTPException: _http_problem, ServiceError: _service_problem, Exception: _broken},
    )
    app.state.session_factory = session_factory
    return app


async def _refuse(request: Request) -> Response:
    return _problem(request, HTTPStatus.UNAUTHORIZED, "", CHALLENGE)


async def _http_problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    known = error.detail if error.detail != HTTPStatus(error.status_code).phrase else ""
    return _problem(request, error.status_code, known, headers)


async def _service_problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, ServiceError)
    return _problem(request, error.status, str(error))


async def _broken(request: Request, error: Exception) -> Response:
    del error  # the server logs it; a page shows no internals
    return _problem(request, HTTPStatus.INTERNAL_SERVER_ERROR, "", SECURITY_HEADERS)


def _problem(request: Request, status: int, detail: str, headers: dict[str, str] | None = None) -> Response:
    title = PROBLEMS.get(status, HTTPStatus(status).phrase)
    return page(request, "problem.html", status=status, headers=headers, code=status, title=title, detail=detail)
