"""False discovery control, by hand and against scipy."""

import numpy as np
import pytest
from scipy.stats import false_discovery_control

from service.detection.discovery import discoveries


def test_q_is_worked_out_from_the_largest_p_down() -> None:
    """Sorted .005 .01 .03 .04 times 4 / rank: .02 .02 .04 .04."""
    assert [found.q for found in discoveries([0.01, 0.04, 0.03, 0.005])] == pytest.approx([0.02, 0.04, 0.04, 0.02])


def test_q_is_scipys() -> None:
    ps = np.random.default_rng(0).random(50) ** 3
    assert [found.q for found in discoveries(ps)] == pytest.approx(false_discovery_control(ps).tolist())


def test_comparisons_without_a_p_count() -> None:
    ps = [0.001, 0.002]
    padded = false_discovery_control([*ps, *[1.0] * 8]).tolist()
    assert [found.q for found in discoveries(ps, 10)] == pytest.approx(padded[:2])
    assert discoveries([], 10) == []


def test_a_p_without_its_comparison_is_refused() -> None:
    with pytest.raises(ValueError, match="2 p-values of 1"):
        discoveries([0.1, 0.2], 1)


def test_certain_blocks_likely_is_reported() -> None:
    found = discoveries([0.01, 0.05, 0.051], 3)
    assert [(one.blocks, one.is_reported) for one in found] == [(False, True), (False, False), (False, False)]
    assert [(one.blocks, one.is_reported) for one in discoveries([0.01])] == [(True, True)]
