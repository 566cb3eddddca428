"""Environment: what identifies a series is told apart from what changes by the minute."""

import pytest
import torch

from runners.instruments.fingerprint import environment
from service.catalogue import MetricClass


def test_the_environment_is_the_same_from_one_moment_to_the_next() -> None:
    one, other = environment(), environment()
    for metric_class in MetricClass:
        assert one.identity(metric_class) == other.identity(metric_class)


def test_another_number_of_threads_is_another_environment() -> None:
    before = torch.get_num_threads()
    one = environment()
    torch.set_num_threads(before + 1)
    try:
        other = environment()
    finally:
        torch.set_num_threads(before)
    for metric_class in MetricClass:
        assert one.identity(metric_class) != other.identity(metric_class)


def test_flags_that_change_arithmetic_end_numeric_series_only() -> None:
    one = environment()
    torch.use_deterministic_algorithms(True)
    try:
        other = environment()
    finally:
        torch.use_deterministic_algorithms(False)
    assert one.identity(MetricClass.NUMERIC) != other.identity(MetricClass.NUMERIC)
    assert one.identity(MetricClass.EXACT) == other.identity(MetricClass.EXACT)


def test_facts_of_the_moment_are_no_identity() -> None:
    facts = environment()
    assert {"hostname", "load_average"} <= set(facts.volatile)
    assert not set(facts.volatile) & (set(facts.exact) | set(facts.numeric) | set(facts.timing))


def test_another_device_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'cuda:0' has no instruments yet"):
        environment("cuda:0")
