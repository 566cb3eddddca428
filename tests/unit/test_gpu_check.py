"""The GPU check's plumbing, on parts that are played: one that hangs, dies or says nothing costs only itself."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_check import Part, figures_of_suite, figures_of_tests, parts, run

ROOT = Path(__file__).resolve().parents[2]


def _part(name: str, code: str, seconds: float = 30.0, **more: Any) -> Part:
    return Part(name, (sys.executable, "-c", code), seconds, lambda printed: {"lines": printed.splitlines()}, **more)


def test_every_part_is_told_whatever_becomes_of_the_others(tmp_path: Path) -> None:
    out = tmp_path / "check.json"
    chosen = [
        _part("well", "print('said')"),
        _part("hangs", "print('begun', flush=True); import time; time.sleep(60)", seconds=1.5),
        _part("dies", "import os; print('so far', flush=True); os.abort()"),
        _part("fails", "raise SystemExit(3)"),
        _part("cannot", "", missing="no such thing here"),
        Part("garbled", (sys.executable, "-c", "print('{')"), 30.0, json.loads),
        _part("last", "print('said too')"),
    ]
    document = run(chosen, {"dry": True}, out)
    assert document == json.loads(out.read_text())
    told = document["parts"]
    assert {name: part["outcome"] for name, part in told.items()} == {
        "well": "ok",
        "hangs": "timeout",
        "dies": "failed",
        "fails": "failed",
        "cannot": "skipped",
        "garbled": "failed",
        "last": "ok",
    }
    assert (told["well"]["figures"], told["last"]["figures"]) == ({"lines": ["said"]}, {"lines": ["said too"]})
    assert told["hangs"]["figures"] == {"lines": ["begun"]}
    assert told["hangs"]["seconds"] < 10
    assert told["dies"]["reason"] == "exit status -6"
    assert told["dies"]["tail"].startswith("so far")
    assert told["cannot"]["reason"] == "no such thing here"
    assert "cannot be read" in told["garbled"]["reason"]
    assert document["outcome"] == "failed"


def test_a_part_takes_what_it_started_with_it(tmp_path: Path) -> None:
    started = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', CODE]); import time; time.sleep(60)"
    mark = tmp_path / "alive"
    code = f"import time; from pathlib import Path; time.sleep(4); Path({str(mark)!r}).touch()"
    run([_part("hangs", started.replace("CODE", repr(code)), seconds=2.0)], {}, tmp_path / "check.json")
    time.sleep(4.5)
    assert not mark.exists()


def test_a_part_finds_what_the_check_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "carried.py").write_text("WORDS = 'found'")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    code = "import carried, runners.suites; print(carried.WORDS)"
    told = run([_part("imports", code)], {}, tmp_path / "check.json")["parts"]["imports"]
    assert told["figures"] == {"lines": ["found"]}


def test_what_has_been_told_is_on_disk_while_a_part_still_runs(tmp_path: Path) -> None:
    out = tmp_path / "check.json"
    read = f"print(open({str(out)!r}).read())"
    chosen = [_part("first", "print('said')"), Part("reader", (sys.executable, "-c", read), 30.0, json.loads)]
    seen = run(chosen, {"commit": "abc"}, out)["parts"]["reader"]["figures"]
    assert (seen["commit"], seen["outcome"]) == ("abc", "unfinished")
    assert seen["parts"]["first"]["figures"] == {"lines": ["said"]}


def test_no_part_begins_when_the_time_of_all_is_used_up(tmp_path: Path) -> None:
    chosen = [_part("slow", "import time; time.sleep(60)"), _part("late", "print('said')")]
    document = run(chosen, {}, tmp_path / "check.json", total_seconds=1.0)
    assert document["parts"]["slow"]["outcome"] == "timeout"
    assert document["parts"]["late"]["reason"] == "the time of the whole check was used up"
    assert document["seconds"] < 20


def test_the_limits_together_are_below_six_minutes() -> None:
    assert sum(part.seconds for part in parts(dry=False)) < 360
    assert [part.name for part in parts(dry=False)] == ["tests", "smoke", "benchmark", "selftest"]


def test_tests_are_counted_as_they_came() -> None:
    printed = """tests/gpu/test_a.py::test_one[x-1] PASSED   [ 20%]
tests/gpu/test_a.py::test_two FAILED   [ 40%]
tests/gpu/test_a.py::test_three ERROR   [ 60%]
tests/gpu/test_a.py::test_four SKIPPED (needs a CUDA device with 55 GiB free)   [ 80%]
tests/gpu/test_a.py::test_five
"""
    figures = figures_of_tests(printed)
    assert {name: figures[name] for name in ("passed", "failed", "error", "skipped")} == dict.fromkeys(
        ("passed", "failed", "error", "skipped"), 1
    )
    assert figures["failures"] == ["tests/gpu/test_a.py::test_three", "tests/gpu/test_a.py::test_two"]


def test_measurements_are_read_as_far_as_they_came() -> None:
    measured = ['{"case": "n1", "outcome": "ok"}', '{"case": "n2", "outcome": "raised"}']
    lines = ["a warning", '{"suite": "smoke", "planned": 3}', *measured]
    figures = figures_of_suite("\n".join(lines))
    assert (figures["planned"], figures["outcomes"]) == (3, {"ok": 1, "raised": 1})
    assert [each["case"] for each in figures["measurements"]] == ["n1", "n2"]
    with pytest.raises(ValueError, match="no case was measured"):
        figures_of_suite("Traceback")


def test_without_a_device_it_refuses_in_words_and_writes_nothing(tmp_path: Path) -> None:
    out = tmp_path / "check.json"
    command = [sys.executable, "benchmarks/gpu_check.py", "--out", str(out)]
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run(command, cwd=ROOT, env=hidden, capture_output=True, text=True, check=False, timeout=120)
    assert ended.returncode == 1
    assert "no CUDA device: torch" in ended.stderr
    assert not out.exists()
