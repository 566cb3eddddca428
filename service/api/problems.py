"""Turns every exception of a request into an RFC 9457 problem document. Tells callers nothing of our insides."""

import logging
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from sqlalchemy.exc import OperationalError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from service.errors import FieldError, Invalid, ServiceError, Unavailable, problem_document

MEDIA_TYPE = "application/problem+json"
RESPONSE: dict[str, Any] = {
    "description": "What was wrong, where, and what to do (RFC 9457).",
    "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
}
_ERRORS_MAX = 20
_TEXT_MAX = 300
_DETAILS = {
    404: "there is nothing at this address: see /openapi.json",
    405: "this address takes other methods: see /openapi.json",
}

_log = logging.getLogger(__name__)


class ProblemField(BaseModel):
    """What is wrong with one field."""

    field: str
    message: str


class Problem(BaseModel):
    """The body of every response that is no success."""

    type: str
    title: str
    status: int
    detail: str
    errors: list[ProblemField] = []


def install(app: FastAPI) -> None:
    """Let this module answer for every exception of the app."""
    app.add_exception_handler(ServiceError, _service_error)
    app.add_exception_handler(RequestValidationError, _request_invalid)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(OperationalError, _database_unavailable)
    app.add_exception_handler(Exception, _unexpected)


def invalid(error: ValidationError) -> Invalid:
    """The Invalid that tells of a body that pydantic refused."""
    items = error.errors(include_url=False, include_context=False, include_input=False)
    return _invalid([{**item, "loc": ("body", *item["loc"])} for item in items[:_ERRORS_MAX]], count=len(items))


def field_path(location: Sequence[str | int]) -> str:
    """A pydantic location as a path: `("body", "measurements", 3, "values")` is `body.measurements[3].values`."""
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return _shortened(path.removeprefix("."))


def problem_response(document: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> JSONResponse:
    """A problem document as a response."""
    return JSONResponse(document, status_code=document["status"], headers=headers, media_type=MEDIA_TYPE)


def http_problem(status: int, detail: str | None = None) -> dict[str, Any]:
    """The problem document of a plain HTTP status."""
    title = HTTPStatus(status).phrase
    slug = title.lower().replace(" ", "-")
    return problem_document(status=status, slug=slug, title=title, detail=detail or _DETAILS.get(status, title))


def _invalid(items: Sequence[Mapping[str, Any]], *, count: int) -> Invalid:
    """The first of `count` errors in words."""
    errors = [FieldError(field_path(item["loc"]), _shortened(_words(item))) for item in items[:_ERRORS_MAX]]
    more = f", and {count - _ERRORS_MAX} more" if count > _ERRORS_MAX else ""
    first = errors[0]
    return Invalid(f"{first.field}: {first.message}{more}", errors=errors)


def _words(item: Mapping[str, Any]) -> str:
    message = str(item["msg"]).removeprefix("Value error, ")
    return message[0].lower() + message[1:] if message.startswith("Input should") else message


def _shortened(text: str) -> str:
    return text if len(text) <= _TEXT_MAX else f"{text[:_TEXT_MAX]}..."


async def _service_error(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ServiceError)
    return problem_response(error.problem(), error.headers)


async def _request_invalid(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    items = error.errors()
    return problem_response(_invalid(items, count=len(items)).problem())


async def _http_error(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    detail = None if error.detail == HTTPStatus(error.status_code).phrase else error.detail
    return problem_response(http_problem(error.status_code, detail), error.headers)


async def _database_unavailable(_request: Request, error: Exception) -> JSONResponse:
    _log.warning("the database did not answer in time: %s", error)
    unavailable = Unavailable("the database did not answer in time: try again")
    return problem_response(unavailable.problem(), unavailable.headers)


async def _unexpected(_request: Request, _error: Exception) -> JSONResponse:
    """The server's error log has the traceback; the caller gets none of it."""
    return problem_response(ServiceError("the service failed; its log says why").problem())
