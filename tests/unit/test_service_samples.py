"""Packing loses nothing and stays small."""

import math
import struct

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from service.catalogue import BY_NAME, METRICS
from service.samples import pack, unpack

NAMES = sorted(BY_NAME)
SAMPLES = st.one_of(
    st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=9),
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=9),
    st.lists(st.integers(0, 1 << 60).map(float), min_size=1, max_size=9),
    st.tuples(st.floats(allow_nan=False, allow_infinity=False), st.integers(2, 300)).map(
        lambda pair: [pair[0]] * pair[1]
    ),
)


def _bits(samples: object) -> bytes:
    assert isinstance(samples, list | tuple)
    return struct.pack(f"<{len(samples)}d", *samples)


@given(st.dictionaries(st.sampled_from(NAMES), SAMPLES), st.sets(st.sampled_from(NAMES)))
@example({"g_scale_lp": [-1.0]}, set())
@example({"g_scale_lp": [0.0, -0.0]}, set())
@example({"step_peak_bytes": [2.0**53, 2.0**53 - 1]}, set())
def test_every_bit_of_every_sample_survives(values: dict[str, list[float]], nonfinite: set[str]) -> None:
    nonfinite -= set(values)
    unpacked, names = unpack(pack(values, sorted(nonfinite)))
    assert {name: _bits(samples) for name, samples in unpacked.items()} == {
        name: _bits(samples) for name, samples in values.items()
    }
    assert set(names) == nonfinite


@given(st.permutations([(name, [1.5, 2.5]) for name in NAMES[:4]]))
def test_the_order_of_metrics_makes_no_difference(items: list[tuple[str, list[float]]]) -> None:
    assert pack(dict(items), []) == pack(dict(sorted(items)), [])


def test_three_metrics_with_one_sample_take_less_than_75_bytes() -> None:
    values = {"step_peak_bytes": [151_936 * 8192 * 4.0], "g_rel_l2_lp": [math.pi * 1e-8], "ent_abs_max": [math.e]}
    assert len(pack(values, [])) <= 32


def test_a_whole_quick_measurement_takes_less_than_a_kibibyte() -> None:
    values = {metric.name: [math.pi * metric.code] for metric in METRICS}
    assert len(pack(values, [])) <= 1024


def test_the_empty_measurement_packs() -> None:
    assert unpack(pack({}, [])) == ({}, ())


@pytest.mark.parametrize("packed", [b"", b"\x02", b"\xff\x01"])
def test_an_unknown_format_is_refused(packed: bytes) -> None:
    with pytest.raises(ValueError, match="unknown format"):
        unpack(packed)


def test_the_bytes_of_format_1_are_these_for_ever() -> None:
    values = {"step_peak_bytes": [2097152.0], "operations": [24.0, 25.0], "lp_abs_max": [0.1], "g_scale_lp": [-0.5]}
    packed = bytes.fromhex("01 1500 020980808001 0601021819 140b9a9999999999b93f 2d0a000000bf")
    assert pack(values, ["ent_abs_max"]) == packed
    assert unpack(packed) == ({name: tuple(samples) for name, samples in values.items()}, ("ent_abs_max",))
