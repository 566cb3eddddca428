"""Bytes against size over the grid, by hand."""

import pytest

from service.detection.slopes import bytes_per_element, compare_slopes

SIZES = [(1, 1000), (4, 1000), (4, 8000)]


def line(intercept: float, slope: float) -> dict[tuple[int, int], float]:
    return {case: intercept + slope * case[0] * case[1] for case in SIZES}


def test_the_slope_is_a_weighted_least_squares_one() -> None:
    """(1, 1) (2, 2) (4, 5) with weights 1, 1/4, 1/16: means 4/3 and 29/21, slope (5/6) / (2/3)."""
    assert bytes_per_element({(1, 1): 1.0, (1, 2): 2.0, (1, 4): 5.0}) == pytest.approx(1.25)
    assert bytes_per_element(line(4096, 8)) == pytest.approx(8)


@pytest.mark.parametrize(("slope", "regressed"), [(8.0, False), (8.07, False), (8.09, True), (7.0, False)])
def test_more_than_one_percent_more_bytes_an_element_regresses(slope: float, regressed: bool) -> None:
    change = compare_slopes(line(4096, 8), line(4096, slope))
    assert change
    assert (change.regressed, change.sizes) == (regressed, 3)


def test_a_constant_that_grows_is_no_slope() -> None:
    change = compare_slopes(line(0, 8), line(65536, 8))
    assert change
    assert not change.regressed


def test_a_kernel_that_needed_nothing_regresses_by_any_slope() -> None:
    change = compare_slopes(line(512, 0), line(512, 0.5))
    assert change
    assert change.regressed


def test_only_shared_cases_count_and_two_sizes_are_too_few() -> None:
    before = line(0, 8)
    assert compare_slopes(before, {SIZES[0]: 1.0, SIZES[1]: 2.0}) is None
    change = compare_slopes(before, {**line(0, 8), (9, 9): 1e9})
    assert change
    assert change.after == pytest.approx(8)
