"""The client turns answers into values, and everything else into one of two errors."""

import logging
from collections.abc import Callable
from uuid import UUID

import httpx
import pytest
from pydantic import SecretStr

from runners.client import Client, RefusedError, ServiceUnreachableError
from service.wire import ClaimRequest, Commit, RunnerHello

ATTEMPT = UUID(int=7)
PROBLEM = {
    "title": "Unprocessable Content",
    "status": 422,
    "detail": "the payload does not fit",
    "errors": [{"field": "body.measurements[3].values", "message": "unknown metric 'speed'"}],
}


def client(answer: Callable[[httpx.Request], httpx.Response], token: str = "secret-token") -> Client:
    """A client whose requests `answer` answers."""
    return Client("http://service.test/", SecretStr(token), transport=httpx.MockTransport(answer))


def answering(status: int, **content: object) -> Client:
    """A client that always gets the same answer."""
    return client(lambda _request: httpx.Response(status, **content))  # type: ignore[arg-type]


def test_a_refusal_says_where_what_and_which_field() -> None:
    with pytest.raises(RefusedError) as refused:
        answering(422, json=PROBLEM).post_result(b"{}")
    assert refused.value.status == 422
    for words in ("POST /api/v1/results", "does not fit", "body.measurements[3].values", "unknown metric 'speed'"):
        assert words in str(refused.value)


def test_an_answer_that_is_no_problem_document_is_still_a_clear_refusal() -> None:
    with pytest.raises(RefusedError, match="HTTP 404: no such page"):
        answering(404, text="no such page").get("/nowhere")


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_a_service_in_trouble_is_worth_another_try(status: int) -> None:
    with pytest.raises(ServiceUnreachableError, match=f"HTTP {status}"):
        answering(status, text="later").get("/health")


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 410, 413, 422])
def test_a_no_is_not_worth_another_try(status: int) -> None:
    with pytest.raises(RefusedError) as refused:
        answering(status).get("/health")
    assert refused.value.status == status


@pytest.mark.parametrize(
    "error", [httpx.ConnectError("refused"), httpx.ReadTimeout(""), httpx.RemoteProtocolError("cut")]
)
def test_a_broken_connection_names_the_service(error: httpx.TransportError) -> None:
    def break_off(_request: httpx.Request) -> httpx.Response:
        raise error

    with pytest.raises(ServiceUnreachableError, match=r"http://service\.test does not answer"):
        client(break_off).get("/health")


def test_no_job_is_none() -> None:
    request = ClaimRequest(runner="r", device_class="cpu")
    assert answering(204).claim(request) is None
    assert answering(200, content=b"null").claim(request) is None


def test_a_result_is_posted_byte_for_byte_with_the_token() -> None:
    seen: list[httpx.Request] = []

    def keep(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(201, json={})

    client(keep).post_result(b'{"a" : 1.50}')
    (request,) = seen
    assert request.content == b'{"a" : 1.50}'
    assert request.url == "http://service.test/api/v1/results"
    assert request.headers["Authorization"] == "Bearer secret-token"
    assert request.headers["Content-Type"] == "application/json"


def test_without_a_token_none_is_sent() -> None:
    def check(request: httpx.Request) -> httpx.Response:
        assert "Authorization" not in request.headers
        return httpx.Response(200, json=[])

    client(check, token="").get("/targets")


def test_the_token_is_in_no_message_and_no_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with pytest.raises(RefusedError) as refused:
        answering(401, json={"title": "Unauthorized", "detail": "this token is unknown"}).register(
            RunnerHello(name="r", device_class="cpu")
        )
    assert "secret-token" not in str(refused.value) + caplog.text


def test_a_progress_or_reason_that_is_too_long_is_cut_to_what_the_wire_takes() -> None:
    bodies: list[bytes] = []

    def keep(request: httpx.Request) -> httpx.Response:
        bodies.append(request.content)
        return httpx.Response(200, json={})

    client(keep).renew(1, ATTEMPT, "x" * 1000)
    client(keep).fail(1, ATTEMPT, transient=True, reason="y" * 10_000)
    assert [len(body) < limit for body, limit in zip(bodies, (400, 4200), strict=True)] == [True, True]


def test_commits_are_told_with_their_branch() -> None:
    seen: list[httpx.Request] = []

    def keep(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, json={})

    told = Commit.model_validate({"sha": "a" * 40, "parents": [], "committed_at": "2026-01-05T08:00:00Z"})
    client(keep).post_commits("story", [told], head_of="main")
    assert b'"branch":"main"' in seen[0].content
    assert ("a" * 40).encode() in seen[0].content
