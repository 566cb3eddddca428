"""The levels of all series after a commit, as plain dicts and as compressed bytes. Decides nothing."""

import hashlib
import json
import zlib
from collections.abc import Iterator

from service.catalogue import BY_CODE, BY_NAME, MetricClass
from service.detection.levels import Level
from service.detection.rules import NONFINITE

Levels = dict[int, dict[str, dict[str, Level]]]
"""Series -> segment -> metric -> level. Informational metrics (reorder noise, scale) stand there with their value."""


def segment(device_class: str, identity: str, metric_class: MetricClass, inputs_digest: str | None) -> str:
    """The name of the stretch within which values of a class may be compared.

    It holds the device class, the environment's identity for the class, and for errors the hash of the inputs: other
    inputs make other errors, which are not compared.
    """
    parts = [device_class, identity[:16]]
    parts += [inputs_digest[:16]] if metric_class is MetricClass.NUMERIC and inputs_digest else []
    return "/".join(parts)


def device_class(segment: str) -> str:
    """The device class that a segment belongs to."""
    return segment.partition("/")[0]


def open_levels(levels: Levels) -> Iterator[tuple[int, str, str]]:
    """(series, metric, culprit) of every level that an open finding stands for."""
    for series, segments in levels.items():
        for metrics in segments.values():
            for metric, level in metrics.items():
                for _, culprit in level.opened:
                    yield series, metric, culprit


def dump(levels: Levels) -> tuple[str, bytes]:
    """(SHA-256, compressed bytes); equal levels give equal bytes."""
    document = {
        str(series): {
            segment: {
                str(BY_NAME[metric].code): _encode(level)
                for metric, level in sorted(metrics.items(), key=lambda item: BY_NAME[item[0]].code)
            }
            for segment, metrics in sorted(segments.items())
            if metrics
        }
        for series, segments in sorted(levels.items())
    }
    text = json.dumps(document, separators=(",", ":"), allow_nan=False).encode()
    return hashlib.sha256(text).hexdigest(), zlib.compress(text, 6)


def load(compressed: bytes) -> Levels:
    """The inverse of `dump`. A metric that the catalogue no longer has is dropped."""
    document = json.loads(zlib.decompress(compressed))
    return {
        int(series): {
            segment: {
                BY_CODE[int(code)].name: _decode(level) for code, level in metrics.items() if int(code) in BY_CODE
            }
            for segment, metrics in segments.items()
        }
        for series, segments in document.items()
    }


def _encode(level: Level) -> object:
    """Mostly an accepted value alone, stored as a number; null is a value that is not finite."""
    if not level.opened and level.pending is None and level.measured:
        return _number(level.accepted)
    opened = [[_number(value), culprit] for value, culprit in level.opened]
    return [_number(level.accepted), opened, level.pending, level.measured]


def _decode(stored: object) -> Level:
    if not isinstance(stored, list):
        return Level(_value(stored))
    accepted, opened, pending, measured = stored
    return Level(_value(accepted), tuple((_value(value), culprit) for value, culprit in opened), pending, measured)


def _number(value: float) -> float | None:
    return None if value == NONFINITE else value


def _value(number: object) -> float:
    return NONFINITE if number is None else float(str(number))
