"""The long-run noise of a timing history, against values worked out by hand."""

import numpy as np
import pytest

from service.detection.noise import (
    QUIETEST,
    clip_outliers,
    history_deviation,
    logs,
    long_run_deviation,
    residual_deviation,
    robust_deviation,
    running_median,
)


def correlated(seed: int, count: int, correlation: float) -> np.ndarray:
    """Normal noise with a deviation of 1 % and a lag-one correlation."""
    rng = np.random.default_rng(seed)
    noise = [rng.normal()]
    for _ in range(count - 1):
        noise.append(correlation * noise[-1] + rng.normal() * (1 - correlation**2) ** 0.5)
    return 0.01 * np.array(noise)


def test_a_robust_deviation_is_the_scaled_median_distance() -> None:
    assert robust_deviation(np.array([1.0, 2.0, 4.0, 8.0, 100.0]), 4.0) == pytest.approx(1.4826 * 3)


def test_a_running_median_mirrors_the_ends() -> None:
    assert running_median(np.array([1.0, 9.0, 2.0, 3.0, 8.0]), 3).tolist() == [9, 2, 3, 3, 3]


def test_a_running_median_of_a_short_history_takes_a_smaller_window() -> None:
    assert running_median(np.array([1.0, 5.0])).tolist() == [5, 1]
    assert running_median(np.array([7.0])).tolist() == [7]


def test_only_outliers_are_clipped() -> None:
    values = np.array([0.0, 0.01, 0.0, -0.01] * 10)
    spiked = values.copy()
    spiked[20] = 1.0
    clipped = clip_outliers(spiked)
    assert clipped[20] == pytest.approx(3 * 1.4826 * 0.01, rel=0.5)
    assert np.array_equal(np.delete(clipped, 20), np.delete(values, 20))


def test_an_alternating_history_is_as_noisy_as_its_differences() -> None:
    """Blocks of 1 differ by 1, of 3 by 1/3, of 6 by nothing: 1.4826 sqrt(1/2) is the largest estimate."""
    assert long_run_deviation(np.array([0.0, 1.0] * 20)) == pytest.approx(1.4826 * 0.5**0.5)


def test_blocks_of_three_decide_where_they_are_noisier() -> None:
    """0 0 0 1 1 1 ...: single points mostly equal the next, blocks of 3 differ by 1/3, 1/3 or 1, of 6 by nothing."""
    assert long_run_deviation(np.array([0.0, 0, 0, 1, 1, 1] * 20)) == pytest.approx(1.4826 / 3 * 1.5**0.5)


def test_heavy_tails_raise_the_noise_of_residuals() -> None:
    """One of eleven values is 1: of ten differences two are 1, whose mean square is .2."""
    values = np.array([0.0] * 9 + [1.0, 0.0])
    assert long_run_deviation(values, (1,)) == QUIETEST
    assert residual_deviation(values, (1,)) == pytest.approx((2 / 10 / 2) ** 0.5)
    assert residual_deviation(np.zeros(1)) == QUIETEST


def test_a_history_that_never_moves_has_the_least_noise_there_is() -> None:
    assert long_run_deviation(np.zeros(30)) == QUIETEST
    assert long_run_deviation(np.zeros(1)) == QUIETEST


@pytest.mark.parametrize(("correlation", "share"), [(0.0, 1.0), (0.3, 0.9), (0.6, 0.72)])
def test_correlation_raises_the_long_run_noise_nearly_as_theory_says(correlation: float, share: float) -> None:
    """By sqrt((1 + r) / (1 - r)); blocks of 6 see most of it, the less the longer the memory."""
    theory = 0.01 * ((1 + correlation) / (1 - correlation)) ** 0.5
    noise = np.median([history_deviation(correlated(seed, 300, correlation)) for seed in range(40)])
    assert noise == pytest.approx(share * theory, rel=0.08)


def test_a_step_hardly_moves_the_noise() -> None:
    history = correlated(1, 200, 0.0)
    stepped = history + 0.2 * (np.arange(200) >= 100)
    assert history_deviation(stepped) == pytest.approx(history_deviation(history), rel=0.15)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_time_that_is_none_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="positive, finite"):
        logs([1.0, value])
