"""The documentation says what the code has, and names nothing that is gone."""

import re
from pathlib import Path

import pytest
from typer.main import get_command

import ulpwatch
from runners.demo import expected_words
from runners.settings import RunnerSettings
from runners.story.story import chapters
from service import wire
from service.catalogue import METRICS
from service.detection.levels import State
from service.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def rows(page: str) -> list[list[str]]:
    """The cells of every table row of a page."""
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    cells = (re.split(r"(?<!\\)\|", line.strip("|")) for line in lines if line.startswith("| "))
    return [[cell.strip().strip("`").replace("\\|", "|") for cell in row] for row in cells]


def test_the_metric_table_is_the_catalogue() -> None:
    wanted = [[m.name, m.unit, str(m.metric_class), str(m.family), str(m.rule), m.gate, m.title] for m in METRICS]
    assert rows("docs/metrics.md")[1:] == wanted


def test_the_readme_tells_the_story_that_the_demo_expects() -> None:
    told = [(row[1], row[2]) for row in rows("README.md")[1:]]
    assert told == [(chapter.subject, expected_words(chapter.expected)) for chapter in chapters()]


def test_every_setting_is_documented_with_its_meaning_and_no_other() -> None:
    documented = {row[0]: row[2] for row in rows("docs/operations.md") if row[0].startswith("ULPWATCH_")}
    fields = {**Settings.model_fields, **RunnerSettings.model_fields}
    assert documented == {f"ULPWATCH_{name.upper()}": field.description for name, field in fields.items()}


def test_every_key_of_a_target_file_is_documented_and_no_other() -> None:
    tables = {"kernels": wire.TargetKernel, "python": wire.TargetPython, "require": wire.TargetRequire}
    keys = {name for name in wire.Target.model_fields if name not in tables}
    keys |= {f"{table}.{name}" for table, model in tables.items() for name in model.model_fields}
    assert {row[0] for row in rows("docs/targets.md")[1:]} == keys


def test_every_state_is_documented_and_no_other() -> None:
    states = [row for row in rows("docs/method.md") if len(row) == 3 and row[2] in ("0", "1", "2")]
    assert {row[0] for row in states} == {str(state) for state in State}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_command_line_in_the_docs_exists_with_its_options(page: Path) -> None:
    for words in re.findall(r"\bulpwatch ((?:[a-z]+ )*[a-z]+[^\n`]*)", _code(page)):
        _resolve(words.split())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_path_named_in_the_docs_exists(page: Path) -> None:
    folders = "service|runners|dashboards|migrations|targets|benchmarks|docs|tests"
    named = set(re.findall(rf"\b((?:{folders})/[\w./-]*\w)", page.read_text(encoding="utf-8")))
    assert not [path for path in sorted(named) if not (ROOT / path).exists()]


def _code(page: Path) -> str:
    """The code of a page: fenced blocks and inline spans, a line each."""
    text = page.read_text(encoding="utf-8")
    fenced = re.findall(r"```\n(.*?)```", text, re.DOTALL)
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    return "\n".join([*fenced, *inline])


def _resolve(words: list[str]) -> None:
    command = get_command(ulpwatch.app)
    while words and (inner := getattr(command, "commands", {}).get(words[0])):
        command, words = inner, words[1:]
    options = {name for parameter in command.params for name in parameter.opts}
    asked = {word.split("=")[0] for word in words if word.startswith("--")}
    assert asked <= options, f"ulpwatch {command.name} has no {asked - options}"
    assert not hasattr(command, "commands") or not words or words[0].startswith(("-", "#")), f"no command {words[0]}"
