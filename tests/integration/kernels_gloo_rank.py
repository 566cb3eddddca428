"""One rank of the tensor-parallel tests: runs every combination on its shard and writes the results to a file.

A program, not a test: `python kernels_gloo_rank.py RANK WORLD_SIZE RENDEZVOUS_FILE RESULTS_FILE`. The combinations are
the product of the tables below, which the test reads too.
"""

import sys
from datetime import timedelta
from itertools import product
from typing import Any

import torch
import torch.distributed as dist

from runners.kernels.contract import Kernel
from runners.kernels.inputs import Inputs, make_inputs
from runners.kernels.registry import kernel

FIXTURES = ((3, 4), (4, 6))
REAL_SIZE = (64, 32768)
CHUNK_SIZES = (None, 1, 2, 8)
MASKS = (False, True)
MODES = ("off", "value", "gradient")
NAMES = ("fused", "legacy", "legacy_bf16")
# (kernel, fixture, chunk size, mask, entropy mode)
Combination = tuple[str, tuple[int, int], int | None, bool, str]

COMBINATIONS: tuple[Combination, ...] = (
    *product(NAMES, FIXTURES, CHUNK_SIZES, MASKS, MODES),
    *product(NAMES, (REAL_SIZE,), (None,), MASKS, ("gradient",)),
)


def combination_inputs(combination: Combination, *, rank: int = 0, world_size: int = 1) -> Inputs:
    """The inputs of a combination: upstream gradients without zeros on fixtures of fewer than 4 rows."""
    (tokens, vocabulary), mask = combination[1], combination[3]
    return make_inputs(
        tokens=tokens,
        vocabulary=vocabulary,
        distribution="flat",
        keep_mask=mask,
        seed=7,
        rank=rank,
        world_size=world_size,
    )


def run_combination(
    combination: Combination, inputs: Inputs, group: dist.ProcessGroup | None
) -> dict[str, torch.Tensor | None]:
    """Log-prob, entropy and each one's gradient alone; None for what the entropy mode leaves out."""
    name, _, chunk_size, _, mode = combination
    log_prob, entropy, logits = _forward(kernel(name), inputs, group, chunk_size, mode)
    (g_log_prob,) = torch.autograd.grad(log_prob, logits, inputs.upstream_log_prob)
    g_entropy = None
    if mode == "gradient":
        _, differentiable, logits = _forward(kernel(name), inputs, group, chunk_size, mode)
        assert differentiable is not None
        (g_entropy,) = torch.autograd.grad(differentiable, logits, inputs.upstream_entropy)
    return {
        "log_prob": log_prob.detach(),
        "entropy": None if entropy is None else entropy.detach(),
        "g_log_prob": g_log_prob,
        "g_entropy": g_entropy,
    }


def _forward(
    subject: Kernel, inputs: Inputs, group: dist.ProcessGroup | None, chunk_size: int | None, mode: str
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    logits = inputs.logits.detach().requires_grad_()
    log_prob, entropy = subject.run(
        logits,
        inputs.targets,
        keep_mask=inputs.keep_mask,
        group=group,
        chunk_size=chunk_size,
        with_entropy=mode != "off",
        with_entropy_grad=mode == "gradient",
    )
    return log_prob, entropy, logits


def main(rank: int, world_size: int, rendezvous: str, results_file: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size, timeout=timedelta(minutes=2)
    )
    group = dist.group.WORLD
    results: dict[Any, Any] = {
        combination: run_combination(
            combination, combination_inputs(combination, rank=rank, world_size=world_size), group
        )
        for combination in COMBINATIONS
    }
    empty = make_inputs(tokens=0, vocabulary=4, rank=rank, world_size=world_size)
    results["empty"] = run_combination(("fused", (0, 4), None, False, "gradient"), empty, group)
    torch.save(results, results_file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
