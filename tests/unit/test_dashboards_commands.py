"""The commands that pages tell a reader to run exist, with the options that they name."""

import re
from pathlib import Path

import pytest
from typer import Typer
from typer.main import get_command

import dashboards
from ulpwatch import app

TEMPLATES = Path(dashboards.__file__).parent / "templates"


def told() -> list[str]:
    """Every command in a template, with what Jinja fills in replaced by a word."""
    texts = (re.sub(r"{{.*?}}", "WORD", path.read_text()) for path in sorted(TEMPLATES.glob("*.html")))
    return [match for text in texts for match in re.findall(r"\bulpwatch [a-z][^<\n]*", text)]


def test_pages_tell_of_commands() -> None:
    assert len(told()) >= 8


@pytest.mark.parametrize("line", sorted(set(told())))
def test_a_command_that_a_page_tells_of_exists(line: str) -> None:
    assert isinstance(app, Typer)
    command = get_command(app)
    words = line.split()[1:]
    while words and hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    known = {option for parameter in command.params for option in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= known
