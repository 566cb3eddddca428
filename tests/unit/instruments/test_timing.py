"""Timing: raw samples over rotating inputs, with a fresh graph each; no test looks at a clock."""

from typing import Any

import torch

from runners.instruments.subject import Options, Subject
from runners.instruments.timing import measure_time
from runners.kernels.inputs import Inputs
from service.catalogue import BY_NAME, MetricClass


def test_each_repetition_gives_one_sample_of_each_time(clean: Subject, inputs: Inputs) -> None:
    samples = measure_time(clean, inputs, Options(), repetitions=4)
    assert set(samples) == {m.name for m in BY_NAME.values() if m.metric_class is MetricClass.TIMING}
    assert all(len(values) == 4 and min(values) >= 0 for values in samples.values())


def test_a_step_holds_its_forward(clean: Subject, inputs: Inputs) -> None:
    samples = measure_time(clean, inputs, Options(), repetitions=3)
    for step, forward in zip(samples["step_wall_seconds"], samples["train_forward_wall_seconds"], strict=True):
        assert step >= forward


def test_three_input_sets_rotate_and_forward_alone_builds_no_graph(clean: Subject, inputs: Inputs) -> None:
    seen: list[tuple[bool, int, float]] = []
    log_probs: list[torch.Tensor] = []

    def run(logits: torch.Tensor, targets: torch.Tensor, **keywords: Any) -> Any:
        log_prob, entropy = clean.run(logits, targets, **keywords)
        assert log_prob.requires_grad == logits.requires_grad == torch.is_grad_enabled()
        seen.append((log_prob.requires_grad, logits.data_ptr(), float(log_prob.detach()[0])))
        log_probs.append(log_prob.detach().sort().values)
        return log_prob, entropy

    measure_time(Subject("watched", run), inputs, Options(), repetitions=4)
    assert [graph for graph, _, _ in seen] == [False, True] * 4
    assert len({address for _, address, _ in seen}) == 3
    assert len({value for _, _, value in seen}) == 3
    assert seen[0][1:] == seen[6][1:]
    for log_prob in log_probs[1:]:
        torch.testing.assert_close(log_prob, log_probs[0])  # the same rows in another order


def test_a_keep_mask_moves_with_its_logits(clean: Subject, inputs: Inputs) -> None:
    masked = Inputs(
        inputs.logits,
        inputs.targets,
        torch.zeros_like(inputs.logits, dtype=torch.bool),
        inputs.upstream_log_prob,
        inputs.upstream_entropy,
    )
    log_probs: list[torch.Tensor] = []

    def run(logits: torch.Tensor, targets: torch.Tensor, **keywords: Any) -> Any:
        log_prob, entropy = clean.run(logits, targets, **keywords)
        log_probs.append(log_prob.detach())
        return log_prob, entropy

    measure_time(Subject("watched", run), masked, Options("off"), repetitions=3)
    assert all(float(log_prob.abs().max()) == 0 for log_prob in log_probs)
