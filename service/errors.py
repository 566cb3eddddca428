"""The service's exceptions, each with its HTTP status, and the RFC 9457 problem document that tells of one.

One family: ServiceError. Raised by any layer of the service; turned into a response in one place, service.api.problems.
"""

# ruff: noqa: N818 (they are named for what happened, as their HTTP statuses are)

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

TYPE_PREFIX = "urn:ulpwatch:problem:"


@dataclass(frozen=True, slots=True)
class FieldError:
    """What is wrong with one field; `field` is a path such as `body.measurements[3].values`."""

    field: str
    message: str


class ServiceError(Exception):
    """Something that the caller has to be told: what was wrong, where, and what to do."""

    status: ClassVar[int] = 500
    slug: ClassVar[str] = "internal"
    title: ClassVar[str] = "Internal error"

    def __init__(self, detail: str, *, errors: Sequence[FieldError] = ()) -> None:
        super().__init__(detail)
        self.detail = detail
        self.errors = tuple(errors)

    def problem(self) -> dict[str, Any]:
        """The problem document of this error."""
        return problem_document(
            status=self.status, slug=self.slug, title=self.title, detail=self.detail, errors=self.errors
        )

    @property
    def headers(self) -> Mapping[str, str]:
        """Response headers that belong to the status."""
        return {}


class Unauthenticated(ServiceError):
    """No token, or one that is unknown, expired or revoked."""

    status, slug, title = 401, "unauthenticated", "Authentication required"

    @property
    def headers(self) -> Mapping[str, str]:
        """Name the scheme, as RFC 9110 demands of a 401."""
        return {"WWW-Authenticate": 'Bearer realm="ulpwatch"'}


class Forbidden(ServiceError):
    """The token is good, but not for this."""

    status, slug, title = 403, "forbidden", "Forbidden"


class NotFound(ServiceError):
    """Nothing has this name."""

    status, slug, title = 404, "not-found", "Not found"


class Conflict(ServiceError):
    """The request contradicts what is stored."""

    status, slug, title = 409, "conflict", "Conflict"


class LeaseLost(ServiceError):
    """The attempt no longer holds its job."""

    status, slug, title = 410, "lease-lost", "Lease lost"


class TooLarge(ServiceError):
    """The body is larger than this address takes."""

    status, slug, title = 413, "too-large", "Body too large"


class UnsupportedMediaType(ServiceError):
    """The body is not of a type that this address takes."""

    status, slug, title = 415, "unsupported-media-type", "Unsupported media type"


class Invalid(ServiceError):
    """The request is understood and makes no sense; `errors` names the fields."""

    status, slug, title = 422, "invalid", "Invalid request"


class Unavailable(ServiceError):
    """The service cannot answer now; the same request may succeed later."""

    status, slug, title = 503, "unavailable", "Service unavailable"

    @property
    def headers(self) -> Mapping[str, str]:
        """Tell clients when to come back."""
        return {"Retry-After": "1"}


class SchemaBehind(Unavailable):
    """The database's tables are not those that this version of the service needs."""


def problem_document(
    *, status: int, slug: str, title: str, detail: str, errors: Sequence[FieldError] = ()
) -> dict[str, Any]:
    """An RFC 9457 problem document; `errors` is our extension member."""
    document: dict[str, Any] = {"type": TYPE_PREFIX + slug, "title": title, "status": status, "detail": detail}
    if errors:
        document["errors"] = [asdict(error) for error in errors]
    return document
