"""The files that pages refer to: stylesheet, script, icon and the chart library, each at an address that changes with
its content, so that browsers may keep it for ever.
"""

import gzip
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from dashboards.drawing import BUNDLE_VERSION, browser_bundle

STATIC = Path(__file__).parent / "static"
MEDIA_TYPES = {".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml"}
BUNDLE = "vega.js"
FILES = ("style.css", "chart.js", "favicon.svg")


@dataclass(frozen=True, slots=True)
class Asset:
    """One file as it is sent."""

    body: bytes
    compressed: bytes
    media_type: str


@lru_cache
def edition(name: str) -> str:
    """What the address of an asset holds beside its name; KeyError for an unknown name."""
    return BUNDLE_VERSION if name == BUNDLE else hashlib.sha256(_content(name)()).hexdigest()[:12]


@lru_cache
def asset(name: str) -> Asset:
    """An asset by name; KeyError for an unknown name."""
    body = _content(name)()
    return Asset(body, gzip.compress(body, mtime=0), MEDIA_TYPES[Path(name).suffix])


def _content(name: str) -> Callable[[], bytes]:
    if name == BUNDLE:
        return browser_bundle
    if name in FILES:
        return (STATIC / name).read_bytes
    raise KeyError(name)
