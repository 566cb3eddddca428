"""What the newest points of a history say: suspects for a paired job, and steps seen online."""

import math

import numpy as np
import pytest

from service.detection.noise import history_deviation, logs
from service.detection.screen import newest_step, surprise


def noisy(seed: int, count: int = 120, deviation: float = 0.01) -> np.ndarray:
    """A history about 100 without a step."""
    return 100 * np.exp(np.random.default_rng(seed).normal(size=count) * deviation)


def stepped(seed: int, size: float, after: int) -> np.ndarray:
    """The same, its last points at another level."""
    values = noisy(seed)
    values[-after:] *= 1 + size
    return values


HISTORY = [100.0, 102.0, 98.0, 101.0, 99.0] * 6
"""Centre 100; scale 4 / 2.563 by its deciles, which is more than 1.4826 by its median distance."""


def test_a_surprise_names_its_numbers() -> None:
    found = surprise([*HISTORY, 104.0])
    assert found
    assert (found.value, found.centre, found.points_before, found.points_after) == (104, 100, 30, 1)
    assert found.scale == pytest.approx(4 / 2.563)
    assert found.limit == pytest.approx(2.25 * 4 / 2.563 * math.sqrt(1 + 1.57 / 30))


@pytest.mark.parametrize(("value", "is_suspect"), [(103.5, False), (103.7, True), (96.5, False), (96.3, True)])
def test_one_point_is_suspect_beyond_the_limit_on_either_side(value: float, is_suspect: bool) -> None:
    found = surprise([*HISTORY, value])
    assert found
    assert found.is_suspect is is_suspect


def test_several_points_are_suspect_where_one_is_not() -> None:
    """The limit of one is 3.6, of the median of three 2.75 x 1.56 x sqrt(1/3 + 1.57/30) = 2.67."""
    one, three = surprise([*HISTORY, 102.8]), surprise([*HISTORY, 102.8, 102.8, 102.8])
    assert one
    assert three
    assert not one.is_suspect
    assert three.is_suspect
    assert three.points_after >= 3


def test_a_quiet_history_asks_for_one_and_a_half_percent() -> None:
    verdicts = [surprise([100.0] * 20 + [value]) for value in (101.4, 101.6)]
    assert [found and found.is_suspect for found in verdicts] == [False, True]


def test_half_a_microsecond_is_not_suspect() -> None:
    verdicts = [surprise([1e-6] * 20 + [value]) for value in (1.4e-6, 1.6e-6)]
    assert [found and found.is_suspect for found in verdicts] == [False, True]


def test_eight_points_are_needed_before() -> None:
    assert surprise([100.0] * 8) is None
    assert surprise([]) is None
    assert surprise([100.0] * 9) is not None


def test_a_step_is_seen_within_a_few_commits_at_its_place() -> None:
    found = newest_step(stepped(2, 0.05, 5))
    assert found
    assert (found.is_step, found.index, found.points_after, found.points_before) == (True, 115, 5, 60)
    assert found.shift == pytest.approx(math.log(1.05), rel=0.2)
    assert found.after / found.before == pytest.approx(math.exp(found.shift))


def test_three_points_are_too_few_however_large_the_step() -> None:
    verdicts = [newest_step(stepped(2, 1.0, after)) for after in (1, 2, 3)]
    assert [found and found.is_step for found in verdicts] == [False, False, False]


def test_noise_and_outliers_are_no_steps() -> None:
    for seed in range(40):
        values = noisy(seed)
        values[[-2, -7, -20]] *= 1.4
        found = newest_step(values)
        assert found
        assert not found.is_step


def test_a_level_with_runs_of_slow_points_is_noisier_than_its_median_says() -> None:
    values = noisy(2)
    for start in (65, 80, 95, 108):
        values[start : start + 3] *= 1.1
    found = newest_step(values)
    assert found
    assert found.noise > 1.2 * history_deviation(logs(values))


def test_a_step_that_is_known_is_not_seen_again() -> None:
    values = stepped(4, 0.05, 20)
    found, again = newest_step(values), newest_step(values, since=100)
    assert found
    assert again
    assert (found.is_step, found.index, again.is_step) == (True, 100, False)


def test_a_history_that_never_moved_shows_its_step_with_its_true_levels() -> None:
    found = newest_step([100.0] * 40 + [103.0] * 6)
    assert found
    assert found.is_step
    assert (found.index, found.before, found.after) == (40, pytest.approx(100), pytest.approx(103))


def test_slow_drift_is_no_step() -> None:
    found = newest_step(noisy(6) * np.exp(np.linspace(0, 0.15, 120)))
    assert found
    assert found.score > 5.0
    assert not found.is_step


def test_twelve_points_of_the_level_are_needed() -> None:
    assert newest_step([100.0] * 11) is None
    assert newest_step([100.0] * 12) is not None
    assert newest_step([100.0] * 30, since=19) is None
