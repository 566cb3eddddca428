"""Expected beside found: the demo calls a match a match, and every other difference by name."""

from io import StringIO
from itertools import pairwise
from typing import Any

import pytest
from rich.console import Console

from runners.demo import expected_words, found_words, mismatches, story_table
from runners.story.story import Expected, StoryCommit, chapters
from service.catalogue import Family

MEMORY, WORK, PRECISION = Family.MEMORY, Family.WORK, Family.PRECISION
SHA = "a" * 40


def finding(family: str, direction: str = "regress") -> dict[str, Any]:
    """A finding as the API gives it."""
    return {"family": family, "direction": direction, "sentence": f"{family} of [fused] rose, at {SHA[:7]}"}


def verdict(state: str, *findings: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A verdict as the API gives it."""
    plain = {"sha": SHA, "state": state, "findings": findings, "recovered": [], "inherited_from": None, "reason": "why"}
    return plain | changes


REGRESS = Expected("regress", findings=frozenset({MEMORY}), also=frozenset({WORK}))


def test_the_expected_findings_match() -> None:
    assert mismatches(REGRESS, verdict("regress", finding("memory"))) == []


def test_a_finding_that_may_be_there_too_matches() -> None:
    assert mismatches(REGRESS, verdict("regress", finding("memory"), finding("work"))) == []


def test_an_improvement_beside_the_regression_matches() -> None:
    assert mismatches(REGRESS, verdict("regress", finding("memory"), finding("precision", "improve"))) == []


@pytest.mark.parametrize(
    ("expected", "found", "wrong"),
    [
        (REGRESS, verdict("pass", finding("memory")), ["state is pass, not regress"]),
        (REGRESS, verdict("regress", finding("work")), ["no memory finding"]),
        (REGRESS, verdict("regress", finding("memory", "improve")), ["no memory finding"]),
        (REGRESS, verdict("regress", finding("memory"), finding("precision")), ["precision finding"]),
        (REGRESS, verdict("regress", finding("memory"), inherited_from="b" * 40), ["inherited"]),
        (Expected("pass", recovered=frozenset({WORK})), verdict("pass"), ["work not recovered"]),
        (Expected("pass", inherited=True), verdict("pass"), ["not inherited"]),
    ],
)
def test_a_difference_is_named(expected: Expected, found: dict[str, Any], wrong: list[str]) -> None:
    assert mismatches(expected, found) == wrong


def test_expected_and_found_are_told_in_the_same_words() -> None:
    expected = Expected("pass", recovered=frozenset({WORK, MEMORY}))
    found = verdict("pass", recovered=[finding("work"), finding("memory")])
    assert expected_words(expected) == found_words(found) == "pass; recovered: memory, work"
    assert expected_words(Expected("pass", inherited=True)) == found_words(verdict("pass", inherited_from="b" * 40))
    assert expected_words(REGRESS) == "regress: memory (also work)"


def shown(expected: Expected, found: dict[str, Any]) -> str:
    """The table of a story of one commit, as printed."""
    console = Console(width=200, record=True, file=StringIO())
    console.print(story_table([StoryCommit("key", SHA, "Fuse [both]", expected)], {SHA: found}))
    return console.export_text()


def test_a_matching_row_is_ok_and_says_why() -> None:
    text = shown(REGRESS, verdict("regress", finding("memory"), finding("precision", "improve")))
    for words in (SHA[:7], "Fuse [both]", "regress: memory", "memory of [fused] rose", " ok "):
        assert words in text
    assert "MISMATCH" not in text
    assert "precision of" not in text


def test_a_row_that_differs_says_mismatch_and_how() -> None:
    text = shown(REGRESS, verdict("pass"))
    assert "MISMATCH: no memory finding" in text
    assert " ok " not in text


def test_no_expected_verdict_matches_that_of_a_neighbour() -> None:
    """A judge that is late or early by one commit is seen."""
    for before, after in pairwise(chapters()):
        assert before.expected != after.expected
