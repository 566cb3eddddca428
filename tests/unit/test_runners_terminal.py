"""What strangers write, as a terminal gets it."""

import io
import logging
import sys

from rich.console import Console

from runners.summary import summary
from runners.terminal import PlainFormatter, plain, plain_document, plain_lines
from service.wire import Result

HOSTILE = "fast\x1b[2K\rpass\n\u202eerof\x9b1m"


def test_what_a_terminal_would_obey_is_shown_instead() -> None:
    assert plain(HOSTILE) == r"fast\x1b[2K\rpass\n\u202eerof\x9b1m"
    assert plain("räk 数 “x” \ud800") == "räk 数 “x” \\ud800"
    assert plain_lines("a\x07\nb") == "a\\x07\nb"


def test_a_document_is_made_plain_at_any_depth() -> None:
    document = {"a": ["x\n", 1, None, {"b": "\x1b"}], "n": 0.5}
    assert plain_document(document) == {"a": ["x\\n", 1, None, {"b": "\\x1b"}], "n": 0.5}


def test_a_table_of_results_moves_no_cursor() -> None:
    now = "2026-01-05T08:00:00Z"
    broken = {"kernel": "fused", "case": {"tokens": 1, "vocabulary": 8}, "outcome": "raised"}
    result = Result.model_validate(
        {
            "attempt": "00000000-0000-4000-8000-000000000001",
            "target": "tiny",
            "commit": {"sha": "a" * 40, "parents": [], "committed_at": now},
            "suite": "demo",
            "environment": {"device_class": "cpu", "device": "test", "exact": {}, "numeric": {}, "timing": {}},
            "started_at": now,
            "finished_at": now,
            "units": {},
            "measurements": [broken | {"notes": {"outcome": HOSTILE}}],
        }
    )
    stream = io.StringIO()
    Console(file=stream, width=300).print(summary(result))
    assert plain(HOSTILE) in stream.getvalue()
    assert "\x1b" not in stream.getvalue()


def test_a_log_record_is_one_line_and_a_traceback_moves_no_cursor() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(PlainFormatter("%(levelname)s %(message)s"))
    log = logging.Logger("test")
    log.addHandler(handler)
    log.warning("job %d: %s", 1, HOSTILE)
    try:
        raise ValueError("\x1b[31m")
    except ValueError:
        log.error("broke", exc_info=sys.exc_info())
    lines = stream.getvalue().splitlines()
    assert lines[0] == f"WARNING job 1: {plain(HOSTILE)}"
    assert lines[-1] == r"ValueError: \x1b[31m"
