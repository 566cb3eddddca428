"""Our own commands as processes: restarted when they die, gone when they are stopped or their parent dies."""

import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from socket import create_server

import pytest

from runners import programs
from runners.programs import HOST, Program, ProgramError, free_port, run_command


def program(tmp_path: Path, *arguments: str) -> Program:
    """A program of ours, not started."""
    return Program("program", list(arguments), {}, tmp_path / "log")


def test_a_program_that_ended_is_started_again_but_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, "STARTS_MAX", 2)
    broken = program(tmp_path, "no-such-command")
    for _ in range(2):
        assert broken.keep_alive()
        assert broken.process is not None
        broken.process.wait()
    with pytest.raises(ProgramError, match=r"ended 2 times(?s:.*)no-such-command"):
        broken.keep_alive()


def test_a_program_that_runs_is_left_alone_and_stopped_at_the_end(tmp_path: Path) -> None:
    database_url = f"sqlite:///{tmp_path}/db.sqlite3"
    serve = program(tmp_path, "serve", "--port", str(free_port(0)), "--database-url", database_url)
    assert serve.keep_alive()
    assert not serve.keep_alive()
    serve.stop()
    assert serve.process is not None
    assert serve.process.poll() is not None


def test_a_program_dies_with_its_parent(tmp_path: Path) -> None:
    script = (
        "import os, sys, signal\n"
        "from pathlib import Path\n"
        "from runners.programs import Program\n"
        "program = Program('p', ['runner'], {'ULPWATCH_SPOOL': sys.argv[1] + '/spool'}, Path(sys.argv[1], 'log'))\n"
        "program.keep_alive()\n"
        "print(program.process.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == -9
    child = Path("/proc") / done.stdout.strip()
    for _ in range(1000):
        if not child.exists() or "\nState:\tZ" in (child / "status").read_text():
            return
        time.sleep(0.01)
    pytest.fail(f"process {child.name} outlived its parent")


def test_a_command_that_fails_says_what_it_said(tmp_path: Path) -> None:
    with pytest.raises(ProgramError, match="no-such-command"):
        run_command(f"sqlite:///{tmp_path}/db.sqlite3", "no-such-command")


def test_the_settings_of_the_user_do_not_reach_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ULPWATCH_TOKEN", "mine")
    found = programs._environment({"ULPWATCH_URL": "http://service.test"})
    assert {name: value for name, value in found.items() if name.startswith("ULPWATCH_")} == {
        "ULPWATCH_URL": "http://service.test"
    }
    assert found["PATH"]


def test_a_port_in_use_is_passed_over() -> None:
    with closing(create_server((HOST, 0))) as taken:
        port = int(taken.getsockname()[1])
        assert free_port(port) != port
    assert free_port(port) == port
