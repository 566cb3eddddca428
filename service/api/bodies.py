"""JSON request bodies: read only when the caller is known to be allowed, within the route's limit, parsed off the event
loop.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Generic, TypeVar

from fastapi import Depends, Request
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.concurrency import run_in_threadpool

from service.api.access import caller, require_scope
from service.api.limits import too_large
from service.api.problems import invalid
from service.auth import Caller, Scope
from service.errors import Invalid, UnsupportedMediaType

SMALL = 64 << 10
TARGET = 1 << 20
COMMITS = 8 << 20
# More members than any object of the wire has; pydantic takes 10 microseconds, interpreter locked, to refuse each one.
_MEMBERS_MAX = 4096

Model = TypeVar("Model", bound=BaseModel)


class JsonBody(Generic[Model]):
    """A dependency: the body as `model`, of a caller whose token grants one of the scopes."""

    def __init__(self, model: type[Model], *scopes: Scope, bytes_max: int) -> None:
        self.model = model
        self._scopes = scopes
        self._bytes_max = bytes_max

    async def __call__(self, request: Request, who: Annotated[Caller, Depends(caller)]) -> Model:
        """Check the caller, then read."""
        require_scope(who, *self._scopes)
        body = await read_json(request, bytes_max=self._bytes_max)
        return await run_in_threadpool(parse, self.model, body)


async def read_json(request: Request, *, bytes_max: int) -> bytes:
    """The bytes of a JSON body. UnsupportedMediaType if it is said to be something else; TooLarge, as soon as that is
    known, if it is longer than `bytes_max`.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise UnsupportedMediaType("send the body as `Content-Type: application/json`")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > bytes_max:
        raise too_large(bytes_max)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > bytes_max:
            raise too_large(bytes_max)
    return bytes(body)


def parse(model: type[Model], body: bytes) -> Model:
    """The body as a model; Invalid, naming fields, if it is none."""
    if len(body) > SMALL:
        _require_modest_objects(body)
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise invalid(error) from error


def _require_modest_objects(body: bytes) -> None:
    """Refuse what would be told as a million unknown fields."""
    try:
        waiting: list[Any] = [from_json(body)]
    except ValueError:
        return  # the model says why
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict) and len(value) > _MEMBERS_MAX:
            raise Invalid(f"an object of the body has {len(value)} members, more than {_MEMBERS_MAX}")
        members: Sequence[Any] = list(value.values()) if isinstance(value, dict) else value
        waiting.extend(member for member in members if isinstance(member, dict | list))
