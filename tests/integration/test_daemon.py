"""The daemon against a live service: whatever dies when, each job's result is stored once."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
import uvicorn
from pydantic import SecretStr

from runners import daemon
from runners.checkout import CheckoutError, UnreachableError
from runners.client import Client, ServiceUnreachableError
from runners.job import PlanError
from runners.keeper import descendants
from runners.process import Isolation
from runners.settings import RunnerSettings
from runners.spool import Spool, SpoolBusyError
from runners.story.story import story_target, write_story
from runners.suites import suite
from service.app import create_app
from service.auth import create_token, revoke_token, tokens
from service.db import SessionFactory
from service.settings import Settings
from service.wire import Commit, JobRequest, Result

PATIENCE_SECONDS = 60.0
TARGET = "demo"
Measure = Callable[..., Result]


class Service:
    """The real app behind uvicorn, in a thread; it can be stopped and started again on the same port."""

    def __init__(self, database_url: str, **settings: Any) -> None:
        self._settings = Settings(database_url=database_url, judge_interval_seconds=0.05, **settings)
        with closing(socket.create_server(("127.0.0.1", 0))) as probe:
            self._port = int(probe.getsockname()[1])
        self.url = f"http://127.0.0.1:{self._port}"
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Serve; returns when it answers."""
        config = uvicorn.Config(create_app(self._settings), port=self._port, log_level="warning", ws="none")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run)
        self._thread.start()
        wait_until(lambda: self.answers)

    @property
    def answers(self) -> bool:
        """Whether it is there."""
        return self._server is not None and self._server.started

    def stop(self) -> None:
        """Go away in an orderly manner, if it is there."""
        if self._server is not None and self._thread is not None:
            self._server.should_exit = True
            self._thread.join()
        self._server = None


class World:
    """A live service, one runner of it, and an administrator who asks for commits and looks at what came of them."""

    def __init__(self, service: Service, settings: RunnerSettings, admin: Client, payloads: SimpleNamespace) -> None:
        self.service, self.settings, self.admin, self.payloads = service, settings, admin, payloads

    def ask(self, *names: str) -> None:
        """Enqueue a job for each commit, oldest first."""
        for name, parent in zip(names, (None, *names), strict=False):
            commit = self.payloads.commit(name, [parent] if parent else [])
            self.admin.post_commits(TARGET, [commit], head_of="main")
            self.admin.enqueue(JobRequest(target=TARGET, commit=commit.sha))

    def jobs(self) -> list[dict[str, Any]]:
        """All jobs, oldest first."""
        return sorted(self.admin.get("/jobs")["items"], key=lambda job: int(job["id"]))

    def states(self) -> list[str]:
        """The jobs' states, oldest first."""
        return [job["state"] for job in self.jobs()]

    def runs(self, name: str) -> int:
        """How many results of a commit are stored."""
        rows = self.admin.get(f"/targets/{TARGET}/commits/{self.payloads.sha(name)}/measurements")["items"]
        return len({row["attempt"] for row in rows})

    def result(self, of: str, **options: Any) -> Result:
        """A healthy result, as measure_commit would give it."""
        commit: Commit = self.payloads.commit(of)
        made: Result = self.payloads.result(commit, attempt=options["attempt"], job=options["job_id"])
        return made

    def spooled(self) -> list[str]:
        """Names of the results that wait on disk."""
        return sorted(path.stem for path in self.settings.spool.glob("*.json"))


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for something that another thread or process does."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


@pytest.fixture
def world(
    database_url: str, session_factory: SessionFactory, tmp_path: Path, payloads: SimpleNamespace
) -> Iterator[World]:
    """A service with the target `demo`, and a runner's settings."""
    with session_factory.begin() as session:
        admin_token, runner_token = (create_token(session, scope).secret for scope in ("admin", "runner"))
    service = Service(database_url, lease_seconds=1.0)
    service.start()
    settings = RunnerSettings(
        url=service.url,
        token=SecretStr(runner_token),
        name="box",
        spool=tmp_path / "spool",
        cache=tmp_path / "cache",
        poll_seconds=0.01,
        retry_seconds_max=0.05,
    )
    with Client(service.url, SecretStr(admin_token)) as admin:
        admin.register_target(payloads.target(TARGET))
        yield World(service, settings, admin, payloads)
    service.stop()


@pytest.fixture
def measuring(monkeypatch: pytest.MonkeyPatch) -> Callable[[Measure], None]:
    """Replaces what measures: measure_commit is the boundary to the measured processes."""
    return lambda measure: monkeypatch.setattr(daemon, "measure_commit", measure)


def healthy(world: World, *names: str) -> Measure:
    """Measures each of these commits as healthy."""
    by_sha = {world.payloads.sha(name): name for name in names}
    return lambda _target, _repository, sha, **options: world.result(by_sha[sha], **options)


def test_a_job_is_measured_posted_and_ended(world: World, measuring: Callable[[Measure], None]) -> None:
    world.ask("a")
    measuring(healthy(world, "a"))
    assert daemon.run(world.settings, once=True) == 0
    (job,) = world.jobs()
    assert (job["state"], job["attempts_used"], job["leased_by"]) == ("done", 1, "box")
    assert world.runs("a") == 1
    assert world.spooled() == []
    assert world.admin.verdict(TARGET, world.payloads.sha("a"), wait=30)["state"] == "no-baseline"


def test_what_is_measured_is_what_the_job_says(world: World, measuring: Callable[[Measure], None]) -> None:
    asked: list[Any] = []

    def measure(target: Any, repository: Any, sha: str, **options: Any) -> Result:
        asked.append((target, repository, sha, options["suite"], options["job_id"], options["limits"].case_seconds))
        return world.result("a", **options)

    world.ask("a")
    measuring(measure)
    daemon.run(world.settings.model_copy(update={"case_seconds": 7.0}), once=True)
    target = world.payloads.target(TARGET)
    assert asked == [(target, target.repository, world.payloads.sha("a"), "demo", world.jobs()[0]["id"], 7.0)]


def test_a_runner_on_a_host_without_namespaces_says_so(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(daemon, "isolation", lambda: Isolation(False, "none: unshare: not permitted"))
    assert daemon.run(world.settings, once=True) == 0
    assert caplog.text.count("measured processes are not isolated (none: unshare: not permitted)") == 1


def test_once_without_a_job_ends_at_once(world: World) -> None:
    assert daemon.run(world.settings, once=True) == 0
    assert [runner["name"] for runner in world.admin.get("/runners")["items"]] == ["box"]


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (CheckoutError("there is no commit abc"), "failed"),
        (PlanError("target 'demo' cannot be measured"), "failed"),
        (UnreachableError("the remote does not answer"), "queued"),
        (RuntimeError("the disk is full"), "queued"),
    ],
)
def test_a_job_that_cannot_be_measured_is_given_up_with_its_reason(
    world: World, measuring: Callable[[Measure], None], error: Exception, state: str
) -> None:
    def measure(*_arguments: Any, **_options: Any) -> Result:
        raise error

    world.ask("a")
    measuring(measure)
    assert daemon.run(world.settings, once=True) == 0
    (job,) = world.jobs()
    assert job["state"] == state
    assert str(error) in job["failure"]
    assert world.runs("a") == 0


def test_a_job_that_keeps_failing_is_tried_only_so_often(world: World, measuring: Callable[[Measure], None]) -> None:
    def measure(*_arguments: Any, **_options: Any) -> Result:
        raise RuntimeError("the disk is full")

    world.ask("a")
    measuring(measure)
    for _ in range(4):
        daemon.run(world.settings, once=True)
    assert [(job["state"], job["attempts_used"]) for job in world.jobs()] == [("failed", 3)]


def test_a_result_that_was_spooled_before_a_crash_is_posted_by_the_next_life(
    world: World, measuring: Callable[[Measure], None]
) -> None:
    world.ask("a")
    measuring(healthy(world, "a"))
    with Spool(world.settings.spool) as spool, Client(world.settings.url, world.settings.token) as client:
        first_life = daemon.Daemon(world.settings, client, spool, daemon.Stop())
        daemon._hello(first_life)
        job = daemon._claim(first_life)
        assert job is not None
        daemon.do_job(first_life, job)
    assert world.spooled() == [str(job.attempt)]
    assert (world.states(), world.runs("a")) == (["leased"], 0)

    assert daemon.run(world.settings, once=True) == 0
    (row,) = world.jobs()
    assert (row["state"], row["attempts_used"]) == ("done", 1)
    assert (world.runs("a"), world.spooled()) == (1, [])


def test_a_result_whose_receipt_was_lost_is_posted_again_and_stored_once(
    world: World, measuring: Callable[[Measure], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    world.ask("a")
    measuring(healthy(world, "a"))
    post = Client.post_result
    losses = iter([True])

    def lose_the_first_receipt(self: Client, body: bytes) -> None:
        post(self, body)
        if next(losses, False):
            raise ServiceUnreachableError("the connection broke")

    monkeypatch.setattr(Client, "post_result", lose_the_first_receipt)
    with Spool(world.settings.spool) as spool, Client(world.settings.url, world.settings.token) as client:
        life = daemon.Daemon(world.settings, client, spool, daemon.Stop())
        daemon._hello(life)
        job = daemon._claim(life)
        assert job is not None
        daemon.do_job(life, job)
        with pytest.raises(ServiceUnreachableError):
            daemon.flush(life)
        daemon.flush(life)
    assert (world.states(), world.runs("a"), world.spooled()) == (["done"], 1, [])


def test_a_service_that_restarts_during_a_measurement_gets_the_result(
    world: World, measuring: Callable[[Measure], None]
) -> None:
    def measure(_target: Any, _repository: Any, _sha: str, **options: Any) -> Result:
        world.service.stop()
        threading.Timer(0.2, world.service.start).start()
        return world.result("a", **options)

    world.ask("a", "b")
    stop_after_one_job(measuring, world, measure)
    assert daemon.run(world.settings) == 0
    wait_until(lambda: world.service.answers)
    assert daemon.run(world.settings, once=True) == 0
    assert (world.states()[0], world.runs("a"), world.spooled()) == ("done", 1, [])


def stop_after_one_job(measuring: Callable[[Measure], None], world: World, measure: Measure) -> None:
    """SIGTERM arrives while the first job is measured; later jobs are healthy."""
    jobs = iter([measure])

    def measured(*arguments: Any, **options: Any) -> Result:
        first = next(jobs, None)
        if first is None:
            return healthy(world, "a", "b")(*arguments, **options)
        os.kill(os.getpid(), signal.SIGTERM)
        return first(*arguments, **options)

    measuring(measured)


def test_the_first_sigterm_finishes_the_job_and_takes_no_other(
    world: World, measuring: Callable[[Measure], None]
) -> None:
    world.ask("a", "b")
    stop_after_one_job(measuring, world, healthy(world, "a", "b"))
    assert daemon.run(world.settings) == 0
    assert world.states() == ["done", "queued"]


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_the_second_signal_gives_the_job_back(
    world: World, measuring: Callable[[Measure], None], second: signal.Signals
) -> None:
    cleared: list[str] = []

    def measure(*_arguments: Any, **_options: Any) -> Result:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), second)
            raise AssertionError("it went on measuring")
        finally:
            cleared.append("children")

    world.ask("a")
    measuring(measure)
    assert daemon.run(world.settings) == 0
    (job,) = world.jobs()
    assert (job["state"], job["attempts_used"], cleared) == ("queued", 0, ["children"])
    assert "gives the job back" in job["failure"]


def test_a_runner_killed_in_the_middle_gets_its_job_again(world: World, measuring: Callable[[Measure], None]) -> None:
    script = (
        "import time\n"
        "from runners import daemon\n"
        "from runners.settings import RunnerSettings\n"
        "daemon.measure_commit = lambda *_, **__: time.sleep(600)\n"
        "daemon.run(RunnerSettings())\n"
    )
    world.ask("a")
    with subprocess.Popen([sys.executable, "-c", script], env=environment_of(world.settings)) as process:
        wait_until(lambda: world.states() == ["leased"])
        process.kill()
    measuring(healthy(world, "a"))
    assert daemon.run(world.settings, once=True) == 0
    (job,) = world.jobs()
    assert (job["state"], job["attempts_used"], world.runs("a")) == ("done", 1, 1)


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_a_runner_killed_in_a_measured_case_leaves_no_process_and_loses_no_result(world: World, tmp_path: Path) -> None:
    story = write_story(tmp_path / "story")
    target = story_target(tmp_path / "story")
    world.admin.register_target(target)
    told = Commit.model_validate({"sha": story[0].sha, "parents": [], "committed_at": "2026-01-05T08:00:00Z"})
    world.admin.post_commits(target.name, [told], head_of="main")
    world.admin.enqueue(JobRequest(target=target.name, commit=story[0].sha))
    script = "from runners import daemon; from runners.settings import RunnerSettings; daemon.run(RunnerSettings())"
    with subprocess.Popen([sys.executable, "-c", script], env=environment_of(world.settings)) as process:
        wait_until(lambda: "case" in (world.jobs()[0]["progress"] or ""))
        started = descendants(process.pid)
        process.kill()
    assert len(started) >= 2
    wait_until(lambda: not [number for number in started if Path(f"/proc/{number}").exists()])
    assert world.spooled() == []
    assert daemon.run(world.settings, once=True) == 0
    (job,) = world.jobs()
    assert (job["state"], job["attempts_used"]) == ("done", 2)
    rows = world.admin.get(f"/targets/{target.name}/commits/{story[0].sha}/measurements")["items"]
    assert {row["outcome"] for row in rows} == {"ok"}


def environment_of(settings: RunnerSettings) -> dict[str, str]:
    """What tells a process these settings."""
    values = settings.model_dump(mode="json", exclude_none=True) | {"token": settings.token.get_secret_value()}
    return os.environ | {f"ULPWATCH_{name.upper()}": str(value) for name, value in values.items()}


def test_a_runner_waits_for_a_service_that_is_not_there_yet(
    world: World, measuring: Callable[[Measure], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    world.ask("a")
    measuring(healthy(world, "a"))
    world.service.stop()
    pauses: list[float] = []

    def pause(_self: daemon.Stop, seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 5:
            world.service.start()

    monkeypatch.setattr(daemon.Stop, "pause", pause)
    assert daemon.run(world.settings.model_copy(update={"retry_seconds_max": 2.0}), once=True) == 0
    assert world.states() == ["done"]
    assert len(pauses) == 5
    assert pauses[4] > pauses[0]
    assert max(pauses) <= 2.0


def test_a_refused_result_is_set_aside_and_the_next_job_is_done(
    world: World, measuring: Callable[[Measure], None]
) -> None:
    world.settings.spool.mkdir()
    attempt = UUID(int=9)
    (world.settings.spool / f"{attempt}.json").write_bytes(b'{"wire_version": 1}')
    world.ask("a")
    measuring(healthy(world, "a"))
    assert daemon.run(world.settings, once=True) == 0
    assert world.states() == ["done"]
    rejected = world.settings.spool / "rejected"
    assert (rejected / f"{attempt}.json").read_bytes() == b'{"wire_version": 1}'
    assert "422" in (rejected / f"{attempt}.reason.txt").read_text()


def test_a_token_that_is_unknown_ends_the_daemon_and_keeps_the_spool(world: World) -> None:
    world.settings.spool.mkdir()
    (world.settings.spool / f"{UUID(int=9)}.json").write_bytes(b"{}")
    stranger = world.settings.model_copy(update={"token": SecretStr("ulpw_nobody")})
    assert daemon.run(stranger) == 1
    assert world.spooled() == [str(UUID(int=9))]


def spool_one_result(world: World, name: str) -> UUID:
    """A first life that measures and dies before it posts."""
    with Spool(world.settings.spool) as spool, Client(world.settings.url, world.settings.token) as client:
        life = daemon.Daemon(world.settings, client, spool, daemon.Stop())
        daemon._hello(life)
        job = daemon._claim(life)
        assert job is not None
        daemon.do_job(life, job)
    assert world.spooled() == [str(job.attempt)]
    return job.attempt


def test_a_result_survives_the_rotation_of_the_token(
    world: World, measuring: Callable[[Measure], None], session_factory: SessionFactory
) -> None:
    world.ask("a")
    measuring(healthy(world, "a"))
    attempt = spool_one_result(world, "a")
    with session_factory.begin() as session:
        (former,) = [row.id for row in tokens(session) if row.scope == "runner"]
        revoke_token(session, former)
        fresh = create_token(session, "runner").secret
    rotated = world.settings.model_copy(update={"token": SecretStr(fresh)})
    assert daemon.run(rotated, once=True) == 0
    assert (world.states(), world.runs("a"), world.spooled()) == (["done"], 1, [])
    rows = world.admin.get(f"/targets/{TARGET}/commits/{world.payloads.sha('a')}/measurements")["items"]
    assert {row["attempt"] for row in rows} == {str(attempt)}
    assert not (world.settings.spool / "rejected").exists()


def test_a_result_that_the_token_may_not_post_waits_longer_and_longer_and_holds_up_no_other(
    world: World,
    measuring: Callable[[Measure], None],
    session_factory: SessionFactory,
    caplog: pytest.LogCaptureFixture,
) -> None:
    world.ask("a", "b")
    measuring(healthy(world, "a", "b"))
    attempt = spool_one_result(world, "a")
    with session_factory.begin() as session:
        other = create_token(session, "runner").secret
    stranger = world.settings.model_copy(update={"token": SecretStr(other), "name": "other-box"})
    assert daemon.run(stranger, once=True) == 0
    assert (world.states(), world.spooled()) == (["leased", "done"], [str(attempt)])
    assert f"result of attempt {attempt} stays in {stranger.spool}" in caplog.text
    assert "next try in 10 s" in caplog.text


def test_a_lost_lease_ends_the_measurement_and_posts_nothing(
    world: World, measuring: Callable[[Measure], None]
) -> None:
    def measure(_target: Any, _repository: Any, _sha: str, **options: Any) -> Result:
        world.admin.fail(options["job_id"], options["attempt"], transient=False, reason="withdrawn")
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            options["on_progress"]("measuring on")
            time.sleep(0.01)
        raise AssertionError("nobody said that the lease is lost")

    world.ask("a")
    measuring(measure)
    assert daemon.run(world.settings, once=True) == 0
    assert (world.states(), world.runs("a"), world.spooled()) == (["failed"], 0, [])


def test_the_service_sees_what_a_runner_is_doing(world: World, measuring: Callable[[Measure], None]) -> None:
    def measure(_target: Any, _repository: Any, _sha: str, **options: Any) -> Result:
        options["on_progress"]("fused: case 2 of 7")
        wait_until(lambda: [job["progress"] for job in world.jobs()] == ["fused: case 2 of 7"])
        return world.result("a", **options)

    world.ask("a")
    measuring(measure)
    assert daemon.run(world.settings, once=True) == 0
    assert world.states() == ["done"]


def test_two_daemons_do_not_share_a_spool(world: World) -> None:
    with Spool(world.settings.spool), pytest.raises(SpoolBusyError):
        daemon.run(world.settings, once=True)


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_a_story_commit_is_measured_for_real(world: World, tmp_path: Path) -> None:
    story = write_story(tmp_path / "story")
    target = story_target(tmp_path / "story")
    case_count = len(suite("demo"))
    world.admin.register_target(target)
    commit = {"sha": story[-1].sha, "parents": [], "committed_at": "2026-01-05T08:00:00Z"}
    told = [Commit.model_validate(commit)]
    world.admin.post_commits(target.name, told, head_of="main")
    world.admin.enqueue(JobRequest(target=target.name, commit=story[-1].sha))
    assert daemon.run(world.settings, once=True) == 0
    rows = world.admin.get(f"/targets/{target.name}/commits/{story[-1].sha}/measurements")["items"]
    assert [row["outcome"] for row in rows] == ["ok"] * 2 * case_count
    broken = [row for row in rows if row["kernel"] == "fused" and 0.0 in row["samples"]["mask_target_kept"]]
    assert len(broken) == case_count
