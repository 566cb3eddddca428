"""One of two ranks for the situations that need tensor parallelism: kernels, mutants and wrong shards, by name.

A program, not a test: `python situations_gloo_rank.py RANK RENDEZVOUS_FILE RESULTS_FILE`, two of them.
"""

import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from runners.kernels.contract import LogProbEntropy
from runners.kernels.faults.mutation import mutated
from runners.kernels.inputs import Inputs, make_inputs
from runners.kernels.registry import kernel

RANKS = 2
KERNELS = ("online", "fused", "legacy")
# Edits of `fused` that only more than one rank shows.
MUTANTS = {
    "one shard missing from the sum": (
        "both = all_reduce_sum(",
        "total = total * (plan.group is None or plan.group.rank() == 0)\n    both = all_reduce_sum(",
    ),
    "sum multiplied by the ranks": (
        "buffer.div_(both[:, 1:])",
        "both[:, 1:] *= 1 if plan.group is None else plan.group.size()\n    buffer.div_(both[:, 1:])",
    ),
    "non-owner shards get no gradient": (
        "-owned.float()).mul_(upstream / -plan.temperature)",
        "-owned.float()).mul_(upstream / -plan.temperature * owned)",
    ),
    "group not forwarded": ("group=group,\n        chunk_size", "group=None,\n        chunk_size"),
}


def inputs_of(rank: int = 0, world_size: int = 1) -> Inputs:
    """One rank's inputs, the whole by default."""
    return make_inputs(tokens=16, vocabulary=64, distribution="flat", rank=rank, world_size=world_size)


def run(
    call: LogProbEntropy, inputs: Inputs, group: dist.ProcessGroup | None, *, chunk_size: int | None = None
) -> dict[str, torch.Tensor]:
    """Outputs and each one's gradient alone."""
    results = {}
    for name, place, upstream in (
        ("log_prob", 0, inputs.upstream_log_prob),
        ("entropy", 1, inputs.upstream_entropy),
    ):
        logits = inputs.logits.detach().clone().requires_grad_()
        output = call(logits, inputs.targets, group=group, chunk_size=chunk_size)[place]
        assert output is not None
        results[name] = output.detach()
        (results[f"g_{name}"],) = torch.autograd.grad(output, logits, upstream)
    return results


def refusal(call: LogProbEntropy, logits: torch.Tensor, targets: torch.Tensor, group: dist.ProcessGroup) -> str:
    """The message of the ValueError that a call raises, empty without one."""
    try:
        call(logits, targets, group=group)
    except ValueError as error:
        return str(error)
    return ""


def main(rank: int, rendezvous: str, results_file: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=RANKS, timeout=timedelta(minutes=2)
    )
    group: Any = dist.group.WORLD
    shard, whole = inputs_of(rank, RANKS), inputs_of()
    few = torch.tensor([1, 0])
    results: dict[Any, Any] = {}
    for name in KERNELS:
        call = kernel(name).run
        results[name] = run(call, shard, group)
        results[name, "chunked"] = run(call, shard, group, chunk_size=5)
        results[name, "whole"] = refusal(call, whole.logits, whole.targets, group)
        results[name, "uneven"] = refusal(call, torch.randn(2, 4 - rank), few, group)
        results[name, "equal values"] = refusal(call, torch.full((2, 4), 3.0), few, group)
        results[name, "equal shards"] = refusal(call, torch.tensor([[1.0, 2.0, 3.0]] * 2), few + 2, group)
    for name, edit in MUTANTS.items():
        results[name] = run(mutated(kernel("fused"), [edit]).run, shard, group)
    torch.save(results, results_file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
