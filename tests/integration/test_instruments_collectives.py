"""Collectives are counted on a real gloo group of one rank."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from runners.instruments.cuda_timing import agreed
from runners.instruments.subject import Options, Subject
from runners.instruments.work import measure_work
from runners.kernels.inputs import make_inputs
from runners.kernels.registry import kernel


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_every_collective_of_forward_and_backward_is_counted_and_no_barrier(group: dist.ProcessGroup) -> None:
    class Reduced(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
            total = logits.sum(1)
            dist.all_reduce(total, group=group)
            work = dist.all_reduce(total, group=group, async_op=True)
            assert work is not None
            work.wait()
            dist.barrier(group=group)
            ctx.shape = logits.shape
            return total

        @staticmethod
        def backward(ctx: Any, upstream: torch.Tensor) -> torch.Tensor:
            gathered = [torch.empty_like(upstream)]
            dist.all_gather(gathered, upstream, group=group)
            return gathered[0][:, None].expand(ctx.shape)

    def run(logits: torch.Tensor, targets: torch.Tensor, **keywords: Any) -> Any:
        return Reduced.apply(logits), None

    inputs = make_inputs(tokens=4, vocabulary=8)
    reading = measure_work(Subject("reduced", run), inputs, Options("off"))
    assert reading.collectives == 3
    assert reading.collective_bytes == 4 * 4 + 4 * 4 + 2 * 4 * 4  # two reductions of four rows, a gather in and out


def test_a_vocab_parallel_kernel_communicates_only_where_it_is_given_a_group(group: dist.ProcessGroup) -> None:
    inputs = make_inputs(tokens=4, vocabulary=8)
    fused = Subject("fused", kernel("fused").run)
    assert measure_work(fused, inputs, Options()).collectives == 0
    assert measure_work(replace(fused, group=group), inputs, Options()).collectives >= 2


def test_ranks_agree_on_what_rank_0_says(group: dist.ProcessGroup) -> None:
    assert agreed((3, 30), group) == (3, 30)
