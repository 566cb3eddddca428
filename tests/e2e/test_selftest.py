"""`ulpwatch selftest` through the whole path, real mutants, processes and judge; and that it can go red."""

from dataclasses import replace

import pytest
from typer.testing import CliRunner, Result

import ulpwatch
from runners import selftest
from runners.kernels.faults.table import Fault
from runners.suites import SUITES

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(autouse=True)
def one_case(monkeypatch: pytest.MonkeyPatch) -> None:
    """The suite's first case is enough for these."""
    monkeypatch.setitem(SUITES, selftest.SUITE, SUITES[selftest.SUITE][:1])


def run(monkeypatch: pytest.MonkeyPatch, *faults: Fault) -> Result:
    monkeypatch.setattr(selftest, "FAULTS", faults)
    return CliRunner().invoke(ulpwatch.app, ["selftest", *(f"--fault={fault.name}" for fault in faults)])


def test_real_faults_are_flagged_and_the_clean_kernel_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    done = run(monkeypatch, *selftest.chosen(["gradient_in_bf16", "no_gradient_where_one_upstream_is_none", "18"]))
    assert done.exit_code == 0, done.output
    assert "18  loop_over_rows: regress, as wanted" in done.output
    assert "AA  clean: pass, as wanted" in done.output


def test_a_fault_that_changes_nothing_or_shows_too_much_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    (cast,) = selftest.chosen(["gradient_in_bf16"])
    strict = replace(cast, number="1a", name="strict", required=frozenset({"g_bf16_grid"}), allowed=frozenset())
    done = run(monkeypatch, replace(cast, edits=()), strict)
    assert done.exit_code == 1, done.output
    assert "gradient_in_bf16: pass, NOT AS WANTED; missed: g_bf16_grid, " in done.output
    (told,) = (line for line in done.output.splitlines() if "strict: " in line)
    assert "regress, NOT AS WANTED; not allowed: " in told
    assert "g_mantissa_bits" in told


def test_an_unknown_fault_is_named() -> None:
    done = CliRunner().invoke(ulpwatch.app, ["selftest", "--fault", "bf17"])
    assert (done.exit_code, "unknown fault 'bf17'" in done.output) == (2, True)
