"""What stands after a commit: the levels of all series and the rosters of the suites, as values and as compressed
bytes.
"""

import hashlib
import json
import zlib
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field

from service.catalogue import BY_CODE, BY_NAME, MetricClass
from service.detection.levels import Level
from service.detection.rules import NONFINITE

Levels = dict[int, dict[str, dict[str, Level]]]
"""Series -> segment -> metric -> level. Informational metrics (reorder noise, scale) stand there with their value."""


@dataclass(frozen=True, slots=True)
class Roster:
    """The series that a suite measured when it last ran whole. `digest` names what the suite asks; None is unknown."""

    digest: str | None
    series: Set[int]


Rosters = Mapping[tuple[str, str], Roster]
"""By device class and suite."""


@dataclass(frozen=True, slots=True)
class Standing:
    """The levels after a commit, and which series the suites are expected to measure."""

    levels: Levels = field(default_factory=dict)
    rosters: Rosters = field(default_factory=dict)


def expected(known: Rosters, ran: Rosters, required: str) -> set[tuple[str, int]]:
    """(device class, series) that a commit which ran the suites `ran` should have measured.

    Those of the suites that it ran, and of the `required` suite where any commit before it ran that. A suite that was
    never run before cannot stand in for those that were. Only devices that measured count.
    """
    devices = {device for device, _ in ran}
    here = {key for key in known if key[0] in devices}
    wanted = {key for key in here if key in ran or key[1] == required}
    return {(device, series) for device, suite in wanted or here for series in known[device, suite].series}


def carry(known: Rosters, ran: Rosters) -> Rosters:
    """The rosters after a commit: a suite that asks the same as before keeps what it lacked, a changed one does not."""
    changed = redefined(known, ran)
    kept = {key: known[key].series for key in ran if key in known and key not in changed}
    renewed = {key: Roster(roster.digest, roster.series | kept.get(key, set())) for key, roster in ran.items()}
    return {**known, **renewed}


def redefined(known: Rosters, ran: Rosters) -> set[tuple[str, str]]:
    """The suites that ask for something else than they did."""
    return {
        key
        for key, roster in ran.items()
        if key in known and None not in (roster.digest, known[key].digest) and roster.digest != known[key].digest
    }


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


def dump(standing: Standing) -> tuple[str, bytes]:
    """(SHA-256, compressed bytes); equal standings give equal bytes."""
    levels = {
        str(series): {
            segment: {
                str(BY_NAME[metric].code): _encode(level)
                for metric, level in sorted(metrics.items(), key=lambda item: BY_NAME[item[0]].code)
            }
            for segment, metrics in sorted(segments.items())
            if metrics
        }
        for series, segments in sorted(standing.levels.items())
    }
    rosters = [
        [device, suite, roster.digest, sorted(roster.series)]
        for (device, suite), roster in sorted(standing.rosters.items())
    ]
    text = json.dumps({"levels": levels, "rosters": rosters}, separators=(",", ":"), allow_nan=False).encode()
    return hashlib.sha256(text).hexdigest(), zlib.compress(text, 6)


def load(compressed: bytes) -> Standing:
    """The inverse of `dump`. A metric that the catalogue no longer has is dropped."""
    document = json.loads(zlib.decompress(compressed))
    levels = {
        int(series): {
            segment: {
                BY_CODE[int(code)].name: _decode(level) for code, level in metrics.items() if int(code) in BY_CODE
            }
            for segment, metrics in segments.items()
        }
        for series, segments in document["levels"].items()
    }
    rosters = {
        (device, suite): Roster(digest, frozenset(series)) for device, suite, digest, series in document["rosters"]
    }
    return Standing(levels, rosters)


def _encode(level: Level) -> object:
    """Mostly an accepted value alone, stored as a number; null is a value that is not finite."""
    if not level.opened and level.pending is None and not level.lapsed:
        return _number(level.accepted)
    opened = [[_number(value), culprit] for value, culprit in level.opened]
    return [_number(level.accepted), opened, level.pending, level.lapsed]


def _decode(stored: object) -> Level:
    if not isinstance(stored, list):
        return Level(_value(stored))
    accepted, opened, pending, lapsed = stored
    return Level(_value(accepted), tuple((_value(value), culprit) for value, culprit in opened), pending, lapsed)


def _number(value: float) -> float | None:
    return None if value == NONFINITE else value


def _value(number: object) -> float:
    return NONFINITE if number is None else float(str(number))
