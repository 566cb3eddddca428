"""Cumulative drift: many small losses, each of which passes."""

import math

import numpy as np
import pytest

from service.detection.drift import cumulative_drift


def test_twenty_six_losses_of_one_percent_are_drift_by_the_sixth() -> None:
    values = [100.0] * 12
    for _ in range(5):
        assert not drifted(values)
        values.append(values[-1] * 1.01)
    assert drifted(values)


def test_accepting_a_step_does_not_move_the_reference_but_accepting_the_level_does() -> None:
    values = [100.0] * 40 + [103.0] * 40 + [106.0] * 40
    drift = cumulative_drift(values)
    assert drift
    assert (drift.regressed, drift.best, drift.best_end) == (True, pytest.approx(100), 10)
    assert drift.shift == pytest.approx(math.log(1.06))
    assert not drifted(values, since=80)


def test_a_better_level_becomes_the_reference() -> None:
    assert drifted([100.0] * 40 + [94.0] * 40 + [100.0] * 2)
    assert not drifted([100.0] * 40 + [96.0] * 40 + [100.0] * 2)


def test_the_lowest_of_many_noisy_medians_is_no_reference_by_luck() -> None:
    for seed in range(60):
        assert not drifted(100 * np.exp(np.random.default_rng(seed).normal(size=200) * 0.04))


def test_drift_needs_a_window_and_a_point() -> None:
    assert cumulative_drift([100.0] * 10) is None
    assert cumulative_drift([100.0] * 30, since=20) is None
    assert cumulative_drift([100.0] * 11) is not None


def drifted(values: object, since: int = 0) -> bool:
    drift = cumulative_drift(values, since)
    return drift is not None and drift.regressed
