"""Looking back: which change points a history has, and which it has not."""

import itertools
import math

import numpy as np
import pytest

from service.detection.noise import history_deviation, logs
from service.detection.steps import ChangePoint, LookBack, change_points, optimal_partition, step_over_curve, unshared


def noisy(seed: int, count: int = 120, deviation: float = 0.01) -> np.ndarray:
    """A history about 100 without a step."""
    return 100 * np.exp(np.random.default_rng(seed).normal(size=count) * deviation)


def at(index: int) -> ChangePoint:
    return ChangePoint(index, 1.0, 2.0, math.log(2), 9.0, 0.01, 20, 20)


def test_a_clean_step_is_found_with_its_numbers() -> None:
    (point,) = change_points([100.0] * 20 + [103.0] * 20)
    assert (point.index, point.points_before, point.points_after, point.noise) == (20, 20, 20, 0.001)
    assert (point.before, point.after, point.shift) == pytest.approx((100, 103, math.log(1.03)))
    assert point.score == pytest.approx(math.log(1.03) / (0.001 * math.sqrt(1 / 20 + 1 / 20)))


def test_a_step_in_noise_is_found_near_its_place_whichever_way_it_goes() -> None:
    for factor in (1.03, 1 / 1.03):
        (point,) = change_points(noisy(3) * np.where(np.arange(120) < 70, 1, factor))
        assert abs(point.index - 70) <= 2
        assert point.shift == pytest.approx(math.log(factor), rel=0.2)


def test_two_steps_are_two_change_points() -> None:
    values = noisy(5) * np.repeat([1, 1.05, 0.97], 40)
    assert [round(point.index, -1) for point in change_points(values)] == [40, 80]


def test_noise_has_no_change_points() -> None:
    assert sum(len(change_points(noisy(seed))) for seed in range(40)) == 0


def test_outliers_are_no_steps() -> None:
    values = noisy(7)
    values[[30, 31, 90]] *= 1.5
    assert change_points(values) == ()


@pytest.mark.parametrize("seed", [0, 3])
def test_the_noise_that_is_left_about_the_levels_counts_where_it_is_more(seed: int) -> None:
    """Runs of three slow points are too short for levels, and too few to move a median."""
    slow = np.isin(np.arange(400) // 3, np.random.default_rng(seed).choice(130, 10, replace=False) + 1)
    values = noisy(seed, 400) * np.where(np.arange(400) < 200, 1, 1.2) * np.where(slow, 1.1, 1)
    (point,) = change_points(values)
    assert point.index == 200
    assert point.noise > 1.15 * history_deviation(logs(values))


def test_a_ramp_is_no_step() -> None:
    ramp = 100 * np.exp(np.linspace(0, 0.1, 120)) * noisy(9) / 100
    assert change_points(ramp, LookBack(margin=-math.inf)) != ()
    assert change_points(ramp) == ()


def test_a_step_below_the_smallest_that_matters_is_none() -> None:
    assert change_points([100.0] * 20 + [100.4] * 20) == ()
    assert len(change_points([100.0] * 20 + [100.6] * 20)) == 1


@pytest.mark.parametrize("count", [0, 1, 11])
def test_a_history_too_short_to_tell_has_none(count: int) -> None:
    assert change_points([100.0] * count) == ()


def test_a_step_explains_more_than_a_line_by_hand() -> None:
    """Of 0 0 1 1 the step explains all of the sum of squares, 1; the line 2^2 / 5 of it."""
    assert step_over_curve(np.array([0.0, 0, 1, 1]), 2) == pytest.approx(1 - 0.8)
    assert step_over_curve(np.array([0.0, 1, 2, 3]), 2) == pytest.approx(4 - 5)


def test_a_cubic_explains_a_step_of_six_points_but_for_a_little() -> None:
    """Of 0 0 0 1 1 1, whose sum of squares is 1.5: with the contrasts
    -5 -3 -1 1 3 5 and -5 7 4 -4 -7 5 of six points, 9^2 / 70 and 6^2 / 180 are explained."""
    assert step_over_curve(np.array([0.0, 0, 0, 1, 1, 1]), 3, 3) == pytest.approx(1.5 - 81 / 70 - 36 / 180)


def test_a_wave_is_no_step() -> None:
    """One period: a step explains .81 of it, a line .61, a cubic nearly all."""
    wave = noisy(9, 200, 0.005) * np.exp(0.02 * np.sin(np.linspace(0, 2 * np.pi, 200)))
    assert change_points(wave, LookBack(margin=-math.inf)) != ()
    assert change_points(wave) == ()


@pytest.mark.parametrize("shortest", [1, 2, 3])
def test_the_partition_is_the_best_of_all(shortest: int) -> None:
    for seed in range(20):
        values = np.random.default_rng(seed).normal(size=9)
        values[4:] += 2
        assert optimal_partition(values, 1.5, shortest) == best_of_all(values, 1.5, shortest)


def best_of_all(values: np.ndarray, penalty: float, shortest: int) -> list[int]:
    """By trying every partition."""
    count = len(values)
    ways = (
        borders
        for number in range(count)
        for borders in itertools.combinations(range(1, count), number)
        if min(np.diff([0, *borders, count])) >= shortest
    )

    def cost(borders: tuple[int, ...]) -> float:
        pieces = np.split(values, borders)
        return sum(float(((piece - piece.mean()) ** 2).sum()) for piece in pieces) + penalty * len(pieces)

    return list(min(ways, key=cost))


def test_what_the_control_shares_within_one_commit_is_dropped() -> None:
    points = (at(20), at(40), at(60))
    assert unshared(points, (at(21), at(38))) == (at(40), at(60))
    assert unshared(points, ()) == points
