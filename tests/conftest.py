"""For every tier: a run says by name what it could not test, and a CI run fails for it."""

import os

import pytest

ALLOWED_IN_CI = ("needs a CUDA device",)


def _reasons(reporter: pytest.TerminalReporter) -> list[str]:
    reports = reporter.stats.get("skipped", [])
    return sorted({str(report.longrepr[2]).removeprefix("Skipped: ") for report in reports if report.longrepr})


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name what this machine lacked."""
    for reason in _reasons(terminalreporter):
        terminalreporter.write_line(f"NOT TESTED HERE: {reason}", yellow=True)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """In CI a skipped test is a failure, unless it needs a GPU."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if not os.environ.get("CI") or reporter is None or hasattr(session.config, "workerinput"):
        return
    if any(not reason.startswith(ALLOWED_IN_CI) for reason in _reasons(reporter)):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
