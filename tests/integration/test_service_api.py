"""The REST API over HTTP, on both engines: what it stores, what it answers, whom it refuses."""

import asyncio
import http.client
import json
import re
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import pytest
from httpx import Client, Response
from sqlalchemy import func, select

from service.app import create_app
from service.auth import create_token
from service.db import SessionFactory
from service.errors import Invalid, SchemaBehind
from service.ingest import register_commits, register_target
from service.judge import judge_pending
from service.models import Commit, Job, Run, Runner, Target
from service.settings import Settings

API = "/api/v1"
JSON = {"Content-Type": "application/json"}
Headers = dict[str, dict[str, str]]
RunningService = Callable[[Settings], AbstractContextManager[Client]]


@pytest.fixture(autouse=True)
def _demo(session_factory: SessionFactory, payloads: SimpleNamespace) -> None:
    with session_factory.begin() as session:
        register_target(session, payloads.target(), registered_by="test")
        register_target(session, payloads.target("other"), registered_by="test")
        names = {"a": [], "b": ["a"]}
        commits = [payloads.commit(name, parents) for name, parents in names.items()]
        register_commits(session, "demo", commits, branch="main", head=payloads.sha("b"))


@pytest.fixture
def post(client: Client, headers: Headers) -> Callable[..., Response]:
    """Post a JSON body to a route with a token of a scope."""

    def post(path: str, body: Any, scope: str = "ci") -> Response:
        content = body if isinstance(body, str | bytes) else json.dumps(body)
        return client.post(API + path, content=content, headers=headers[scope] | {"Content-Type": "application/json"})

    return post


@pytest.fixture
def get(client: Client, headers: Headers) -> Callable[..., Response]:
    """Get a route with a token of a scope."""
    return lambda path, scope="read": client.get(API + path, headers=headers[scope])


def _problem(answer: Response) -> dict[str, Any]:
    assert answer.headers["content-type"] == "application/problem+json"
    document: dict[str, Any] = answer.json()
    assert document["status"] == answer.status_code
    assert {"type", "title", "detail"} <= set(document)
    return document


def _fields(answer: Response) -> list[str]:
    return [error["field"] for error in _problem(answer)["errors"]]


def _runs(session_factory: SessionFactory) -> int:
    with session_factory() as session:
        return session.scalar(select(func.count()).select_from(Run)) or 0


# --- Results ----------------------------------------------------------------------------------------------------------


def test_a_posted_result_is_judged_and_can_be_read_back(
    post: Callable[..., Response], get: Callable[..., Response], payloads: SimpleNamespace
) -> None:
    for name, parents in (("a", []), ("b", ["a"])):
        answer = post("/results", payloads.result(payloads.commit(name, parents)).model_dump_json())
        assert (answer.status_code, answer.json()["created"]) == (201, True)
    verdict = get(f"/targets/demo/commits/{payloads.sha('b')}/verdict?wait=30").json()
    assert (verdict["state"], verdict["baseline_sha"]) == ("pass", payloads.sha("a"))
    rows = get(f"/targets/demo/commits/{payloads.sha('b')[:8]}/measurements").json()["items"]
    assert rows[0]["samples"]["step_peak_bytes"] == [2097152.0, 2097152.0]
    case_id = rows[0]["case_id"]
    series = get(f"/targets/demo/series/fused/{case_id}/step_peak_bytes").json()
    assert [point["sha"] for point in series["points"]] == [payloads.sha("a"), payloads.sha("b")]
    assert [row["case_id"] for row in get("/targets/demo/series").json()["items"]] == [case_id]


def test_a_regression_is_a_finding(
    post: Callable[..., Response], get: Callable[..., Response], payloads: SimpleNamespace
) -> None:
    worse = payloads.measurement(values={**payloads.values, "step_peak_bytes": [4194304.0, 4194304.0]})
    post("/results", payloads.result(payloads.commit("a")).model_dump_json())
    post("/results", payloads.result(payloads.commit("b", ["a"]), [worse]).model_dump_json())
    verdict = get(f"/targets/demo/commits/{payloads.sha('b')}/verdict?wait=30").json()
    assert verdict["state"] == "regress"
    (found,) = get("/findings?target=demo&state=open").json()["items"]
    assert (found["family"], found["culprit_sha"]) == ("memory", payloads.sha("b"))
    assert get(f"/findings/{found['id']}").json() == found
    against_itself = get(f"/targets/demo/commits/{payloads.sha('b')}/verdict?base={payloads.sha('b')}").json()
    assert against_itself["state"] == "pass"


def test_a_repeated_post_gets_the_same_answer_and_another_body_409(
    post: Callable[..., Response], payloads: SimpleNamespace, session_factory: SessionFactory
) -> None:
    body = payloads.result(payloads.commit("a")).model_dump_json()
    first, again = post("/results", body), post("/results", body)
    assert (first.status_code, again.status_code) == (201, 200)
    assert first.json()["run_id"] == again.json()["run_id"]
    other = post("/results", body.replace("demo", "demo", 1) + " ")
    assert other.status_code == 409
    assert _fields(other) == ["body.attempt"]
    assert _runs(session_factory) == 1


@pytest.mark.parametrize(
    ("part", "nonsense"),
    [('"g_rel_l2_lp":[3.1e-8]', '"g_rel_l2_lp":[NaN]'), ('"operations":[24.0]', '"operations":[-24.0]')],
)
def test_nonsense_is_refused_and_nothing_of_its_body_stored(
    part: str,
    nonsense: str,
    post: Callable[..., Response],
    payloads: SimpleNamespace,
    session_factory: SessionFactory,
) -> None:
    body = payloads.result(payloads.commit("c")).model_dump_json()
    assert part in body
    answer = post("/results", body.replace(part, nonsense))
    assert answer.status_code == 422
    assert _fields(answer)[0].startswith("body.measurements[0].values")
    with session_factory() as session:
        assert session.scalars(select(Commit.id).where(Commit.sha == payloads.sha("c"))).all() == []
    assert _runs(session_factory) == 0


def test_what_is_no_result_at_all_is_refused(post: Callable[..., Response]) -> None:
    for body in (b"", b"{", b"[]", b"null", b'"\xed\xa0\x80"', b"[" * 10_000):
        answer = post("/results", body)
        assert (answer.status_code, _fields(answer)) == (422, ["body"])


def test_an_unknown_target_is_404(post: Callable[..., Response], payloads: SimpleNamespace) -> None:
    answer = post("/results", payloads.result(payloads.commit("a"), target="nowhere").model_dump_json())
    assert answer.status_code == 404
    assert "nowhere" in _problem(answer)["detail"]


def test_many_errors_are_cut_short(post: Callable[..., Response], payloads: SimpleNamespace) -> None:
    payload = payloads.result(payloads.commit("a")).model_dump(mode="json")
    payload["measurements"][0]["notes"] = {f"{number}{'x' * 10_000}": "" for number in range(50)}
    answer = post("/results", payload)
    assert len(_fields(answer)) == 20
    assert "30 more" in _problem(answer)["detail"]
    assert len(answer.content) < 20_000


# --- Limits -----------------------------------------------------------------------------------------------------------


def test_a_body_that_says_it_is_too_large_is_refused_unread(client: Client) -> None:
    connection = http.client.HTTPConnection(client.base_url.host, client.base_url.port or 0, timeout=30)
    connection.putrequest("POST", f"{API}/results")
    connection.putheader("Content-Length", str(100 << 20))
    connection.endheaders()
    answer = connection.getresponse()
    assert (answer.status, answer.headers["Content-Type"]) == (413, "application/problem+json")
    assert "1048576 bytes" in json.loads(answer.read())["detail"]
    connection.close()


def test_a_body_that_grows_too_large_is_refused_while_it_streams(
    client: Client, headers: Headers, session_factory: SessionFactory
) -> None:
    for path, bytes_max in (("/results", 1 << 20), ("/jobs", 1 << 16)):
        chunks = (b" " * (1 << 18) for _ in range(5))
        answer = client.post(API + path, content=chunks, headers=headers["ci"] | JSON)
        assert answer.status_code == 413
        assert f"{bytes_max} bytes" in _problem(answer)["detail"]
    assert _runs(session_factory) == 0


BODY_ROUTES = {
    ("POST", "/targets"): 1 << 20,
    ("PUT", "/targets/demo"): 1 << 20,
    ("POST", "/commits"): 8 << 20,
    ("POST", "/results"): 16 << 20,
    ("POST", "/jobs"): 1 << 16,
    ("POST", "/jobs/claim"): 1 << 16,
    ("POST", "/jobs/1/renew"): 1 << 16,
    ("POST", "/jobs/1/finish"): 1 << 16,
    ("POST", "/jobs/1/fail"): 1 << 16,
    ("POST", "/findings/1/acknowledge"): 1 << 16,
    ("POST", "/findings/1/accept"): 1 << 16,
    ("POST", "/findings/1/dismiss"): 1 << 16,
    ("POST", "/findings/1/reopen"): 1 << 16,
    ("POST", "/runners"): 1 << 16,
    ("POST", "/tokens"): 1 << 16,
}


def _promise(client: Client, method: str, path: str, headers: dict[str, str]) -> int:
    """The status of a request whose body is announced and never sent."""
    connection = http.client.HTTPConnection(client.base_url.host, client.base_url.port or 0, timeout=5)
    connection.putrequest(method, API + path)
    for name, value in headers.items():
        connection.putheader(name, value)
    connection.endheaders()
    status = connection.getresponse().status
    connection.close()
    return status


@pytest.mark.parametrize(("method", "path"), BODY_ROUTES)
def test_no_byte_of_a_body_is_read_before_its_sender_is_known(
    method: str, path: str, client: Client, headers: Headers
) -> None:
    promised = JSON | {"Content-Length": "1000"}
    assert _promise(client, method, path, promised) == 401
    assert _promise(client, method, path, promised | {"Authorization": "Bearer ulpw_wrong"}) == 401
    assert _promise(client, method, path, promised | headers["read"]) == 403


@pytest.mark.parametrize(("method", "path"), BODY_ROUTES)
def test_each_route_has_its_own_limit_and_takes_json_alone(
    method: str, path: str, settings: Settings, running_service: RunningService, headers: Headers
) -> None:
    bytes_max = BODY_ROUTES[method, path]
    with running_service(settings.model_copy(update={"body_bytes_max": 16 << 20})) as client:
        promised = headers["admin"] | JSON | {"Content-Length": str(bytes_max + 1)}
        assert _promise(client, method, path, promised) == 413
        for kind in ({}, {"Content-Type": "text/plain"}, {"Content-Type": "application/x-www-form-urlencoded"}):
            answer = client.request(method, API + path, content=b"{}", headers=headers["admin"] | kind)
            assert (answer.status_code, _problem(answer)["title"]) == (415, "Unsupported media type")
        spelled = {"Content-Type": "Application/JSON; charset=utf-8"}
        assert client.request(method, API + path, content=b"[]", headers=headers["admin"] | spelled).status_code == 422


def test_no_route_with_a_body_is_left_out_of_the_table_of_limits() -> None:
    paths = create_app(Settings(database_url="sqlite:///unused")).openapi()["paths"]
    served = {
        (method.upper(), path.removeprefix(API))
        for path, methods in paths.items()
        for method, operation in methods.items()
        if "requestBody" in operation
    }
    blank = {(method, re.sub(r"\{.*?\}", "1", path)) for method, path in served}
    assert blank == {(method, path.replace("demo", "1")) for method, path in BODY_ROUTES}


def test_other_requests_are_answered_while_a_body_is_parsed(
    client: Client, headers: Headers, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsing, answered = threading.Event(), threading.Event()

    def slow(*_: object) -> None:
        parsing.set()
        assert answered.wait(30)
        raise Invalid("slow")

    monkeypatch.setattr("service.api.bodies.parse", slow)
    statuses: list[int] = []
    body = json.dumps({"target": "demo", "commits": []})
    sender = threading.Thread(
        target=lambda: statuses.append(
            client.post(f"{API}/commits", content=body, headers=headers["ci"] | JSON).status_code
        )
    )
    sender.start()
    assert parsing.wait(30)
    assert client.get(f"{API}/health").status_code == 200
    answered.set()
    sender.join()
    assert statuses == [422]


def test_every_answer_carries_the_security_headers(client: Client) -> None:
    for answer in (client.get(f"{API}/health"), client.get(f"{API}/nowhere"), client.get(f"{API}/targets")):
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "default-src 'none'" in answer.headers["content-security-policy"]


# --- Problems ---------------------------------------------------------------------------------------------------------


def test_unknown_addresses_and_methods_are_problems(client: Client) -> None:
    assert _problem(client.get(f"{API}/nowhere"))["status"] == 404
    answer = client.delete(f"{API}/results")
    assert _problem(answer)["status"] == 405
    assert answer.headers["allow"] == "POST"


def test_what_cannot_be_read_is_a_problem(get: Callable[..., Response]) -> None:
    statuses = {
        "/targets/nowhere": 404,
        "/targets/nowhere/commits": 404,
        "/targets/demo/commits/abcdef1": 404,
        "/targets/demo/commits/HEAD": 422,
        "/targets/demo/commits/abc": 422,
        f"/targets/demo/commits?cursor={'0' * 40}": 404,
        "/targets/demo/commits?limit=0": 422,
        "/targets/demo/series/fused/n1/speed": 404,
        "/findings/1": 404,
        "/findings/99999999999999999999": 422,
        "/findings?target=nowhere": 404,
        "/findings?state=lost": 422,
        "/targets/%00/commits": 422,
        "/targets/demo/series/%00/n1/operations": 422,
        "/targets/demo/series/fused/%00/operations": 422,
    }
    assert {path: _problem(get(path))["status"] for path in statuses} == statuses


def test_an_unexpected_failure_says_nothing_of_its_insides(
    client: Client, headers: Headers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_session: object) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr("service.queries.targets", fail)
    answer = client.get(f"{API}/targets", headers=headers["read"])
    assert answer.status_code == 500
    assert _problem(answer)["type"] == "urn:ulpwatch:problem:internal"
    assert "secret" not in answer.text


# --- Tokens and scopes ------------------------------------------------------------------------------------------------

READERS = {"read", "ci", "admin"}
ROUTES = [
    ("GET", "/targets", READERS),
    ("GET", "/targets/demo", READERS),
    ("GET", "/targets/demo/commits", READERS),
    ("GET", "/targets/demo/commits/1", READERS),
    ("GET", "/targets/demo/commits/1/measurements", READERS),
    ("GET", "/targets/demo/commits/1/verdict", READERS),
    ("GET", "/targets/demo/series", READERS),
    ("GET", "/targets/demo/series/x/x/x", READERS),
    ("GET", "/findings", READERS),
    ("GET", "/findings/1", READERS),
    ("POST", "/findings/1/acknowledge", {"admin"}),
    ("POST", "/findings/1/accept", {"admin"}),
    ("POST", "/findings/1/dismiss", {"admin"}),
    ("POST", "/findings/1/reopen", {"admin"}),
    ("GET", "/runners", READERS),
    ("GET", "/jobs", READERS),
    ("GET", "/tokens", {"admin"}),
    ("POST", "/tokens", {"admin"}),
    ("DELETE", "/tokens/1", {"admin"}),
    ("POST", "/targets", {"admin"}),
    ("PUT", "/targets/demo", {"admin"}),
    ("POST", "/commits", {"ci", "admin"}),
    ("POST", "/jobs", {"ci", "admin"}),
    ("POST", "/results", {"ci", "runner", "admin"}),
    ("POST", "/runners", {"runner", "admin"}),
    ("POST", "/jobs/claim", {"runner", "admin"}),
    ("POST", "/jobs/1/renew", {"runner", "admin"}),
    ("POST", "/jobs/1/finish", {"runner", "admin"}),
    ("POST", "/jobs/1/fail", {"runner", "admin"}),
]


def test_each_route_takes_the_scopes_it_says_and_no_other(client: Client, headers: Headers) -> None:
    for method, path, allowed in ROUTES:
        for scope, bearer in headers.items():
            status = client.request(method, API + path, headers=bearer).status_code
            assert (status not in {401, 403}) == (scope in allowed), (method, path, scope, status)
        assert client.request(method, API + path).status_code == 401
        wrong = client.request(method, API + path, headers={"Authorization": "Bearer ulpw_wrong"})
        assert wrong.status_code == 401
        assert wrong.headers["www-authenticate"].startswith("Bearer")


def test_no_route_is_left_out_of_the_table_of_scopes() -> None:
    served = {
        (method.upper(), path.removeprefix(API))
        for path, methods in create_app(Settings(database_url="sqlite:///unused")).openapi()["paths"].items()
        for method in methods
    }
    unlisted = {("GET", "/health"), ("GET", "/ready")}
    assert {(method, re.sub(r"\{.*?\}", "1", path)) for method, path in served - unlisted} == {
        (method, re.sub(r"/demo|/1\b|/x", "/1", path)) for method, path, _ in ROUTES
    }


def test_anyone_may_read_where_the_settings_say_so(settings: Settings, running_service: RunningService) -> None:
    with running_service(settings.model_copy(update={"public_read": True})) as client:
        assert client.get(f"{API}/targets").status_code == 200
        assert client.post(f"{API}/jobs", json={}).status_code in {401, 422}
        body = {"target": "demo", "commit": "a" * 40}
        assert client.post(f"{API}/jobs", json=body).status_code == 401
        assert client.post(f"{API}/results", content=b"{}").status_code == 401


def test_a_targets_token_is_good_for_that_target_alone(
    client: Client, session_factory: SessionFactory, payloads: SimpleNamespace
) -> None:
    with session_factory.begin() as session:
        secret = create_token(session, "ci", target="other").secret
    bearer = {"Authorization": f"Bearer {secret}"}
    sha = payloads.sha("a")
    for path in ("/targets/demo", f"/targets/demo/commits/{sha}/verdict", "/findings?target=demo", "/jobs?target=demo"):
        assert client.get(API + path, headers=bearer).status_code == 403
    result = payloads.result(payloads.commit("a"))
    for path, body in (
        ("/results", result.model_dump_json()),
        ("/jobs", json.dumps({"target": "demo", "commit": sha})),
        ("/commits", json.dumps({"target": "demo", "commits": []})),
    ):
        answer = client.post(API + path, content=body, headers=bearer | {"Content-Type": "application/json"})
        assert answer.status_code == 403, path
    assert [row["name"] for row in client.get(f"{API}/targets", headers=bearer).json()["items"]] == ["other"]
    assert client.get(f"{API}/findings", headers=bearer).json()["items"] == []
    assert _runs(session_factory) == 0


def test_a_token_is_shown_once_and_dies_when_revoked(
    client: Client, headers: Headers, post: Callable[..., Response], get: Callable[..., Response]
) -> None:
    made = post("/tokens", {"scope": "read", "label": "dashboard"}, "admin").json()
    bearer = {"Authorization": f"Bearer {made['secret']}"}
    assert made["secret"].startswith("ulpw_")
    assert client.get(f"{API}/targets", headers=bearer).status_code == 200
    listing = get("/tokens", "admin")
    assert made["secret"] not in listing.text
    assert "dashboard" in listing.text
    assert client.delete(f"{API}/tokens/{made['id']}", headers=headers["admin"]).status_code == 204
    assert client.get(f"{API}/targets", headers=bearer).status_code == 401


def test_an_expired_token_is_none(post: Callable[..., Response], client: Client) -> None:
    made = post("/tokens", {"scope": "read", "expires_at": "2020-01-01T00:00:00Z"}, "admin").json()
    answer = client.get(f"{API}/targets", headers={"Authorization": f"Bearer {made['secret']}"})
    assert answer.status_code == 401


# --- Targets, commits, jobs -------------------------------------------------------------------------------------------


def test_a_target_is_registered_and_read_back(
    client: Client, headers: Headers, get: Callable[..., Response], payloads: SimpleNamespace
) -> None:
    target = payloads.target("third")
    for created in (True, False):
        answer = client.put(f"{API}/targets/third", content=target.model_dump_json(), headers=headers["admin"] | JSON)
        assert answer.json() == {"name": "third", "version": 1, "created": created}
    assert get("/targets/third").json() == target.model_dump(mode="json")
    mismatch = client.put(f"{API}/targets/fourth", content=target.model_dump_json(), headers=headers["admin"] | JSON)
    assert _fields(mismatch) == ["body.name"]


def test_a_target_with_nan_is_refused_by_name(
    post: Callable[..., Response], payloads: SimpleNamespace, session_factory: SessionFactory
) -> None:
    body = payloads.target("third").model_dump(mode="json")
    body["kernels"][0]["absent"] = {"chunk_size": 0.5}
    for value in ("NaN", "1e999", "[-Infinity]"):
        answer = post("/targets", json.dumps(body).replace("0.5", value), "admin")
        assert (answer.status_code, _fields(answer)) == (422, ["body.kernels[0].absent.chunk_size"])
    with session_factory() as session:
        assert session.scalars(select(Target.id).where(Target.name == "third")).all() == []


def test_commits_are_posted_listed_and_paged(
    post: Callable[..., Response], get: Callable[..., Response], payloads: SimpleNamespace
) -> None:
    commits = [
        payloads.commit(name, [parent], minute=index) for index, (parent, name) in enumerate([("b", "c"), ("c", "d")])
    ]
    body = {
        "target": "demo",
        "branch": "main",
        "head": payloads.sha("d"),
        "commits": [commit.model_dump(mode="json") for commit in commits],
    }
    assert post("/commits", body).status_code == 204
    first = get("/targets/demo/commits?limit=3").json()
    rest = get(f"/targets/demo/commits?limit=3&cursor={first['next']}").json()
    shas = [row["sha"] for row in [*first["items"], *rest["items"]]]
    assert (shas, rest["next"]) == ([payloads.sha(name) for name in "dcba"], None)
    assert get(f"/targets/demo/commits/{payloads.sha('c')[:7]}").json()["parents"] == [payloads.sha("b")]


def test_a_head_that_is_no_known_commit_is_refused(post: Callable[..., Response], payloads: SimpleNamespace) -> None:
    body = {"target": "demo", "branch": "main", "head": payloads.sha("z"), "commits": []}
    assert _fields(post("/commits", body)) == ["body.head"]
    assert _fields(post("/commits", {"target": "demo", "branch": "main", "commits": []})) == ["body.head"]


def test_a_job_goes_through_the_hands_of_its_runner(
    post: Callable[..., Response], get: Callable[..., Response], payloads: SimpleNamespace
) -> None:
    sha = payloads.sha("a")
    assert post("/runners", {"name": "host", "device_class": "cpu"}, "runner").status_code == 204
    claim = {"runner": "host", "device_class": "cpu"}
    assert post("/jobs/claim", claim, "runner").json() is None
    made = post("/jobs", {"target": "demo", "commit": sha}).json()
    assert post("/jobs", {"target": "demo", "commit": sha}).json() == made | {"created": False}
    job = post("/jobs/claim", claim, "runner").json()
    assert (job["id"], job["commit"], job["suite"], job["target"]["name"]) == (made["id"], sha, "demo", "demo")
    beat = {"attempt": job["attempt"], "progress": "case 1 of 9"}
    assert "lease_expires_at" in post(f"/jobs/{job['id']}/renew", beat, "runner").json()
    (row,) = get("/jobs?target=demo&state=leased").json()["items"]
    assert (row["progress"], row["leased_by"]) == ("case 1 of 9", "host")
    assert [runner["working_on"] for runner in get("/runners").json()["items"]] == [job["id"]]
    finish = {"attempt": job["attempt"]}
    assert post(f"/jobs/{job['id']}/finish", finish, "runner").status_code == 409
    result = payloads.result(payloads.commit("a"), attempt=uuid.UUID(job["attempt"]), job=job["id"])
    assert post("/results", result.model_dump_json(), "runner").status_code == 201
    assert post(f"/jobs/{job['id']}/finish", finish, "runner").status_code == 204
    assert get("/jobs").json()["items"][0]["state"] == "done"
    assert post(f"/jobs/{job['id']}/renew", beat, "runner").status_code == 410


def test_a_job_of_a_runner_that_died_is_shown_as_queued_before_anyone_claims(
    settings: Settings,
    running_service: RunningService,
    headers: Headers,
    payloads: SimpleNamespace,
) -> None:
    with running_service(settings.model_copy(update={"lease_seconds": 0.2})) as client:

        def post(path: str, body: Any, scope: str) -> Any:
            return client.post(API + path, content=json.dumps(body), headers=headers[scope] | JSON)

        post("/runners", {"name": "host", "device_class": "cpu"}, "runner")
        post("/jobs", {"target": "demo", "commit": payloads.sha("a")}, "ci")
        job = post("/jobs/claim", {"runner": "host", "device_class": "cpu"}, "runner").json()
        post(f"/jobs/{job['id']}/renew", {"attempt": job["attempt"], "progress": "case 1 of 9"}, "runner")
        for _ in range(100):
            (row,) = client.get(f"{API}/jobs", headers=headers["read"]).json()["items"]
            if row["state"] != "leased":
                break
            time.sleep(0.05)
        assert (row["state"], row["progress"], "lease ran out" in row["failure"]) == ("queued", "", True)
        (runner,) = client.get(f"{API}/runners", headers=headers["read"]).json()["items"]
        assert runner["working_on"] is None


def test_a_job_that_is_given_back_was_not_tried(
    post: Callable[..., Response], get: Callable[..., Response], payloads: SimpleNamespace
) -> None:
    post("/runners", {"name": "host", "device_class": "cpu"}, "runner")
    post("/jobs", {"target": "demo", "commit": payloads.sha("a")})
    job = post("/jobs/claim", {"runner": "host", "device_class": "cpu"}, "runner").json()
    failure = {"attempt": job["attempt"], "transient": True, "reason": "stopped", "given_back": True}
    assert post(f"/jobs/{job['id']}/fail", failure, "runner").status_code == 204
    (row,) = get("/jobs").json()["items"]
    assert (row["state"], row["attempts_used"]) == ("queued", 0)


def test_a_failed_job_ends_the_wait_for_its_verdict(
    post: Callable[..., Response], get: Callable[..., Response], payloads: SimpleNamespace
) -> None:
    post("/runners", {"name": "host", "device_class": "cpu"}, "runner")
    post("/jobs", {"target": "demo", "commit": payloads.sha("a")})
    job = post("/jobs/claim", {"runner": "host", "device_class": "cpu"}, "runner").json()
    failure = {"attempt": job["attempt"], "transient": False, "reason": "no such object"}
    assert post(f"/jobs/{job['id']}/fail", failure, "runner").status_code == 204
    verdict = get(f"/targets/demo/commits/{payloads.sha('a')}/verdict?wait=200").json()
    assert (verdict["state"], "no such object" in verdict["reason"]) == ("missing", True)


def test_an_unknown_commit_has_a_missing_verdict(get: Callable[..., Response], payloads: SimpleNamespace) -> None:
    verdict = get(f"/targets/demo/commits/{payloads.sha('z')}/verdict?wait=0.3").json()
    assert (verdict["state"], "unknown" in verdict["reason"]) == ("missing", True)


def test_a_runner_token_posts_results_of_its_own_jobs_only(
    post: Callable[..., Response],
    client: Client,
    payloads: SimpleNamespace,
    session_factory: SessionFactory,
) -> None:
    post("/runners", {"name": "host", "device_class": "cpu"}, "runner")
    post("/jobs", {"target": "demo", "commit": payloads.sha("a")})
    job = post("/jobs/claim", {"runner": "host", "device_class": "cpu"}, "runner").json()
    attempt = uuid.UUID(job["attempt"])
    result = payloads.result(payloads.commit("a"), attempt=attempt, job=job["id"]).model_dump_json()
    with session_factory.begin() as session:
        thief = {"Authorization": f"Bearer {create_token(session, 'runner').secret}"} | JSON
    hello = json.dumps({"name": "host", "device_class": "cpu"})
    attempts = {
        "another runner's token": client.post(f"{API}/results", content=result, headers=thief),
        "another runner's name": client.post(f"{API}/runners", content=hello, headers=thief),
        "another runner's renewal": client.post(
            f"{API}/jobs/{job['id']}/renew", content=json.dumps({"attempt": job["attempt"]}), headers=thief
        ),
        "another runner's claim": client.post(
            f"{API}/jobs/claim", content=json.dumps({"runner": "host", "device_class": "cpu"}), headers=thief
        ),
        "no job": post("/results", payloads.result(payloads.commit("a")).model_dump_json(), "runner"),
        "another commit": post(
            "/results",
            payloads.result(payloads.commit("b"), attempt=attempt, job=job["id"]).model_dump_json(),
            "runner",
        ),
        "an attempt of its own": post(
            "/results", payloads.result(payloads.commit("a"), job=job["id"]).model_dump_json(), "runner"
        ),
        "a ci token with the job": post("/results", result, "ci"),
        "a ci token with the attempt": post(
            "/results", payloads.result(payloads.commit("a"), attempt=attempt).model_dump_json(), "ci"
        ),
    }
    statuses = {name: answer.status_code for name, answer in attempts.items()}
    assert statuses == dict.fromkeys(attempts, 403) | {"another runner's name": 409}
    assert _runs(session_factory) == 0
    assert post("/results", result, "runner").status_code == 201


def test_a_quarantined_result_is_marked(
    post: Callable[..., Response], payloads: SimpleNamespace, session_factory: SessionFactory
) -> None:
    post("/results?quarantined=true", payloads.result(payloads.commit("a")).model_dump_json())
    with session_factory() as session:
        run = session.scalars(select(Run)).one()
        assert (run.quarantined, run.posted_by.startswith("ci token")) == (True, True)


# --- The service itself -----------------------------------------------------------------------------------------------


def test_health_and_readiness_need_no_token(client: Client) -> None:
    assert client.get(f"{API}/health").json() == {"status": "ok"}
    assert client.get(f"{API}/ready").json() == {"status": "ok"}


def test_a_schema_that_is_behind_stops_the_start(blank_database_url: str) -> None:
    app = create_app(Settings(database_url=blank_database_url))

    async def start() -> None:
        async with app.router.lifespan_context(app):
            pass

    with pytest.raises(SchemaBehind, match="ulpwatch db upgrade"):
        asyncio.run(start())


def test_a_judge_that_fails_does_not_stop_the_service(
    settings: Settings,
    running_service: RunningService,
    monkeypatch: pytest.MonkeyPatch,
    payloads: SimpleNamespace,
    headers: Headers,
) -> None:
    calls: list[SessionFactory] = []

    def fail_once(factory: SessionFactory) -> int:
        calls.append(factory)
        if len(calls) == 1:
            raise RuntimeError("a bug")
        return judge_pending(factory)

    monkeypatch.setattr("service.app.judge_pending", fail_once)
    with running_service(settings) as client:
        body = payloads.result(payloads.commit("a")).model_dump_json()
        client.post(f"{API}/results", content=body, headers=headers["ci"] | JSON)
        path = f"{API}/targets/demo/commits/{payloads.sha('a')}/verdict?wait=30"
        assert client.get(path, headers=headers["read"]).json()["state"] == "no-baseline"


def test_a_runner_that_asks_for_work_is_seen(post: Callable[..., Response], session_factory: SessionFactory) -> None:
    post("/runners", {"name": "host", "device_class": "cpu"}, "runner")
    with session_factory() as session:
        before = session.scalars(select(Runner.last_seen_at)).one()
    post("/jobs/claim", {"runner": "host", "device_class": "cpu"}, "runner")
    with session_factory() as session:
        assert session.scalars(select(Runner.last_seen_at)).one() > before
        assert session.scalars(select(Job.id)).all() == []
