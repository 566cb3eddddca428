"""Text of strangers as a terminal and a log can show it: commit subjects, notes, exceptions, what a service answers."""

import logging
from typing import Any


def plain(text: str) -> str:
    """One line that moves no cursor, sets no colour and hides nothing: whatever is not printable is escaped."""
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text)


def plain_lines(text: str) -> str:
    """Several lines, each of them plain."""
    return "\n".join(map(plain, text.split("\n")))


def plain_document(document: Any) -> Any:
    """A JSON document with every string in it plain."""
    if isinstance(document, str):
        return plain(document)
    if isinstance(document, dict):
        return {name: plain_document(value) for name, value in document.items()}
    return [plain_document(value) for value in document] if isinstance(document, list) else document


class PlainFormatter(logging.Formatter):
    """A line a record, whatever its message holds; a traceback keeps its lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the standard library's name
        """The message made plain."""
        record.message = plain(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:  # noqa: N802 - the standard library's name
        """The traceback, each line made plain."""
        return plain_lines(super().formatException(ei))
