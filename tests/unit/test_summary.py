"""A result as a table in a terminal or a log."""

from datetime import UTC, datetime
from uuid import uuid4

import pytest

from runners.summary import summary, wide_console
from service.wire import Case, Commit, Environment, Measurement, Result

CASE = Case(tokens=7, vocabulary=1000, keep_mask=True, chunk_size=8)


def result(measurement: Measurement) -> Result:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    return Result(
        attempt=uuid4(),
        target="demo",
        commit=Commit(sha="a" * 40, parents=[], committed_at=now),
        suite="quick",
        environment=Environment(device_class="cpu", device="Test CPU", exact={}, numeric={}, timing={}),
        started_at=now,
        finished_at=now,
        units={"step_peak_bytes": "byte", "g_rel_l2_lp": "1"},
        measurements=[measurement],
    )


def test_a_log_shows_case_and_numbers_whole(capsys: pytest.CaptureFixture[str]) -> None:
    values = {"step_peak_bytes": [56000.0, 56000.0], "g_rel_l2_lp": [2.1e-3]}
    wide_console().print(summary(result(Measurement(kernel="fused", case=CASE, values=values))))
    printed = capsys.readouterr().out
    assert CASE.id in printed
    assert "2.00" in printed
    assert "2.1e-03" in printed


def test_what_a_kernel_said_is_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    notes = {"outcome": "ValueError: [rows] and [/x]"}
    wide_console().print(summary(result(Measurement(kernel="fused", case=CASE, outcome="raised", notes=notes))))
    assert "[rows] and [/x]" in " ".join(capsys.readouterr().out.split())
