"""Device time on a device that is played here: every call of a kernel moves its clocks by a known amount."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import pytest
import torch
import torch.distributed as dist

from runners.instruments.cuda_timing import DeviceTimes, escape_fault, measure_device_time
from runners.instruments.stopping import StoppingRule
from runners.instruments.subject import Options, Subject
from runners.kernels.inputs import Inputs, make_inputs

RULE = StoppingRule(least=4, most=20, relative_error=0.003, seconds=2.0)


@dataclass
class PlayedDevice:
    """A device whose stream is as far as `stream`, and all of it as far as `whole`, in seconds; so is the host's clock
    once it has waited for them."""

    cache_bytes: int = 0
    memory_bytes_per_second: float | None = None
    throttled: Iterator[bool | None] = field(default_factory=lambda: cycle([None]))
    stream: float = 0.0
    whole: float = 0.0
    host: float = 0.0
    is_cold: bool = False
    evictions: int = 0

    def work(self, seconds: float, *, elsewhere: float = 0.0) -> None:
        self.whole = max(self.whole, self.stream + elsewhere, self.stream + seconds)
        self.stream += seconds
        self.is_cold = False

    def evict(self) -> None:
        self.evictions += 1
        self.work(1e-3)
        self.is_cold = True

    def mark(self) -> float:
        return self.stream

    def wait(self, mark: float) -> None:
        self.host = max(self.host, mark)

    def wait_for_all(self) -> None:
        self.host = self.stream = self.whole = max(self.host, self.stream, self.whole)

    def seconds_between(self, one: float, other: float) -> float:
        return other - one

    def now(self) -> float:
        return self.host

    def is_throttled(self) -> bool | None:
        return next(self.throttled)


@dataclass
class Watched:
    """A kernel that takes `forward` and `backward` seconds of a played device, and what it saw."""

    device: PlayedDevice
    forward: Callable[[], float]
    backward: float = 0.0
    elsewhere: float = 0.0
    calls: list[tuple[int, bool]] = field(default_factory=list)
    was_cold: list[bool] = field(default_factory=list)

    @property
    def subject(self) -> Subject:
        return Subject("watched", self.run)

    def run(self, logits: torch.Tensor, targets: torch.Tensor, **keywords: Any) -> Any:
        self.calls.append((logits.data_ptr(), logits.requires_grad))
        self.was_cold.append(self.device.is_cold)
        self.device.work(self.forward(), elsewhere=self.elsewhere)
        return _Backward.apply(logits, self), None


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, watched: Watched) -> torch.Tensor:
        ctx.watched, ctx.shape = watched, logits.shape
        return logits.sum(1)

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.watched.device.work(ctx.watched.backward)
        return torch.zeros(ctx.shape), None


def _times(device: PlayedDevice, watched: Watched, *, tokens: int = 8, rule: StoppingRule = RULE) -> DeviceTimes:
    inputs = make_inputs(tokens=tokens, vocabulary=64)
    return measure_device_time(watched.subject, inputs, Options("off"), device, rule=rule)


def _steady(device: PlayedDevice, seconds: float, **more: Any) -> Watched:
    return Watched(device, lambda: seconds, **more)


def test_a_sample_is_what_the_stream_took_between_two_marks_and_no_eviction() -> None:
    device = PlayedDevice()
    times = _times(device, _steady(device, 2e-3, backward=3e-3))
    assert times.fault is None
    assert times.samples == {
        "forward_device_seconds": pytest.approx([2e-3] * 4),
        "train_forward_device_seconds": pytest.approx([2e-3] * 4),
        "step_device_seconds": pytest.approx([5e-3] * 4),
    }


def test_every_sample_begins_with_a_cold_cache_another_input_and_a_fresh_graph() -> None:
    device = PlayedDevice()
    watched = _steady(device, 1e-3)
    _times(device, watched)
    assert watched.was_cold == [True] * 24 + [False] * 3  # the last ones are those that nobody times
    addresses = [address for address, _ in watched.calls[:24]]
    assert len(set(addresses)) == 3
    assert all(len(set(addresses[at : at + 3])) == 3 for at in (4, 12, 20))  # after warm-up and pilot of a phase
    graphs = [graph for _, graph in watched.calls[:24]]
    assert graphs == [False] * 8 + [True] * 16


@pytest.mark.parametrize("spoilt", ["forward", "train_forward", "step"])
def test_a_kernel_that_gives_something_else_while_it_is_timed_has_no_valid_times(spoilt: str) -> None:
    device = PlayedDevice()
    gradient = torch.ones(8, 64)

    class Cheating(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
            cheats = device.is_cold and spoilt == ("train_forward" if ctx.needs_input_grad[0] else "forward")
            ctx.is_cold = device.is_cold
            device.work(1e-3)
            return torch.zeros(8) if cheats else logits.sum(1)

        @staticmethod
        def backward(ctx: Any, upstream: torch.Tensor) -> torch.Tensor:
            return 0 * gradient if ctx.is_cold and spoilt == "step" else gradient

    subject = Subject("cheats", lambda logits, targets, **keywords: (Cheating.apply(logits), None))
    inputs = make_inputs(tokens=8, vocabulary=64)
    times = measure_device_time(subject, inputs, Options("off"), device, rule=RULE)
    assert times == DeviceTimes({}, f"a timed call of {spoilt} does not give what a call that nobody times gives")


def test_reordered_sums_are_no_cheating() -> None:
    device = PlayedDevice()
    noise = cycle([1 + 1e-5, 1 - 1e-5])
    subject = Subject("noisy", lambda logits, targets, **keywords: (logits.sum(1) * next(noise), None))
    inputs = make_inputs(tokens=8, vocabulary=64)
    assert measure_device_time(subject, inputs, Options("off"), device, rule=RULE).fault is None


def test_inputs_that_change_meanwhile_make_the_times_invalid() -> None:
    device = PlayedDevice()

    def run(logits: torch.Tensor, targets: torch.Tensor, **keywords: Any) -> Any:
        result = logits.sum(1)
        if device.host > 0.05:
            logits.detach()[3, 5] += 1
        return result, None

    inputs = make_inputs(tokens=8, vocabulary=64)
    times = measure_device_time(Subject("late", run), inputs, Options("off"), device, rule=RULE)
    assert times.fault is None
    device.host = 1.0
    times = measure_device_time(Subject("late", run), inputs, Options("off"), device, rule=RULE)
    assert times == DeviceTimes({}, "the inputs are not what they were before the timed calls")


def test_sampling_goes_on_until_it_is_steady() -> None:
    device = PlayedDevice()
    unsteady = cycle([1e-3, 1.5e-3])
    rule = StoppingRule(least=4, most=1000, relative_error=0.02, seconds=100.0)
    samples = _times(device, Watched(device, lambda: next(unsteady)), rule=rule).samples["forward_device_seconds"]
    assert 90 < len(samples) < 120  # 20 % of spread over the root of n falls to 2 % at 100


def test_sampling_ends_when_its_time_is_up() -> None:
    device = PlayedDevice()
    rule = StoppingRule(least=30, most=1000, relative_error=0.003, seconds=0.5)
    assert len(_times(device, _steady(device, 0.1), rule=rule).samples["forward_device_seconds"]) == 5


def test_a_short_call_is_timed_in_batches_and_told_a_call() -> None:
    device = PlayedDevice()
    watched = _steady(device, 4e-6)
    assert _times(device, watched).samples["forward_device_seconds"] == pytest.approx([4e-6] * 4)
    assert watched.was_cold.count(True) < len(watched.calls) / 2


def test_samples_on_throttled_clocks_are_dropped_and_counted() -> None:
    device = PlayedDevice(throttled=cycle([True, False, False, False, False, False]))
    times = _times(device, _steady(device, 1e-3))
    assert times.fault is None
    assert times.samples["throttled_share"] == [3 / 15]
    assert len(times.samples["forward_device_seconds"]) == 4


def test_too_many_of_them_make_the_times_invalid_and_the_share_says_why() -> None:
    device = PlayedDevice(throttled=cycle([True, False]))
    times = _times(device, _steady(device, 1e-3))
    assert times.fault is not None
    assert "samples ran on throttled clocks, limit 20%" in times.fault
    assert set(times.samples) == {"throttled_share"}


def test_clocks_that_are_always_throttled_end_the_sampling_too() -> None:
    device = PlayedDevice(throttled=cycle([True]))
    times = _times(device, _steady(device, 1e-3))
    assert times.fault == "60 of 60 samples ran on throttled clocks, limit 20%"
    assert times.samples == {"throttled_share": [1.0]}


def test_a_share_of_the_roofline_is_the_least_traffic_over_the_time() -> None:
    device = PlayedDevice(memory_bytes_per_second=1e6)  # U is 2048 bytes: 2.048 ms
    times = _times(device, _steady(device, 4.096e-3, backward=4.096e-3))
    assert times.fault is None
    assert times.samples["forward_roofline_share"] == pytest.approx([0.5])
    assert times.samples["step_roofline_share"] == pytest.approx([0.75])


def test_a_time_below_what_memory_allows_is_invalid() -> None:
    device = PlayedDevice(memory_bytes_per_second=1e6)
    times = _times(device, _steady(device, 1.8e-3, backward=9e-3))
    assert times.fault == "faster than memory allows: 1.14 of the roofline, limit 1.02"
    assert set(times.samples) == {"forward_roofline_share", "step_roofline_share"}


def test_a_cache_that_holds_the_logits_bounds_the_first_pass_alone() -> None:
    device = PlayedDevice(memory_bytes_per_second=1e6, cache_bytes=1 << 20)
    times = _times(device, _steady(device, 4.096e-3, backward=0.0))
    assert times.samples["step_roofline_share"] == pytest.approx([0.5])


def test_work_on_the_current_stream_does_not_escape() -> None:
    device = PlayedDevice()
    inputs = make_inputs(tokens=8, vocabulary=64)
    assert escape_fault(_steady(device, 1e-3).subject, inputs, Options("off"), device) is None


@pytest.mark.parametrize(("elsewhere", "escapes"), [(1.04e-3, False), (1.06e-3, True)])
def test_work_that_outlasts_the_current_stream_escapes(elsewhere: float, escapes: bool) -> None:
    device = PlayedDevice()
    inputs = make_inputs(tokens=8, vocabulary=64)
    fault = escape_fault(_steady(device, 1e-3, elsewhere=elsewhere).subject, inputs, Options("off"), device)
    assert fault == ("forward: the device works on for 60 us after its stream's 1000 us" if escapes else None)


@pytest.mark.parametrize("phase", ["forward", "step"])
def test_each_phase_is_watched_for_escapes(phase: str) -> None:
    device = PlayedDevice()

    def run(logits: torch.Tensor, targets: torch.Tensor, **keywords: Any) -> Any:
        device.work(1e-3, elsewhere=5e-3 if logits.requires_grad == (phase == "step") else 0.0)
        return logits.sum(1), None

    inputs = make_inputs(tokens=8, vocabulary=64)
    fault = escape_fault(Subject("aside", run), inputs, Options("off"), device)
    assert fault == f"{phase}: the device works on for 4000 us after its stream's 1000 us"


class TwoRanks:
    """A group of two of which this process plays one; rank 0's numbers are told by the test."""

    def size(self) -> int:
        return 2


def test_ranks_take_as_many_samples_as_rank_0_says(monkeypatch: pytest.MonkeyPatch, inputs: Inputs) -> None:
    def tell(told: list[Any], *, group: Any, group_src: int) -> None:
        assert group_src == 0
        told[0] = (1, 7)

    monkeypatch.setattr(dist, "broadcast_object_list", tell)
    device = PlayedDevice()
    unsteady = cycle([1e-3, 1.5e-3])
    subject = Watched(device, lambda: next(unsteady)).subject
    subject = Subject(subject.name, subject.run)
    group: Any = TwoRanks()
    times = measure_device_time(subject, inputs, Options("off"), device, rule=RULE, group=group)
    assert {len(samples) for samples in times.samples.values()} == {7}
