"""Work: dispatched operations and their bytes, the same on every machine."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from runners.instruments.subject import Options, Subject
from runners.instruments.work import WorkCounter, WorkReading, measure_work
from runners.kernels.inputs import Inputs

X = torch.ones(4, 8)  # 128 bytes
INDEX = torch.zeros(4, 1, dtype=torch.int64)  # 32 bytes
COLUMN = torch.ones(4, 1)  # 16 bytes


@pytest.mark.parametrize(
    ("call", "operations", "traffic_bytes"),
    [
        (X.exp, 1, 256),
        (lambda: X.clone().exp_(), 2, 512),
        (lambda: X + X, 1, 256),
        (lambda: X - COLUMN, 1, 128 + 16 + 128),
        (lambda: X * COLUMN.expand(4, 8), 1, 128 + 16 + 128),
        (lambda: X.sum(1), 1, 128 + 16),
        (lambda: X.gather(1, INDEX), 1, 32 + 16 + 16),
        (lambda: X.clone().scatter_add_(1, INDEX, COLUMN), 2, 256 + 32 + 16 + 2 * 16),
        (lambda: X[1:].view(-1, 2).t().unsqueeze(0).detach(), 0, 0),
        (lambda: torch.empty_like(X).resize_(2, 2), 0, 0),
        (lambda: torch.empty_like(X).fill_(1.0), 1, 128),
        (lambda: torch.empty_like(X).copy_(X), 1, 256),
        (lambda: torch.cat((X, X, COLUMN), 1), 1, 128 + 16 + 2 * 128 + 16),
    ],
)
def test_an_operation_moves_what_it_reads_and_writes(
    call: Callable[[], Any], operations: int, traffic_bytes: int
) -> None:
    with WorkCounter() as counter:
        call()
    assert counter.reading() == WorkReading(operations, traffic_bytes, collectives=0, collective_bytes=0)


def test_backward_is_counted_and_repeats(clean: Subject, inputs: Inputs) -> None:
    def forward_only(logits: torch.Tensor, targets: torch.Tensor, **keywords: Any) -> Any:
        log_prob, entropy = clean.run(logits, targets, **keywords)
        return log_prob.detach(), entropy.detach() if entropy is not None else None

    whole = measure_work(clean, inputs, Options())
    assert whole == measure_work(clean, inputs, Options())
    assert whole.operations > measure_work(Subject("forward", forward_only), inputs, Options()).operations


def test_a_loop_over_rows_shows_in_the_operations(clean: Subject, inputs: Inputs) -> None:
    def by_row(logits: torch.Tensor, targets: torch.Tensor, **keywords: Any) -> Any:
        rows = [clean.run(logits[i : i + 1], targets[i : i + 1], **keywords) for i in range(len(targets))]
        return torch.cat([row[0] for row in rows]), torch.cat([row[1] for row in rows])

    whole = measure_work(clean, inputs, Options()).operations
    assert measure_work(Subject("loop", by_row), inputs, Options()).operations > 5 * whole


def test_an_out_of_place_pass_shows_in_the_traffic(tampered: Any, clean: Subject, inputs: Inputs) -> None:
    copied = tampered(gradient=lambda gradient: gradient.clone())
    unit = inputs.logits.numel() * 4
    assert (
        measure_work(copied, inputs, Options()).traffic_bytes
        == measure_work(clean, inputs, Options()).traffic_bytes + 2 * unit
    )


def test_without_a_group_there_is_no_collective(clean: Subject, inputs: Inputs) -> None:
    assert measure_work(clean, inputs, Options()).collectives == 0
