"""What of an Authorization header is taken for a token, and what the app wants before it starts."""

import base64
import subprocess
import sys

import pytest
from sqlalchemy.orm import Session

from dashboards.access import presented_token
from dashboards.app import create_app


def basic(text: bytes) -> str:
    return "Basic " + base64.b64encode(text).decode()


@pytest.mark.parametrize(
    ("header", "token"),
    [
        ("Bearer ulpw_x", "ulpw_x"),
        ("bearer ulpw_x", "ulpw_x"),
        (basic(b"anyone:ulpw_x"), "ulpw_x"),
        (basic(b":ulpw:x"), "ulpw:x"),
        (basic(b"ulpw_x"), None),
        (basic(b"anyone:"), None),
        (basic(b"\xff\xfe:x"), None),
        ("Basic !!!", None),
        ("Basic ümlaut", None),
        ("Digest ulpw_x", None),
        ("Bearer", None),
        ("", None),
    ],
)
def test_the_token_is_the_bearer_or_the_password(header: str, token: str | None) -> None:
    assert presented_token(header) == token


def test_pages_that_are_not_public_need_somebody_who_knows_the_tokens() -> None:
    with pytest.raises(ValueError, match="authenticate"):
        create_app(Session, public_read=False, authenticate=None)


def test_the_drawing_engine_and_the_templates_are_loaded_by_the_first_page_only() -> None:
    program = "import sys, dashboards.app; print({'vl_convert', 'jinja2'} & set(sys.modules) or 'neither')"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert loaded.stdout.strip() == "neither"
