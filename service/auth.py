"""API tokens: made, looked up by digest, revoked; and what each scope may do. Knows no route.

A token is shown once and kept as its SHA-256 only. It has 256 random bits, so a plain hash is enough, and looking the
hash up in an index tells nothing about the token.
"""

import hashlib
import secrets
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal, get_args

from sqlalchemy import or_, select, update
from sqlalchemy.orm import Session

from service.errors import Forbidden, Invalid, NotFound
from service.models import Target, Token

Scope = Literal["read", "ci", "runner", "admin"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
TOKEN_PREFIX = "ulpw_"  # noqa: S105 (the part that every token shares, for secret scanners)

# What a token of each scope may do. A runner's key is for its own jobs: it reads nothing.
GRANTS: dict[Scope, frozenset[Scope]] = {
    "read": frozenset({"read"}),
    "ci": frozenset({"read", "ci"}),
    "runner": frozenset({"runner"}),
    "admin": frozenset(SCOPES),
}


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks. Without `token_id`: an anonymous reader. With `target`: good for this target alone."""

    scope: Scope
    label: str
    token_id: int | None = None
    target: str | None = None
    target_id: int | None = None

    def may(self, *scopes: Scope) -> bool:
        """Whether the token grants at least one of the scopes."""
        return not GRANTS[self.scope].isdisjoint(scopes)

    def require_target(self, target: str) -> None:
        """Raise Forbidden if the token is good for another target only."""
        if self.target is not None and self.target != target:
            raise Forbidden(f"this token is good for target {self.target!r}, not for {target!r}")

    def require_all_targets(self) -> None:
        """Raise Forbidden if the token is restricted to a target."""
        if self.target is not None:
            raise Forbidden(f"this token is good for target {self.target!r} alone, and this concerns all targets")


@dataclass(frozen=True, slots=True)
class CreatedToken:
    """A new token; `secret` exists here and nowhere else."""

    id: int
    secret: str


@dataclass(frozen=True, slots=True)
class TokenRow:
    """A token in a list."""

    id: int
    scope: str
    target: str | None
    label: str
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None


def digest(secret: str) -> str:
    """What is stored of a token."""
    return hashlib.sha256(secret.encode()).hexdigest()


def create_token(
    session: Session, scope: str, *, target: str | None = None, label: str = "", expires_at: datetime | None = None
) -> CreatedToken:
    """Make a token. Invalid if the scope is none, NotFound if the target is unknown."""
    if scope not in SCOPES:
        raise Invalid(f"scope {scope!r} is none of {', '.join(SCOPES)}")
    target_id = None
    if target is not None:
        target_id = session.scalars(select(Target.id).where(Target.name == target)).first()
        if target_id is None:
            raise NotFound(f"target {target!r} is unknown: register its target file first")
    secret = TOKEN_PREFIX + secrets.token_urlsafe(32)
    token = Token(
        digest=digest(secret),
        scope=scope,
        target_id=target_id,
        label=label,
        created_at=datetime.now(UTC),
        expires_at=expires_at,
    )
    session.add(token)
    session.flush()
    return CreatedToken(id=token.id, secret=secret)


def authenticate(session: Session, secret: str) -> Caller | None:
    """Whose token it is; None if it is unknown, expired or revoked."""
    row = session.execute(
        select(Token.id, Token.scope, Token.label, Token.target_id, Target.name)
        .outerjoin(Target, Target.id == Token.target_id)
        .where(
            Token.digest == digest(secret),
            Token.revoked_at.is_(None),
            or_(Token.expires_at.is_(None), Token.expires_at > datetime.now(UTC)),
        )
    ).first()
    if row is None:
        return None
    label = row.label or f"{row.scope} token {row.id}"
    return Caller(scope=row.scope, label=label, token_id=row.id, target=row.name, target_id=row.target_id)


def revoke_token(session: Session, token_id: int) -> None:
    """Make a token useless from now on. NotFound if there is none of this id."""
    if session.get(Token, token_id) is None:
        raise NotFound(f"token {token_id} is unknown")
    session.execute(
        update(Token).where(Token.id == token_id, Token.revoked_at.is_(None)).values(revoked_at=datetime.now(UTC))
    )


def tokens(session: Session) -> list[TokenRow]:
    """All tokens, newest first, without what they are."""
    rows = session.execute(
        select(Token, Target.name).outerjoin(Target, Target.id == Token.target_id).order_by(Token.id.desc())
    )
    return [
        TokenRow(
            id=token.id,
            scope=token.scope,
            target=target,
            label=token.label,
            created_at=token.created_at,
            expires_at=token.expires_at,
            revoked_at=token.revoked_at,
        )
        for token, target in rows
    ]
