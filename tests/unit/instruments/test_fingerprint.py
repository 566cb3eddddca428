"""Environment: what identifies a series is told apart from what changes by the minute."""

from typing import Any

import pytest
import torch

from runners.instruments import fingerprint
from runners.instruments.fingerprint import cuda_environment, environment
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


H200: dict[str, Any] = {
    "device": "NVIDIA H200",
    "capability": "9.0",
    "multiprocessors": 132,
    "memory_bytes": 150 << 30,
    "cache_bytes": 60 << 20,
    "cuda": "13.0",
    "driver": "580.1",
}


@pytest.mark.parametrize(
    ("change", "ends"),
    [
        ({"device": "NVIDIA H100"}, set(MetricClass)),
        ({"driver": "590.1"}, {MetricClass.TIMING}),
        ({"cuda": "13.1"}, {MetricClass.TIMING}),
        ({"multiprocessors": 66}, {MetricClass.TIMING}),
        ({}, set()),
    ],
    ids=["device", "driver", "cuda", "multiprocessors", "nothing"],
)
def test_a_cuda_device_is_another_environment_for_what_its_change_can_change(
    change: dict[str, str], ends: set[MetricClass], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for facts in (H200, H200 | change):
        monkeypatch.setattr(fingerprint, "device_facts", lambda _device, facts=facts: facts)
        found.append(cuda_environment(torch.device("cuda:0")))
    assert found[0].device_class == "cuda"
    assert {each for each in MetricClass if found[0].identity(each) != found[1].identity(each)} == ends
