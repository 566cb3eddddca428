"""The service's REST API as functions, for the daemon, the demo and the commands. Holds no policy: callers retry."""

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self
from uuid import UUID

import httpx
from pydantic import SecretStr

from service.wire import ClaimRequest, Commit, Failure, JobRequest, LeasedJob, Renewal, RunnerHello, Target

API = "/api/v1"
TRANSIENT_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
LEASE_LOST_STATUS = frozenset({404, 409, 410})
TOKEN_STATUS = frozenset({401})
FORBIDDEN_STATUS = frozenset({403})


class ClientError(Exception):
    """A request that did not do what it was for."""


class ServiceUnreachableError(ClientError):
    """The service did not answer, or answered that it cannot now: worth another try later."""


class RefusedError(ClientError):
    """The service answered no. `status` is the HTTP status; the message is its problem document in words."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Client:
    """A connection to one service with one token; threads may share it. Every method raises ServiceUnreachableError
    or RefusedError.
    """

    def __init__(
        self,
        url: str,
        token: SecretStr,
        *,
        request_seconds: float = 30.0,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        headers = {"Accept": "application/json"}
        if secret := token.get_secret_value():
            headers["Authorization"] = f"Bearer {secret}"
        self._url = url.rstrip("/")
        self._request_seconds = request_seconds
        self._http = httpx.Client(
            base_url=self._url + API, headers=headers, timeout=request_seconds, transport=transport
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    # --- what runners do ---

    def register(self, hello: RunnerHello) -> None:
        """Introduce this runner; jobs that it held in an earlier life go back to the queue."""
        self._request("POST", "/runners", content=hello.model_dump_json())

    def claim(self, request: ClaimRequest) -> LeasedJob | None:
        """The next job that this runner can do, leased to it; None if there is none."""
        answer = self._request("POST", "/jobs/claim", content=request.model_dump_json())
        return LeasedJob.model_validate_json(answer.content) if answer.content not in (b"", b"null") else None

    def renew(self, job: int, attempt: UUID, progress: str) -> None:
        """Keep a lease. RefusedError with a status of LEASE_LOST_STATUS means that the job is no longer ours."""
        body = Renewal(attempt=attempt, progress=progress[:200])
        self._request("POST", f"/jobs/{job}/renew", content=body.model_dump_json())

    def fail(self, job: int, attempt: UUID, *, transient: bool, reason: str, given_back: bool = False) -> None:
        """Give a job up: back to the queue if transient, for good if not; `given_back` as if it had not been tried."""
        body = Failure(attempt=attempt, transient=transient, reason=reason[:4000], given_back=given_back)
        self._request("POST", f"/jobs/{job}/fail", content=body.model_dump_json())

    def post_result(self, body: bytes) -> None:
        """Post a wire.Result as JSON; the same attempt may be posted any number of times. It ends the result's job."""
        self._request("POST", "/results", content=body)

    # --- what everybody does ---

    def register_target(self, target: Target) -> None:
        """Register a target, or a new version of it if it changed."""
        self._request("PUT", f"/targets/{target.name}", content=target.model_dump_json())

    def post_commits(self, target: str, commits: Sequence[Commit], *, head_of: str | None = None) -> None:
        """Tell of commits; with `head_of`, that the last one is the head of that branch."""
        body: dict[str, Any] = {"target": target, "commits": [commit.model_dump(mode="json") for commit in commits]}
        if head_of is not None:
            body |= {"branch": head_of, "head": commits[-1].sha}
        self._request("POST", "/commits", json=body)

    def enqueue(self, request: JobRequest) -> Any:
        """Ask for a commit to be measured; the same open job is never made twice."""
        return self._request("POST", "/jobs", content=request.model_dump_json()).json()

    def verdict(self, target: str, commit: str, *, base: str | None = None, wait: float = 0.0) -> Any:
        """The verdict of a commit, waiting up to `wait` seconds for it to be judged."""
        query = {"wait": f"{wait:g}", **({"base": base} if base else {})}
        seconds = self._request_seconds + wait
        return self._request("GET", f"/targets/{target}/commits/{commit}/verdict", query=query, seconds=seconds).json()

    def decide(self, finding: int, action: str, reason: str, *, until: str | None = None) -> Any:
        """Acknowledge, accept, dismiss or reopen a finding; the finding after it."""
        body = {"reason": reason, **({"until": until} if until else {})}
        return self._request("POST", f"/findings/{finding}/{action}", json=body).json()

    def get(self, path: str, query: Mapping[str, str | list[str]] | None = None) -> Any:
        """The JSON of any read route."""
        return self._request("GET", path, query=query).json()

    def _request(
        self,
        method: str,
        path: str,
        *,
        content: str | bytes | None = None,
        json: Any = None,
        query: Mapping[str, str | list[str]] | None = None,
        seconds: float | None = None,
    ) -> httpx.Response:
        headers = {"Content-Type": "application/json"} if content is not None else None
        timeout = self._request_seconds if seconds is None else seconds
        try:
            answer = self._http.request(
                method, path, content=content, json=json, params=query, headers=headers, timeout=timeout
            )
        except httpx.TransportError as error:
            raise ServiceUnreachableError(f"{self._url} does not answer: {error or type(error).__name__}") from error
        if answer.is_success:
            return answer
        message = f"{method} {API}{path}: {_problem(answer)}"
        if answer.status_code in TRANSIENT_STATUS:
            raise ServiceUnreachableError(message)
        raise RefusedError(answer.status_code, message)


def _problem(answer: httpx.Response) -> str:
    """A problem document (RFC 9457) in one line; of any other answer, its status and the start of its text."""
    try:
        document = answer.json()
    except ValueError:
        document = None
    if not isinstance(document, dict):
        return f"HTTP {answer.status_code}: {answer.text[:200]}".rstrip(": ")
    words = str(document.get("detail") or document.get("title") or "")
    faults = [e for e in document.get("errors") or [] if isinstance(e, dict) and str(e.get("message")) not in words]
    fields = [f"{e.get('field')}: {e.get('message')}" for e in faults[:5]]
    return f"HTTP {answer.status_code}: " + "; ".join(filter(None, [words, *fields]))
