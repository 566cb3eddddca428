"""Routes of API tokens, for administrators."""

from typing import Annotated

from fastapi import APIRouter, Depends
from pydantic import BaseModel, ConfigDict

from service import auth, wire
from service.api.access import Administrator, PathId, Store
from service.api.bodies import SMALL, JsonBody
from service.api.paging import Page

router = APIRouter(tags=["tokens"])


class TokenRequest(BaseModel):
    """A token to be made: its scope, the one target that it is good for, and what it is called."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    scope: auth.Scope
    target: wire.Name | None = None
    label: wire.Short = ""
    expires_at: wire.Moment | None = None


TokenBody = Annotated[TokenRequest, Depends(JsonBody(TokenRequest, "admin", bytes_max=SMALL))]


@router.post("/tokens", status_code=201)
def post_token(request: TokenBody, storage: Store, who: Administrator) -> auth.CreatedToken:
    """Make a token. Its secret is in this answer and nowhere else."""
    who.require_all_targets()
    with storage.write.begin() as session:
        return auth.create_token(session, **dict(request))


@router.get("/tokens")
def list_tokens(storage: Store, who: Administrator) -> Page[auth.TokenRow]:
    """All tokens, newest first, without their secrets."""
    who.require_all_targets()
    with storage.read() as session:
        return Page(items=auth.tokens(session))


@router.delete("/tokens/{token_id}", status_code=204)
def delete_token(token_id: PathId, storage: Store, who: Administrator) -> None:
    """Revoke a token."""
    who.require_all_targets()
    with storage.write.begin() as session:
        auth.revoke_token(session, token_id)
