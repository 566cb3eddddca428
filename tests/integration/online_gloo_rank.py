"""One rank of the tensor-parallel tests of `online`: runs every combination on 4 ranks and on 2, writes the results.

A program, not a test: `python online_gloo_rank.py RANK RENDEZVOUS_FILE RESULTS_FILE`, four of them. The combinations
are those of the table below, which the test reads too.
"""

import sys
from dataclasses import replace
from datetime import timedelta
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from runners.kernels.inputs import Distribution, Inputs, make_inputs
from runners.kernels.registry import kernel

RANKS = 4
TENSOR_PARALLEL = (4, 2)


class Combination(NamedTuple):
    """What is run; a combination is a key of the results."""

    distribution: Distribution
    tokens: int
    vocabulary: int
    keep_mask: bool
    mode: str
    temperature: float = 1.0
    chunk_size: int | None = None


SMALL = [
    Combination(distribution, 6, 52, keep_mask, mode)
    for distribution, keep_mask, mode in product(
        ("flat", "spread", "offset", "one_hot", "neg_inf", "confident_wrong"),
        (False, True),
        ("off", "value", "gradient"),
    )
]
COMBINATIONS = [
    *SMALL,
    Combination("spread", 6, 52, True, "gradient", temperature=0.7),
    Combination("spread", 6, 52, True, "gradient", chunk_size=2),
    Combination("masked", 16, 52, True, "gradient"),
    Combination("spread", 0, 52, True, "gradient"),
    Combination("flat", 64, 32768, False, "gradient"),
    Combination("flat", 64, 32768, True, "gradient"),
]


def combination_inputs(combination: Combination, *, rank: int = 0, world_size: int = 1) -> Inputs:
    """One rank's inputs; in the first row all but the first shard's ids have probability zero."""
    inputs = make_inputs(
        tokens=combination.tokens,
        vocabulary=combination.vocabulary,
        distribution=combination.distribution,
        keep_mask=combination.keep_mask,
        seed=3,
        rank=rank,
        world_size=world_size,
    )
    if combination.distribution == "neg_inf" and combination.tokens:
        edge = combination.vocabulary // RANKS - rank * inputs.logits.shape[1]
        inputs.logits[0, max(0, edge) :] = -torch.inf
        targets = inputs.targets.clone()
        targets[0] = 1
        inputs = replace(inputs, targets=targets)
        if rank == 0:
            inputs.logits[0, 1] = 0.5
    return inputs


def run_combination(
    combination: Combination, inputs: Inputs, group: dist.ProcessGroup | None
) -> dict[str, torch.Tensor | None]:
    """Log-prob, entropy and each one's gradient alone; None for what the entropy mode leaves out."""
    logits = inputs.logits.detach().requires_grad_()
    log_prob, entropy = kernel("online").run(
        logits,
        inputs.targets,
        keep_mask=inputs.keep_mask,
        group=group,
        chunk_size=combination.chunk_size,
        temperature=combination.temperature,
        with_entropy=combination.mode != "off",
        with_entropy_grad=combination.mode == "gradient",
    )
    (g_log_prob,) = torch.autograd.grad(log_prob, logits, inputs.upstream_log_prob, retain_graph=True)
    g_entropy = None
    if combination.mode == "gradient":
        assert entropy is not None
        (g_entropy,) = torch.autograd.grad(entropy, logits, inputs.upstream_entropy)
    return {
        "log_prob": log_prob.detach(),
        "entropy": None if entropy is None else entropy.detach(),
        "g_log_prob": g_log_prob,
        "g_entropy": g_entropy,
    }


class _Collectives:
    """Stands for dist.all_reduce and notes the operation and the bytes of each call."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self._all_reduce = dist.all_reduce

    def __call__(self, values: torch.Tensor, operation: Any, group: dist.ProcessGroup) -> None:
        self.calls.append((str(operation), values.nbytes))
        self._all_reduce(values, operation, group)


def main(rank: int, rendezvous: str, results_file: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=RANKS, timeout=timedelta(minutes=2)
    )
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    groups: dict[int, Any] = {4: dist.group.WORLD, 2: pairs[rank // 2]}
    results: dict[Any, Any] = {}
    for tensor_parallel, combination in product(TENSOR_PARALLEL, COMBINATIONS):
        inputs = combination_inputs(combination, rank=rank % tensor_parallel, world_size=tensor_parallel)
        dist.all_reduce = collectives = _Collectives()
        outcome: dict[str, Any] = run_combination(combination, inputs, groups[tensor_parallel])
        dist.all_reduce = collectives._all_reduce
        results[tensor_parallel, tuple(combination)] = {**outcome, "collectives": collectives.calls}
    torch.save(results, results_file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
