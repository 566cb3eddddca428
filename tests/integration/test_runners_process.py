"""What a stranger's code can do from a measured process: nothing that outlives it, and nothing to the runner.

Everything is tried with namespaces, where the host has them, and without.
"""

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import pytest

from runners import process
from runners.job import Limits, measure_commit
from service.wire import Measurement, Target

CASE = "n1-v1000-float32-off"
NEXT_CASE = "n1-v4096-float32-off"
PATIENCE_SECONDS = 60.0
Measure = Callable[..., list[Measurement]]

LOSS = """
import os, subprocess, sys, time

def harmless(logits, tokens):
    return logits.float().log_softmax(-1).gather(1, tokens.unsqueeze(1)).squeeze(1)

def log_probs(logits, tokens, with_entropy=False):
    act(logits)
    return harmless(logits, tokens), None

"""


@pytest.fixture(params=["namespaces", "plain"])
def isolated(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether measured processes get namespaces in this test."""
    if request.param == "namespaces":
        if not process.isolation().works:
            pytest.skip(f"this host isolates no process: {process.isolation().words}")
        return True
    monkeypatch.setattr(process, "isolation", lambda: process.Isolation(False, "none: switched off by a test"))
    return False


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    directory = tmp_path / "repository"
    directory.mkdir()
    subprocess.run(["git", "init", "--quiet", "--initial-branch=main"], cwd=directory, check=True)
    return directory


def write(repository: Path, act: str, **files: str) -> None:
    """Commit a kernel that does what `act` says before it works."""
    for name, content in {"loss.py": LOSS + textwrap.dedent(act), **files}.items():
        (repository / name).write_text(content)
    person = ["-c", "user.name=Ada", "-c", "user.email=ada@example.org"]
    subprocess.run(["git", "add", "--all"], cwd=repository, check=True)
    subprocess.run(["git", *person, "commit", "--quiet", "--message", "Acts"], cwd=repository, check=True)


def target(*names: str, **python: object) -> Target:
    kernels = [
        {
            "name": name,
            "entry": "loss:log_probs",
            "arguments": {"logits": "logits", "targets": "tokens", "with_entropy": "with_entropy"},
            "returns": ["log_prob", "entropy"],
        }
        for name in names or ("fused",)
    ]
    described = {"name": "tiny", "repository": ".", "paths": ["."], "kernels": kernels, "python": python}
    return Target.model_validate(described)


def measure(
    repository: Path, *cases: str, what: Target | None = None, limits: Limits | None = None
) -> list[Measurement]:
    limits = limits or Limits(case_seconds=60)
    what = what or target()
    result = measure_commit(what, repository, "HEAD", attempt=uuid4(), case_ids=cases or [CASE], limits=limits)
    assert result.environment.volatile["isolation"] == process.isolation().words
    return result.measurements


def running(mark: str) -> list[int]:
    """The processes that live and have the mark in their command line."""
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            words = (directory / "cmdline").read_bytes()
            state = (directory / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if mark.encode() in words and state not in "ZX":
            found.append(int(directory.name))
    return found


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for what another process does."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


ESCAPE = """
    acted = set()

    def act(logits):
        if logits.shape in acted:
            return
        acted.add(logits.shape)
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.execve("/bin/sleep", ["sleep", "600.{mark}"], {{}})
            os._exit(0)
        os.wait()
        while "600.{mark}" not in subprocess.run(["ps", "axo", "args"], capture_output=True, text=True).stdout:
            time.sleep(.01)
        {then}
"""


@pytest.mark.usefixtures("isolated")
def test_what_left_group_session_and_environment_ends_with_the_process(repository: Path) -> None:
    mark = str(uuid4().int)[:12]
    killed, exited, timeout = "os.kill(os.getpid(), 11)", "os._exit(3)", "time.sleep(99)"
    ways = f"{{(1, 4096): lambda: {killed}, (7, 1000): lambda: {exited}, (7, 4096): lambda: {timeout}}}"
    write(repository, ESCAPE.format(mark=mark, then=f"{ways}.get(tuple(logits.shape), int)()"))
    cases = [f"n{n}-v{v}-float32-off" for n, v in ((1, 1000), (1, 4096), (7, 1000), (7, 4096))]
    measured = measure(repository, *cases, limits=Limits(case_seconds=15))
    assert [m.outcome for m in measured] == ["ok", "killed", "exited", "timeout"]
    assert running(f"600.{mark}") == []


RUNNER = """
import sys, uuid
from runners import process
from runners.job import measure_commit
from service.wire import Target
if sys.argv[3] == "plain":
    process.isolation = lambda: process.Isolation(False, "none: switched off by a test")
target = Target.model_validate_json(sys.argv[1])
result = measure_commit(target, sys.argv[2], "HEAD", attempt=uuid.uuid4(), case_ids=sys.argv[4:])
print(result.model_dump_json())
"""


def started_runner(repository: Path, isolated: bool, what: Target, **settings: str) -> subprocess.Popen[str]:
    """A runner in a process of its own, which can be robbed and killed."""
    how = "namespaces" if isolated else "plain"
    command = [sys.executable, "-c", RUNNER, what.model_dump_json(), str(repository), how, CASE]
    return subprocess.Popen(command, env={**os.environ, **settings}, stdout=subprocess.PIPE, text=True)


def test_the_runners_token_cannot_be_read_from_the_measured_process(isolated: bool, repository: Path) -> None:
    act = """
        import glob, json

        def read(name):
            try:
                return open(name, "rb").read()
            except OSError:
                return b""

        def act(logits):
            seen = [name for name in glob.glob("/proc/[0-9]*/environ") if b"TOKEN=hunter2" in read(name)]
            raise RuntimeError(f"seen: {seen}")
    """
    write(repository, act)
    with started_runner(repository, isolated, target(), ULPWATCH_TOKEN="hunter2") as runner:
        printed, _ = runner.communicate()
    assert "seen: []" in printed


def test_a_runner_cannot_be_killed_where_there_are_namespaces(repository: Path) -> None:
    if not process.isolation().works:
        pytest.skip(f"this host isolates no process: {process.isolation().words}")
    act = """
        def act(logits):
            try:
                os.kill(int(os.environ["RUNNER"]), 0)
            except ProcessLookupError:
                return
            raise RuntimeError("it can be killed")
    """
    write(repository, act)
    (measured,) = measure(repository, what=target(env={"RUNNER": str(os.getpid())}))
    assert measured.outcome == "ok", measured.notes


def test_a_runner_that_is_killed_leaves_nothing_behind(isolated: bool, repository: Path, tmp_path: Path) -> None:
    mark = str(uuid4().int)[:12]
    write(repository, ESCAPE.format(mark=mark, then="time.sleep(600)"))
    places = tmp_path / "places"
    places.mkdir()
    with started_runner(repository, isolated, target(), TMPDIR=str(places)) as runner:
        wait_until(lambda: running(f"600.{mark}") != [])
        kept = process.descendants(runner.pid)
        assert kept
        os.kill(runner.pid, signal.SIGKILL)
        wait_until(lambda: not [number for number in kept if is_alive(number)])
    assert running(f"600.{mark}") == []
    assert list(places.iterdir()) == []


def is_alive(number: int) -> bool:
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.usefixtures("isolated")
def test_a_process_that_holds_too_much_memory_is_recorded_as_out_of_memory(repository: Path) -> None:
    act = """
        held = []

        def act(logits):
            if logits.shape[1] == 1000:
                if os.fork() == 0:
                    held.append(bytearray(b"x" * (1 << 30)))
                    time.sleep(600)
                time.sleep(600)
    """
    write(repository, act)
    large, after = measure(repository, CASE, NEXT_CASE, limits=Limits(case_seconds=50, memory_bytes=1 << 30))
    assert (large.outcome, after.outcome) == ("out_of_memory", "ok"), (large.notes, after.notes)
    assert "more than the 1073741824 allowed" in large.notes["outcome"]
    assert large.values == {"callable": [1.0], "completes": [0.0]}


@pytest.mark.usefixtures("isolated")
def test_a_process_that_starts_too_many_is_ended_with_all_of_them(repository: Path) -> None:
    mark = str(uuid4().int)[:12]
    act = f"""
        def act(logits):
            for _ in range(60):
                subprocess.Popen(["sleep", "600.{mark}"], start_new_session=True)
            time.sleep(600)
    """
    write(repository, act)
    (measured,) = measure(repository, limits=Limits(case_seconds=50, started_max=40))
    assert measured.outcome == "killed"
    assert "more than the 40 allowed" in measured.notes["outcome"]
    assert running(f"600.{mark}") == []


@pytest.mark.usefixtures("isolated")
def test_a_kernel_that_spoils_its_files_spoils_them_for_no_other_process(repository: Path) -> None:
    act = """
        import helper

        def act(logits):
            here = os.path.dirname(__file__)
            os.unlink(os.path.join(here, "helper.py"))
            with open(__file__, "w") as file:
                file.write("raise ImportError('spoilt')")
            os._exit(3)
    """
    write(repository, act, **{"helper.py": ""})
    spoils, again = measure(repository, CASE, NEXT_CASE)
    assert (spoils.outcome, again.outcome) == ("exited", "exited"), (spoils.notes, again.notes)


def test_namespaces_leave_nothing_to_write_to_but_its_own_and_no_network(repository: Path, tmp_path: Path) -> None:
    if not process.isolation().works:
        pytest.skip(f"this host isolates no process: {process.isolation().words}")
    act = """
        import json, socket, tempfile

        def can_write(directory):
            try:
                open(os.path.join(directory, "ulpwatch-test"), "w").close()
            except OSError:
                return False
            return True

        def act(logits):
            places = [os.path.dirname(__file__), os.getcwd(), tempfile.gettempdir(), "/tmp", "/dev/shm"]
            closed = ["/etc", "/var/tmp", sys.prefix, os.path.dirname(os.__file__)]
            interfaces = [name for _, name in socket.if_nameindex()]
            seen = {
                "open": [place for place in places if not can_write(place)],
                "closed": [place for place in closed if can_write(place)],
                "processes": len([name for name in os.listdir("/proc") if name.isdigit()]),
                "daemons": os.listdir("/run"),
                "theirs": [path for path in os.environ["THEIRS"].split(":") if os.path.exists(path)],
            }
            with socket.create_server(("127.0.0.1", 0)) as server:
                socket.create_connection(server.getsockname()).close()
            try:
                socket.create_connection(("192.0.2.1", 80), timeout=5)
            except OSError as error:
                seen["network"] = error.strerror
            raise RuntimeError(json.dumps([seen, interfaces]))
    """
    write(repository, act)
    with tempfile.NamedTemporaryFile(dir=Path.home()) as secret:
        (measured,) = measure(repository, what=target(env={"THEIRS": f"{tmp_path}:{secret.name}"}))
    wanted = (
        '{"open": [], "closed": [], "processes": 3, "daemons": [], "theirs": [], "network": "Network is unreachable"}'
    )
    assert wanted in measured.notes["outcome"]
    assert not Path("/tmp/ulpwatch-test").exists()


def test_namespaces_work_whatever_the_temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not process.isolation().works:
        pytest.skip(f"this host isolates no process: {process.isolation().words}")
    for place in ("/tmp", "/dev/shm", "/var/tmp", tmp_path):
        monkeypatch.setattr("tempfile.tempdir", str(place))
        process.isolation.cache_clear()
        assert process.isolation() == process.Isolation(True, "namespaces"), place


def test_a_host_without_namespaces_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_PROBE", "import errno; raise OSError(errno.EPERM, 'unshare: not permitted')")
    process.isolation.cache_clear()
    found = process.isolation()
    process.isolation.cache_clear()
    assert found == process.Isolation(False, "none: PermissionError: [Errno 1] unshare: not permitted")
