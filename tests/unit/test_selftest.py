"""What the self-test makes of what was seen of a fault; the measuring and judging are tested end to end."""

from dataclasses import replace
from pathlib import Path

import pytest

from runners.kernels.faults.table import FAULTS, Fault
from runners.selftest import BASELINE, CLEAN, Finding, chosen, report

FAULT = Fault("1", "cast", (), required=frozenset({"g_rel_l2_lp"}), allowed=frozenset({"g_tgt_rel_max", "work"}))


def seen(*metrics: str, state: str = "regress", fault: Fault = FAULT) -> Finding:
    return Finding(fault, state, frozenset(metrics))


def test_a_fault_is_as_wanted_with_its_required_and_allowed_signals() -> None:
    assert seen("g_rel_l2_lp").as_wanted
    assert seen("g_rel_l2_lp", "g_tgt_rel_max", "operations").as_wanted


def test_a_missed_signal_is_not_as_wanted() -> None:
    finding = seen("g_tgt_rel_max")
    assert (finding.missed, finding.as_wanted) == ({"g_rel_l2_lp"}, False)


def test_a_signal_that_is_not_allowed_is_not_as_wanted() -> None:
    finding = seen("g_rel_l2_lp", "lp_abs_max")
    assert (finding.unexpected, finding.as_wanted) == ({"lp_abs_max"}, False)


def test_a_fault_whose_commit_does_not_regress_is_not_as_wanted() -> None:
    assert not seen("g_rel_l2_lp", state="invalid").as_wanted


def test_the_kernel_as_it_is_must_pass_and_show_nothing() -> None:
    assert seen(fault=BASELINE, state="no-baseline").as_wanted
    assert seen(fault=CLEAN, state="pass").as_wanted
    assert not seen(fault=CLEAN, state="inconclusive").as_wanted
    assert not seen("operations", fault=CLEAN, state="regress").as_wanted
    assert not seen(fault=CLEAN, state="regress").as_wanted


def test_faults_are_chosen_by_name_or_number_and_all_by_default() -> None:
    assert chosen(()) == FAULTS
    assert [fault.number for fault in chosen(["18", "gradient_in_bf16"])] == ["1", "18"]
    with pytest.raises(KeyError, match="unknown fault 'bf17'; known are gradient_in_bf16, "):
        chosen(["bf17"])


def test_the_report_marks_what_was_seen_missed_and_not_allowed() -> None:
    odd = replace(FAULT, number="2", required=frozenset({"lp_abs_max"}))
    lines = report([seen("g_rel_l2_lp", "operations"), seen("ent_abs_max", fault=odd)]).splitlines()
    marks = {line.split()[0]: line.split()[1:] for line in lines[:5]}
    assert marks == {
        "fault": ["1", "2"],
        "operations": ["+", "."],
        "lp_abs_max": [".", "!"],
        "ent_abs_max": [".", "X"],
        "g_rel_l2_lp": ["R", "."],
    }
    assert "  1  cast: regress, as wanted" in lines
    assert "  2  cast: regress, NOT AS WANTED; missed: lp_abs_max; not allowed: ent_abs_max" in lines


def test_the_report_on_all_faults_names_what_no_fault_shows_and_what_was_not_run() -> None:
    told = report([seen(*fault.required, fault=fault) for fault in FAULTS])
    blind = told.splitlines()[-1]
    assert blind.startswith("seen by no fault here: ")
    assert "collectives" in blind
    assert "repeat_bitwise" not in blind
    assert "step_wall_seconds" not in blind
    assert " 17  work on a side stream: not run, needs a CUDA device" in told


def test_the_documented_table_is_that_of_these_faults() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/method.md").read_text(encoding="utf-8")
    head, *lines = page[page.index("fault      ") : page.index("R required and seen")].splitlines()
    assert head.split()[1:] == [fault.number for fault in (BASELINE, *FAULTS, CLEAN)]
    marks = {name: dict(zip(head.split()[1:], row, strict=True)) for name, *row in map(str.split, lines)}
    for fault in FAULTS:
        shown = {mark: {name for name in marks if marks[name][fault.number] == mark} for mark in "R+!X"}
        assert (shown["R"], shown["!"], shown["X"]) == (fault.required, set(), set())
        assert seen(*shown["R"], *shown["+"], fault=fault).as_wanted
        assert f"{fault.number:>3}  {fault.name}: regress, as wanted" in page
