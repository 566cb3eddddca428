"""What routes depend on: the storage, and the caller, whose token has to allow the route."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, TypeVar

from fastapi import Depends, Path, Request, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from service import wire
from service.auth import Caller, Scope, authenticate
from service.db import SessionFactory
from service.errors import Forbidden, NotFound, Unauthenticated
from service.settings import Settings

_Found = TypeVar("_Found")

ANONYMOUS = Caller(scope="read", label="anonymous")

_bearer = HTTPBearer(auto_error=False, description="A token of `ulpwatch token create`.")


@dataclass(frozen=True, slots=True)
class Storage:
    """The database: sessions that read, sessions that write. A route opens one and makes one transaction of it."""

    read: SessionFactory
    write: SessionFactory


def _settings(request: Request) -> Settings:
    settings: Settings = request.app.state.settings
    return settings


def _storage(request: Request) -> Storage:
    storage: Storage = request.app.state.storage
    return storage


ServiceSettings = Annotated[Settings, Depends(_settings)]
Store = Annotated[Storage, Depends(_storage)]


def caller(
    settings: ServiceSettings,
    storage: Store,
    credentials: Annotated[HTTPAuthorizationCredentials | None, Security(_bearer)],
) -> Caller:
    """Who asks. Unauthenticated without a good token, unless anyone may read."""
    if credentials is None:
        if settings.public_read:
            return ANONYMOUS
        raise Unauthenticated("this needs a token: send `Authorization: Bearer ...` (`ulpwatch token create`)")
    with storage.read() as session:
        found = authenticate(session, credentials.credentials)
    if found is None:
        raise Unauthenticated("this token is unknown, expired or revoked: make one with `ulpwatch token create`")
    return found


def require_scope(who: Caller, *scopes: Scope) -> Caller:
    """The caller. Unauthenticated or Forbidden unless the token grants one of the scopes."""
    if who.may(*scopes):
        return who
    if who.token_id is None:
        raise Unauthenticated(f"this needs a token of scope {' or '.join(scopes)}")
    raise Forbidden(f"this needs a token of scope {' or '.join(scopes)}; this one has scope {who.scope}")


def require(*scopes: Scope) -> Callable[[Caller], Caller]:
    """A dependency: the caller, whose token must grant one of the scopes."""

    def check(who: Annotated[Caller, Depends(caller)]) -> Caller:
        return require_scope(who, *scopes)

    return check


Reader = Annotated[Caller, Depends(require("read"))]
Contributor = Annotated[Caller, Depends(require("ci"))]
RunnerCaller = Annotated[Caller, Depends(require("runner"))]
Submitter = Annotated[Caller, Depends(require("ci", "runner"))]
Administrator = Annotated[Caller, Depends(require("admin"))]


def _readable_target(target: Annotated[wire.Name, Path()], who: Reader) -> str:
    who.require_target(target)
    return target


ReadableTarget = Annotated[str, Depends(_readable_target)]
CommitId = Annotated[
    str, Path(pattern="^[0-9a-f]{7,40}$", description="full commit id, or a unique prefix of at least 7 digits")
]
PathId = Annotated[wire.RowId, Path()]


def found_or_404(value: _Found | None, what: str) -> _Found:
    """The value; NotFound, naming what was looked for, if there is none."""
    if value is None:
        raise NotFound(f"{what} is unknown")
    return value
