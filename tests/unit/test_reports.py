"""A verdict as text, Markdown, JUnit and exit code."""

import json
from typing import Any
from xml.etree import ElementTree

import pytest

from service.queries import ci_result
from service.reports import MARKDOWN_LIMIT, exit_code, junit, markdown, render, text


def step(**changes: Any) -> dict[str, Any]:
    return {
        "kernel": "fused",
        "case_id": "n64-v4096-float32-gradient",
        "metric": "step_peak_bytes",
        "unit": "byte",
        "rule": "bytes",
        "state": "regress",
        "before": 2097152.0,
        "after": 3145728.0,
        "limit": 2101248.0,
        "effect": 0.58,
        "unit_bytes": 1048576,
        "reason": "",
        "samples": [3145728.0, 3145728.0],
        "device": "Test CPU",
    } | changes


def finding(**changes: Any) -> dict[str, Any]:
    return {
        "kernel": "fused",
        "family": "memory",
        "direction": "regress",
        "state": "open",
        "sentence": "peak memory of fused: 2.00 U -> 3.00 U",
        "affected": [step()],
        "reproduce": "ulpwatch measure --case n64",
        "required": True,
    } | changes


def verdict(**changes: Any) -> dict[str, Any]:
    return {
        "target": "demo",
        "sha": "1a2b3c4" + "0" * 33,
        "state": "regress",
        "reason": "peak memory of fused: 2.00 U -> 3.00 U",
        "baseline_sha": "9f8e7d6" + "0" * 33,
        "baseline_distance": 2,
        "counts": {"pass": 10, "regress": 1},
        "findings": [finding()],
        "inherited": [],
        "recovered": [],
        "undecided": [],
        "notices": [],
        "ci": ci_result(changes.get("state", "regress"), {}),
    } | changes


@pytest.mark.parametrize(
    ("state", "code"),
    [
        ("pass", 0),
        ("improve", 0),
        ("regress", 1),
        *((state, 2) for state in ("inconclusive", "no-baseline", "missing", "incomparable", "invalid", "of-tomorrow")),
    ],
)
def test_each_state_has_its_exit_code(state: str, code: int) -> None:
    assert exit_code(verdict(state=state)) == code


def test_a_target_says_what_its_states_mean() -> None:
    assert ci_result("no-baseline", {"no-baseline": "pass"}) == "pass"
    assert exit_code(verdict(state="inconclusive", ci="fail")) == 1
    assert exit_code(verdict(state="pass", ci="of tomorrow")) == 2


def test_text_begins_with_commit_and_state_and_shows_the_numbers() -> None:
    shown = text(verdict())
    assert shown.startswith("1a2b3c4  regress: ")
    assert "baseline: 9f8e7d6, 2 commits back" in shown
    assert "compared: 1 regress, 10 pass" in shown
    assert "2,097,152 B (2.00 U) -> 3,145,728 B (3.00 U) (limit 2,101,248 B (2.00 U))" in shown
    assert "reproduce: ulpwatch measure --case n64" in shown


def test_text_says_how_much_it_leaves_out() -> None:
    assert "and 15 more" in text(verdict(findings=[finding(affected=[step()] * 25)]))


def test_a_long_comment_is_cut_by_severity_and_counts_what_it_leaves_out() -> None:
    findings = [*[finding(affected=[step()] * 10)] * 99, finding(direction="improve", sentence="better " * 40)]
    shown = markdown(verdict(findings=findings, undecided=[step(state="missing")] * 2000), link="https://example.org/v")
    assert len(shown) <= MARKDOWN_LIMIT
    assert "https://example.org/v" in shown
    assert "better" not in shown
    assert "more left out for length" in shown


def test_a_short_comment_is_whole_in_the_order_of_the_verdict() -> None:
    findings = [finding(sentence="more memory"), finding(direction="improve", sentence="less memory")]
    shown = markdown(verdict(findings=findings))
    assert shown.index("more memory") < shown.index("less memory")
    assert "left out" not in shown


def test_a_reason_longer_than_the_limit_is_cut() -> None:
    assert len(markdown(verdict(reason="x" * 100_000))) <= MARKDOWN_LIMIT


def test_words_from_a_kernel_stay_text() -> None:
    shown = markdown(verdict(reason="@everyone <b>|[x](y)\nnext"))
    assert "@everyone" not in shown
    assert "<b>" not in shown.replace("\\<b\\>", "")
    assert "\nnext" not in shown


def test_junit_fails_for_a_regression_and_errs_for_the_undecided() -> None:
    suite = ElementTree.fromstring(junit(verdict()))
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("2", "2", "0")
    undecided = ElementTree.fromstring(junit(verdict(state="missing", findings=[])))
    assert (undecided.get("failures"), undecided.get("errors")) == ("0", "1")
    passed = ElementTree.fromstring(junit(verdict(state="pass", findings=[])))
    assert [case.find("failure") for case in passed] == [None]


def test_junit_survives_control_characters() -> None:
    ElementTree.fromstring(junit(verdict(reason="\x1b[31mred \x00 & <bad> \ud800\ufffe\uffff\U0001f600")))


def test_what_the_target_does_not_require_is_told_and_fails_nothing() -> None:
    view = verdict(state="pass", findings=[finding(required=False)])
    suite = ElementTree.fromstring(junit(view))
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("2", "0", "0")
    assert "regress (not required by the target)  peak memory of fused" in text(view)


def test_notices_are_told() -> None:
    assert "notice  fused" in text(verdict(notices=[step(state="pass", reason="fails, as it did")]))


def test_json_is_the_verdict_itself() -> None:
    assert json.loads(render(verdict(), "json")) == verdict()


def test_an_unknown_format_names_the_known_ones() -> None:
    with pytest.raises(KeyError, match="text, markdown, junit, json"):
        render(verdict(), "yaml")
