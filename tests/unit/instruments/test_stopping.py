"""When to stop taking times, and which of them are not to be believed: one example on each side of every line."""

import math

import pytest

from runners.instruments.stopping import (
    StoppingRule,
    calls_per_sample,
    fixed_count,
    is_enough,
    is_escape,
    least_traffic_bytes,
    relative_standard_error,
    roofline_fault,
    throttling_fault,
)

RULE = StoppingRule(least=30, most=100, relative_error=0.003, seconds=2.0)
NOISY = [1.0, 3.0]


def test_the_relative_standard_error_is_that_of_the_sample() -> None:
    assert relative_standard_error([1.0, 2.0, 3.0]) == pytest.approx(1 / math.sqrt(3) / 2)
    assert relative_standard_error([1.0]) == relative_standard_error([]) == math.inf
    assert relative_standard_error([0.0, 0.0]) == 0.0


@pytest.mark.parametrize(
    ("samples", "elapsed", "wanted"),
    [
        ([1.0] * 29, 0.1, False),  # steady, but too few
        ([1.0] * 30, 0.1, True),
        (NOISY * 15, 0.1, False),  # many enough, but unsteady
        (NOISY * 50, 0.1, True),  # there is a most
        (NOISY * 15, 2.0, True),  # the time is up
        ([1.0], 2.0, True),  # and then it is up with whatever there is
        ([], 2.0, True),
        ([], 0.0, False),
    ],
)
def test_sampling_ends_when_steady_or_out_of_time(samples: list[float], elapsed: float, wanted: bool) -> None:
    assert is_enough(samples, elapsed, RULE) is wanted


def test_steady_is_less_than_three_parts_in_a_thousand() -> None:
    spread = 0.003 * math.sqrt(100) * math.sqrt(99 / 100)  # of +-spread around 1, a hundred times
    just_over, just_under = ([1 - spread * f, 1 + spread * f] * 50 for f in (1.01, 0.99))
    rule = StoppingRule(most=1000)
    assert not is_enough(just_over, 0.0, rule)
    assert is_enough(just_under, 0.0, rule)


@pytest.mark.parametrize(
    ("sample_seconds", "count"), [(1e-3, 30), (2 / 30, 30), (0.1, 20), (0.4, 5), (10.0, 5), (0.0, 30)]
)
def test_a_fixed_count_fits_the_time_limit_but_for_a_least_number(sample_seconds: float, count: int) -> None:
    assert fixed_count(sample_seconds, RULE) == count


@pytest.mark.parametrize(("call_seconds", "calls"), [(1.0, 1), (20e-6, 1), (19e-6, 2), (5e-6, 4), (0, 1000)])
def test_calls_below_20_microseconds_are_batched(call_seconds: float, calls: int) -> None:
    assert calls_per_sample(call_seconds) == calls


@pytest.mark.parametrize(
    ("lag", "stream", "wanted"),
    [(50e-6, 1e-6, False), (51e-6, 1e-6, True), (99e-6, 2e-3, False), (101e-6, 2e-3, True), (51e-6, 2e-3, False)],
)
def test_work_has_escaped_where_it_lags_by_50_microseconds_and_5_percent(
    lag: float, stream: float, wanted: bool
) -> None:
    assert is_escape(lag, stream) is wanted


def test_a_fifth_of_the_samples_may_be_throttled_and_no_more() -> None:
    assert throttling_fault(0, 0) is None
    assert throttling_fault(6, 30) is None
    assert throttling_fault(7, 30) == "7 of 30 samples ran on throttled clocks, limit 20%"


def test_nothing_is_faster_than_memory_allows() -> None:
    assert roofline_fault(1.02) is None
    assert roofline_fault(1.03) == "faster than memory allows: 1.03 of the roofline, limit 1.02"


def test_a_cache_may_serve_every_pass_but_the_first() -> None:
    assert least_traffic_bytes(1000, 1, 100) == 1000
    assert least_traffic_bytes(1000, 3, 100) == 2800
    assert least_traffic_bytes(100, 3, 1000) == 100
