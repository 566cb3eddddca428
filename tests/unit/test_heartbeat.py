"""A lease is renewed for as long as a job is measured, and its loss reaches the one who measures."""

import json
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from uuid import UUID

import httpx
import pytest
from pydantic import SecretStr

from runners.client import Client
from runners.heartbeat import Heartbeat, LeaseLostError
from runners.story.story import story_target
from service.wire import LeasedJob

PATIENCE_SECONDS = 20.0
JOB = LeasedJob(
    id=3,
    attempt=UUID(int=5),
    kind="measure",
    target=story_target(Path("story")),
    commit="a" * 40,
    suite="demo",
    lease_seconds=0.03,
    lease_expires_at=datetime.now(UTC),
)


class Service:
    """Answers renewals with `status` and keeps them."""

    def __init__(self, status: Callable[[int], int]) -> None:
        self.bodies: list[dict[str, str]] = []
        self._status = status
        self._arrived = threading.Condition()

    def answer(self, request: httpx.Request) -> httpx.Response:
        """Keep one request."""
        assert request.url.path == "/api/v1/jobs/3/renew"
        with self._arrived:
            self.bodies.append(json.loads(request.content))
            self._arrived.notify_all()
            return httpx.Response(self._status(len(self.bodies)), json={})

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait until what has arrived is enough."""
        with self._arrived:
            assert self._arrived.wait_for(condition, PATIENCE_SECONDS)

    def client(self) -> Client:
        """A client of this service."""
        return Client("http://service.test", SecretStr("t"), transport=httpx.MockTransport(self.answer))


def test_a_lease_is_renewed_again_and_again_with_the_latest_progress() -> None:
    service = Service(lambda _count: 200)
    with Heartbeat(service.client(), JOB) as heartbeat:
        heartbeat.report("case 3 of 7")
        service.wait_for(lambda: any(body["progress"] == "case 3 of 7" for body in service.bodies[1:]))
    assert {body["attempt"] for body in service.bodies} == {str(JOB.attempt)}
    assert not any(thread.name == "heartbeat-3" for thread in threading.enumerate())


@pytest.mark.parametrize("status", [404, 409, 410])
def test_a_lost_lease_breaks_off_the_measurement_at_its_next_report(status: int) -> None:
    service = Service(lambda _count: status)
    with Heartbeat(service.client(), JOB) as heartbeat:
        service.wait_for(lambda: bool(service.bodies))
        with pytest.raises(LeaseLostError, match="job 3"):
            for _ in iter(lambda: heartbeat.report("case"), object()):
                pass
    assert len(service.bodies) == 1


def test_a_service_that_is_away_for_a_while_is_no_loss() -> None:
    service = Service(lambda count: 503 if count < 3 else 200)
    with Heartbeat(service.client(), JOB) as heartbeat:
        service.wait_for(lambda: len(service.bodies) >= 5)
        heartbeat.report("goes on")


def test_an_error_of_the_measurement_ends_the_thread_too() -> None:
    service = Service(lambda _count: 200)
    with pytest.raises(RuntimeError, match="broken"), Heartbeat(service.client(), JOB):
        raise RuntimeError("broken")
    assert not any(thread.name == "heartbeat-3" for thread in threading.enumerate())
