"""What people decide about findings, over HTTP: who may, what they are told, and that the verdict follows."""

import json
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from httpx import Client, Response
from sqlalchemy import select

from service.auth import create_token
from service.db import SessionFactory
from service.ingest import ingest, register_commits, register_target
from service.judge import judge_pending
from service.models import Finding

API = "/api/v1"
Headers = dict[str, dict[str, str]]


@pytest.fixture
def finding_id(session_factory: SessionFactory, payloads: SimpleNamespace) -> int:
    """An open regression of commit b."""
    worse = payloads.measurement(values={**payloads.values, "step_peak_bytes": [4194304.0, 4194304.0]})
    with session_factory.begin() as session:
        register_target(session, payloads.target(), registered_by="test")
        register_target(session, payloads.target("other"), registered_by="test")
        register_commits(session, "demo", [payloads.commit("a"), payloads.commit("b", ["a"])])
        for name, parents, rows in (("a", [], None), ("b", ["a"], [worse])):
            result = payloads.result(payloads.commit(name, parents), rows)
            ingest(session, result, body_digest=name * 64, posted_by="test")
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:  # the service's own judge may have the target in hand
        judge_pending(session_factory)
        with session_factory() as session:
            if (found := session.scalars(select(Finding.id)).first()) is not None:
                return found
    raise AssertionError("the regression was not found")


@pytest.fixture
def decide(client: Client, headers: Headers, finding_id: int) -> Callable[..., Response]:
    def decide(action: str, body: Any, token: dict[str, str] | None = None, finding: int = finding_id) -> Response:
        sent = (token or headers["admin"]) | {"Content-Type": "application/json"}
        return client.post(f"{API}/findings/{finding}/{action}", content=json.dumps(body), headers=sent)

    return decide


def test_a_regression_is_accepted_with_who_and_why(
    decide: Callable[..., Response], client: Client, headers: Headers, payloads: SimpleNamespace
) -> None:
    answer = decide("accept", {"reason": "the new kernel needs it", "seen": "open"})
    assert (answer.status_code, answer.json()["state"]) == (200, "accepted")
    event = answer.json()["events"][-1]
    assert (event["action"], event["reason"]) == ("accepted", "the new kernel needs it")
    assert event["actor"].startswith("admin")
    path = f"{API}/targets/demo/commits/{payloads.sha('b')}/verdict?wait=30"
    verdict = client.get(path, headers=headers["read"]).json()
    assert verdict["state"] == "pass"
    assert "accepted: peak memory" in verdict["reason"]


@pytest.mark.parametrize("scope", ["read", "ci", "runner"])
def test_only_an_administrator_decides(decide: Callable[..., Response], headers: Headers, scope: str) -> None:
    assert decide("accept", {"reason": "why"}, headers[scope]).status_code == 403


def test_an_administrator_of_another_target_does_not(
    decide: Callable[..., Response], session_factory: SessionFactory
) -> None:
    with session_factory.begin() as session:
        other = create_token(session, "admin", target="other").secret
    assert decide("dismiss", {"reason": "why"}, {"Authorization": f"Bearer {other}"}).status_code == 403


@pytest.mark.parametrize(
    ("action", "body", "status"),
    [
        ("accept", {}, 422),
        ("accept", {"reason": ""}, 422),
        ("accept", {"reason": "why", "until": "2999-01-01T00:00:00Z"}, 422),
        ("dismiss", {"reason": "why", "until": "2001-01-01T00:00:00Z"}, 422),
        ("accept", {"reason": "why", "seen": "acknowledged"}, 409),
        ("reopen", {"reason": "why"}, 409),
        ("forget", {"reason": "why"}, 404),
    ],
)
def test_a_decision_that_makes_no_sense_changes_nothing(
    decide: Callable[..., Response],
    client: Client,
    headers: Headers,
    finding_id: int,
    action: str,
    body: Any,
    status: int,
) -> None:
    assert decide(action, body).status_code == status
    assert client.get(f"{API}/findings/{finding_id}", headers=headers["read"]).json()["state"] == "open"


def test_a_finding_that_is_unknown_is_said_so(decide: Callable[..., Response]) -> None:
    assert decide("accept", {"reason": "why"}, finding=999_999).status_code == 404
