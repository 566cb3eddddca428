"""Timing: raw samples on new inputs, with a fresh graph each; no test looks at a clock."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from runners.instruments import timing
from runners.instruments.subject import Options, Subject
from runners.instruments.timing import compilations, first_call_seconds, measure_time
from runners.kernels.inputs import Inputs
from runners.kernels.registry import kernel
from service.catalogue import BY_NAME, MetricClass


def test_each_repetition_gives_one_sample_of_each_time_and_of_the_ratio(clean: Subject, inputs: Inputs) -> None:
    samples = measure_time(clean, inputs, Options(), repetitions=4)
    times = {f"{phase}_{clock}_seconds" for phase in ("forward", "train_forward", "step") for clock in ("cpu", "wall")}
    assert set(samples) == times | {"step_ratio_to_legacy"}
    assert all(BY_NAME[name].metric_class is MetricClass.TIMING for name in samples)
    assert all(len(values) == 4 and min(values) >= 0 for values in samples.values())


def test_the_ratio_is_to_legacy_on_the_same_inputs_and_whoever_begins_takes_turns(
    clean: Subject, inputs: Inputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, int]] = []
    clock = itertools.count()

    def slow(name: str, seconds: int, run: Any) -> Any:
        def watched(logits: torch.Tensor, targets: torch.Tensor, **keywords: Any) -> Any:
            calls.append((name, logits.data_ptr()))
            for _ in range(seconds):
                next(clock)
            return run(logits, targets, **keywords)

        return watched

    legacy = replace(kernel("legacy"), run=slow("legacy", 9, kernel("legacy").run))
    monkeypatch.setattr(timing, "kernel", {"legacy": legacy}.__getitem__)
    monkeypatch.setattr(timing.time, "process_time", lambda: float(next(clock)))
    samples = measure_time(Subject("mine", slow("mine", 4, clean.run)), inputs, Options(), repetitions=3)

    assert calls[0][0] == "legacy"  # its warm-up
    assert [name for name, _ in calls[1:]] == [
        "mine",
        "mine",
        "legacy",
        "mine",
        "legacy",
        "mine",
        "mine",
        "mine",
        "legacy",
    ]
    for one, other in ((2, 3), (5, 6), (8, 9)):
        assert calls[one][1] == calls[other][1], "both steps of a repetition have the same inputs"
    # Each reading of the clock is a second too: three to a step, the middle one shared.
    assert samples["step_ratio_to_legacy"] == [(4 + 2) / (9 + 2)] * 3


def test_the_first_call_is_one_forward_and_backward(clean: Subject, inputs: Inputs) -> None:
    upstreams: list[int] = []

    def run(logits: torch.Tensor, targets: torch.Tensor, **keywords: Any) -> Any:
        log_prob, entropy = clean.run(logits, targets, **keywords)
        log_prob.register_hook(lambda upstream: upstreams.append(len(upstream)))
        return log_prob, entropy

    before = inputs.logits.clone()
    assert first_call_seconds(Subject("watched", run), inputs, Options()) > 0
    assert upstreams == [8]
    assert torch.equal(inputs.logits, before)


def test_a_step_holds_its_forward(clean: Subject, inputs: Inputs) -> None:
    samples = measure_time(clean, inputs, Options(), repetitions=3)
    for step, forward in zip(samples["step_wall_seconds"], samples["train_forward_wall_seconds"], strict=True):
        assert step >= forward


def test_every_call_sees_new_inputs_and_forward_alone_builds_no_graph(clean: Subject, inputs: Inputs) -> None:
    seen: list[bool] = []
    contents: set[bytes] = {inputs.logits.numpy().tobytes()}

    def run(logits: torch.Tensor, targets: torch.Tensor, **keywords: Any) -> Any:
        log_prob, entropy = clean.run(logits, targets, **keywords)
        assert log_prob.requires_grad == logits.requires_grad == torch.is_grad_enabled()
        seen.append(log_prob.requires_grad)
        contents.add(logits.detach().numpy().tobytes())
        return log_prob, entropy

    measure_time(Subject("watched", run), inputs, Options(), repetitions=4)
    assert seen == [False, True] * 4
    assert len(contents) == 9


def test_what_torch_compiles_is_counted_and_every_new_shape_again() -> None:
    torch._dynamo.reset()
    doubled = torch.compile(lambda x: x * 2, backend="eager", dynamic=False)
    counts = [compilations()]
    for size in (3, 3, 4):
        doubled(torch.zeros(size))
        counts.append(compilations())
    assert [after - before for before, after in itertools.pairwise(counts)] == [1, 0, 1]
