"""Who may look, and what a browser may do with a page: two small ASGI wrappers.

Tokens are checked by the function that the service hands in; nothing is looked up here.
"""

import base64
from collections.abc import Awaitable, Callable

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

SECURITY_HEADERS = {
    "Content-Security-Policy": "; ".join(
        (
            "default-src 'none'",
            "script-src 'self'",
            "style-src 'self'",
            "img-src 'self'",
            "connect-src 'self'",
            "form-action 'self'",
            "base-uri 'none'",
            "frame-ancestors 'none'",
        )
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
CHALLENGE = {"WWW-Authenticate": 'Basic realm="ulpwatch: a read token as the password", charset="UTF-8"'}


class SecurityHeaders:
    """Adds the headers above to every response."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass everything on; complete the headers on the way back."""

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in SECURITY_HEADERS.items():
                    headers[name] = value
            await send(message)

        await self.app(scope, receive, send_guarded)


class ReadersOnly:
    """Lets a request through that carries a good token: Bearer, or the password of HTTP Basic (any user name).

    `refuse` makes the 401 page. Assets hold no data and stay open, so that this page has its style.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        authenticate: Callable[[str], bool],
        refuse: Callable[[Request], Awaitable[Response]],
        open_paths: str,
    ) -> None:
        self.app, self.authenticate, self.refuse, self.open_paths = app, authenticate, refuse, open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a reader's request on, answer any other with the 401 page."""
        if scope["type"] != "http" or await self._may_read(scope):
            await self.app(scope, receive, send)
            return
        response = await self.refuse(Request(scope))
        await response(scope, receive, send)

    async def _may_read(self, scope: Scope) -> bool:
        path = str(scope["path"]).removeprefix(scope.get("root_path", ""))
        if path.startswith(self.open_paths):
            return True
        token = presented_token(Headers(scope=scope).get("authorization", ""))
        return token is not None and await run_in_threadpool(self.authenticate, token)


def presented_token(authorization: str) -> str | None:
    """The token in an Authorization header, or None where there is none that can be read."""
    scheme, _, credentials = authorization.partition(" ")
    if scheme.lower() == "bearer":
        return credentials.strip() or None
    if scheme.lower() != "basic":
        return None
    try:
        decoded = base64.b64decode(credentials, validate=True).decode()
    except ValueError:  # not base64, or not text
        return None
    return decoded.partition(":")[2] or None
