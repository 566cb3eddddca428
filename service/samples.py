"""Packs a measurement's raw samples into one small byte string, by catalogue code, and back, bit for bit.

Format 1, little-endian: u8 version; then per metric u8 code and u8 layout, the count as a varint unless the layout says
one sample, and the samples. Layout bits 0-1 are the sample's form, bit 2 says that all samples are equal and one is
stored, bit 3 that there is one sample only. Forms: 0 nonfinite (no samples), 1 varint (whole numbers from 0), 2 float32
(where it holds the value exactly), 3 float64.
"""

import struct
from collections.abc import Mapping, Sequence
from itertools import pairwise

from service.catalogue import BY_CODE, BY_NAME

FORMAT = 1
_NONFINITE, _WHOLE, _SINGLE, _DOUBLE = range(4)
_EQUAL, _ALONE = 4, 8
_WHOLE_LIMIT = float(1 << 53)  # below it a float counts every whole number


def pack(values: Mapping[str, Sequence[float]], nonfinite: Sequence[str]) -> bytes:
    """Pack samples by metric name (catalogue units) and the names of metrics that came out NaN or infinite."""
    packed = bytearray([FORMAT])
    for code in sorted(BY_NAME[name].code for name in nonfinite):
        packed += bytes([code, _NONFINITE])
    for code, samples in sorted((BY_NAME[name].code, samples) for name, samples in values.items()):
        form = _form(samples)
        equal = len(samples) > 1 and all(_same(one, other) for one, other in pairwise(samples))
        packed += bytes([code, form | (_EQUAL if equal else 0) | (_ALONE if len(samples) == 1 else 0)])
        if len(samples) != 1:
            packed += _varint(len(samples))
        packed += _encode(samples[:1] if equal else samples, form)
    return bytes(packed)


def unpack(packed: bytes) -> tuple[dict[str, tuple[float, ...]], tuple[str, ...]]:
    """Samples by metric name, and the names of the nonfinite metrics. ValueError if the format is not known."""
    if not packed or packed[0] != FORMAT:
        raise ValueError(f"packed samples of unknown format {packed[:1].hex() or 'none'}: written by a newer version?")
    values: dict[str, tuple[float, ...]] = {}
    nonfinite: list[str] = []
    at = 1
    while at < len(packed):
        name, layout = BY_CODE[packed[at]].name, packed[at + 1]
        at += 2
        if layout == _NONFINITE:
            nonfinite.append(name)
            continue
        count, at = (1, at) if layout & _ALONE else _read_varint(packed, at)
        stored, at = _decode(packed, at, form=layout & 3, count=1 if layout & _EQUAL else count)
        values[name] = stored * count if layout & _EQUAL else stored
    return values, tuple(nonfinite)


def _same(one: float, other: float) -> bool:
    return struct.pack("<d", one) == struct.pack("<d", other)


def _form(samples: Sequence[float]) -> int:
    """The smallest form that holds every sample exactly; -0.0 is no whole number here."""
    if all(0 <= sample < _WHOLE_LIMIT and _same(float(int(sample)), sample) for sample in samples):
        return _WHOLE
    return _SINGLE if all(_fits_single(sample) for sample in samples) else _DOUBLE


def _fits_single(sample: float) -> bool:
    try:
        return _same(struct.unpack("<f", struct.pack("<f", sample))[0], sample)
    except OverflowError:
        return False


def _encode(samples: Sequence[float], form: int) -> bytes:
    if form == _WHOLE:
        return b"".join(_varint(int(sample)) for sample in samples)
    return struct.pack(f"<{len(samples)}{'f' if form == _SINGLE else 'd'}", *samples)


def _decode(packed: bytes, at: int, *, form: int, count: int) -> tuple[tuple[float, ...], int]:
    if form == _WHOLE:
        whole = []
        for _ in range(count):
            number, at = _read_varint(packed, at)
            whole.append(float(number))
        return tuple(whole), at
    layout = f"<{count}{'f' if form == _SINGLE else 'd'}"
    return struct.unpack_from(layout, packed, at), at + struct.calcsize(layout)


def _varint(number: int) -> bytes:
    """Seven bits a byte, least significant first, the top bit set on all but the last byte."""
    encoded = bytearray()
    while number >= 0x80:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def _read_varint(packed: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        byte = packed[at]
        number |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return number, at
        shift += 7
