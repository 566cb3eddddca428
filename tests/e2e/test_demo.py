"""The demo for real: killed in the middle in every way, started again, every verdict as expected, nothing doubled."""

import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from runners import demo as demo_module
from runners.demo import demo
from runners.story.story import Expected, StoryCommit, write_story

PATIENCE_SECONDS = 500.0
pytestmark = pytest.mark.timeout(900)


def start(directory: Path) -> subprocess.Popen[str]:
    """The demo as a person starts it."""
    command = [sys.executable, "-m", "ulpwatch", "demo", "--directory", str(directory), "--port", "0"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def rows(directory: Path, query: str) -> list[tuple[object, ...]]:
    """What the demo's database holds; nothing as long as there are no tables."""
    path = directory / "ulpwatch.sqlite3"
    if not path.exists():
        return []
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
        try:
            return connection.execute(query).fetchall()
        except sqlite3.OperationalError:
            return []


def runs(directory: Path) -> int:
    """How many results are stored."""
    return sum(1 for _ in rows(directory, "SELECT id FROM runs"))


def is_measuring(directory: Path) -> bool:
    """Whether a runner holds a job."""
    return rows(directory, "SELECT id FROM jobs WHERE state = 'leased'") != []


def children(parent: int, word: str) -> list[int]:
    """Processes that `parent` started with this word on their command line."""
    listed = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [int(pid) for pid in listed if word in Path(f"/proc/{pid}/cmdline").read_text().split("\0")]


def alive(directory: Path) -> list[str]:
    """Command lines of living processes that name the directory or were started for it."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if str(directory) in (process / "environ").read_text() + (process / "cmdline").read_text():
                found.append((process / "cmdline").read_text())
        except OSError:
            continue
    return found


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for what the demo does."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The directory of a demo whose programs, and itself, were killed on the way; and what it printed at the end."""
    directory = tmp_path_factory.mktemp("demo")
    with start(directory) as first:
        wait_until(lambda: is_measuring(directory))
        os.kill(children(first.pid, "runner")[0], signal.SIGKILL)
        wait_until(lambda: runs(directory) == 1 and is_measuring(directory))
        os.kill(children(first.pid, "serve")[0], signal.SIGKILL)
        wait_until(lambda: runs(directory) == 2 and is_measuring(directory))
        first.kill()
    wait_until(lambda: alive(directory) == [])
    with start(directory) as second:
        printed, _ = second.communicate()
    assert second.returncode == 0, printed
    return directory, printed


def test_every_verdict_of_the_story_is_the_expected_one(finished: tuple[Path, str]) -> None:
    directory, printed = finished
    for commit in write_story(directory / "story"):
        (line,) = [line for line in printed.splitlines() if line.startswith(f"│ {commit.sha[:7]} ")]
        assert line.rstrip("│ ").endswith(" ok"), line
    assert "every verdict is the expected one" in printed
    assert "MISMATCH" not in printed


def test_nothing_is_lost_or_doubled_by_the_kills(finished: tuple[Path, str]) -> None:
    directory, _ = finished
    measured = rows(directory, "SELECT count(*) FROM runs GROUP BY commit_id")
    assert measured == [(1,)] * 9
    assert rows(directory, "SELECT state, count(*) FROM jobs GROUP BY state") == [("done", 9)]
    assert list((directory / "spool").glob("*.json")) == []
    assert not (directory / "spool" / "rejected").exists()


def test_no_process_is_left_behind(finished: tuple[Path, str]) -> None:
    assert alive(finished[0]) == []


def test_an_unexpected_verdict_is_shown_and_exits_1(
    finished: tuple[Path, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, _ = finished

    def another_story(path: Path) -> list[StoryCommit]:
        commits = write_story(path)
        return [*commits[:-1], replace(commits[-1], expected=Expected("pass"))]

    monkeypatch.setattr(demo_module, "write_story", another_story)
    monkeypatch.setattr(demo_module, "SETTLE_SECONDS", 0.0)
    assert demo(directory, port=0) == 1
    assert "MISMATCH: state is regress, not pass" in " ".join(capsys.readouterr().out.split())
    assert runs(directory) == 9


def test_a_second_demo_in_the_same_directory_is_turned_away(tmp_path: Path) -> None:
    with demo_module._owned(tmp_path, fresh=False):
        assert demo(tmp_path) == 1


def test_a_fresh_start_keeps_what_is_not_the_demos(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    (tmp_path / "ulpwatch.sqlite3").write_text("old")
    with demo_module._owned(tmp_path, fresh=True):
        assert sorted(path.name for path in tmp_path.iterdir()) == ["demo.lock", "thesis.txt"]
