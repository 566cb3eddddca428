"""What holds for every request and response, whatever the route: the largest body, and headers for browsers."""

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.api.problems import problem_response
from service.errors import TooLarge

SECURITY_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
}


def too_large(bytes_max: int) -> TooLarge:
    """The answer to a body of more than `bytes_max` bytes."""
    return TooLarge(f"the body is larger than {bytes_max} bytes: post it in parts, a result by suite or kernel")


class BodyLimit:
    """Answers 413 to a body that is too large for any route: at once if it says its length, else while it streams."""

    def __init__(self, app: ASGIApp, *, bytes_max: int) -> None:
        self._app = app
        self._bytes_max = bytes_max

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with a counted body."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "")
        if declared.isdecimal() and int(declared) > self._bytes_max:
            await problem_response(too_large(self._bytes_max).problem())(scope, receive, send)
            return
        received = 0

        async def receive_counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._bytes_max:
                raise too_large(self._bytes_max)
            return message

        await self._app(scope, receive_counted, send)


class SecurityHeaders:
    """Adds SECURITY_HEADERS to every response that does not set them itself."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in SECURITY_HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        await self._app(scope, receive, send_with_headers)
