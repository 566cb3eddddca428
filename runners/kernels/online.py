"""The kernel `online`: one pass over the logits forward, the softmax recomputed backward, nothing V-wide saved.

Here is the autograd function and what it keeps; the vocabulary-wide work is in online_torch, or in online_triton on a
CUDA device, the arithmetic by row in online_rows.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from runners.kernels import online_torch
from runners.kernels.arguments import check_arguments
from runners.kernels.contract import Contract, Kernel
from runners.kernels.online_rows import (
    Sums,
    add_target,
    merge,
    merge_ranks,
    pack,
    row_gradients,
    softmax_of,
    unpack,
)
from runners.kernels.row_chunks import row_chunks
from runners.kernels.vocab_parallel import locate_targets


def run(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    keep_mask: torch.Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    chunk_size: int | None = None,
    temperature: float = 1.0,
    with_entropy: bool = True,
    with_entropy_grad: bool = True,
    overwrite_logits: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See contract.LogProbEntropy. Backward may run again, and gives the same; an output left out counts as zero.

    It saves 8 bytes a row, 12 with an entropy gradient, 16 with a keep-mask too, and peaks at the gradient itself: 1 U
    (one float32 buffer of the logits' size), half of it for 16-bit logits. Its temporaries are a few tiles whatever
    `chunk_size` is, which changes nothing. Two collectives with a group, for every other option. With
    `overwrite_logits` the gradient takes the logits' place, and a second backward raises.
    """
    check_arguments(logits, targets, keep_mask=keep_mask, group=group, chunk_size=chunk_size, temperature=temperature)
    if overwrite_logits and 0 in logits.stride() and logits.numel() > 1:
        raise ValueError(
            f"logits has strides {logits.stride()}: overwrite_logits needs a place for each element; pass a copy"
        )
    graph = logits.requires_grad and torch.is_grad_enabled()
    plan = _Plan(
        group=group,
        temperature=temperature,
        entropy=with_entropy,
        graph=graph,
        entropy_graph=graph and with_entropy and with_entropy_grad,
        overwrite_logits=overwrite_logits,
    )
    log_prob, entropy = _LogProbEntropy.apply(logits, targets, keep_mask, plan)  # type: ignore[no-untyped-call]
    return log_prob, entropy


@dataclass(frozen=True, slots=True)
class _Plan:
    """How to run. `graph`, `entropy_graph`: whether the log-prob's, the entropy's backward may come."""

    group: dist.ProcessGroup | None
    temperature: float
    entropy: bool
    graph: bool
    entropy_graph: bool
    overwrite_logits: bool


class _LogProbEntropy(torch.autograd.Function):
    """Saves the inputs and a softmax's few numbers a row: the log-prob's, and the entropy's where a mask parts them."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, keep_mask: torch.Tensor | None, plan: _Plan
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        sums, target = _sums(logits, targets, keep_mask, plan)
        softmaxes = [softmax_of(each) for each in sums]
        # The target's t is at most 0 and so is every mean t; a total is at least 1: the results are in their range.
        log_prob = target - sums[0].total.log()
        mean = softmaxes[-1].mean
        entropy = None if mean is None else sums[-1].total.log() - mean

        ctx.plan = plan
        ctx.set_materialize_grads(False)
        if plan.graph:
            packed = pack(softmaxes, entropy=plan.entropy_graph, temperature=plan.temperature)
            ctx.save_for_backward(logits, targets, keep_mask, *packed)
        if entropy is not None and not plan.entropy_graph:
            ctx.mark_non_differentiable(entropy)
        return log_prob, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, upstream_log_prob: torch.Tensor | None, upstream_entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        plan: _Plan = ctx.plan
        logits, targets, keep_mask, *packed = ctx.saved_tensors
        if upstream_log_prob is None:
            upstream_log_prob = torch.zeros_like(targets, dtype=torch.float32)
        tiles = _tiles(logits)
        column, owned = locate_targets(targets, logits.shape[1], plan.group)
        gradient = logits.detach() if plan.overwrite_logits else torch.empty_like(logits)
        for rows in row_chunks(logits.shape[0], tiles.ROWS):
            by_row = row_gradients(
                unpack(packed, rows),
                logits[rows].gather(1, column[rows])[:, 0].float(),
                upstream_log_prob[rows],
                None if upstream_entropy is None else upstream_entropy[rows],
                is_masked=keep_mask is not None,
                temperature=plan.temperature,
            )
            mask = None if keep_mask is None else keep_mask[rows]
            target = column[rows], owned[rows]
            tiles.write_gradient(gradient[rows], logits[rows], mask, target, by_row, plan.temperature)
        return gradient, None, None, None


def _sums(
    logits: torch.Tensor, targets: torch.Tensor, keep_mask: torch.Tensor | None, plan: _Plan
) -> tuple[list[Sums], torch.Tensor]:
    """The sums of the log-prob's softmax first and of the entropy's last, over all ranks; the target's t [N]."""
    column, owned = (each[:, 0] for each in locate_targets(targets, logits.shape[1], plan.group))
    target_logit = logits.gather(1, column[:, None])[:, 0].float()
    whole, kept = _tiles(logits).sums(logits, keep_mask, plan.temperature, entropy=plan.entropy)
    if kept is not None and keep_mask is not None:
        kept = add_target(kept, target_logit, owned & ~keep_mask.gather(1, column[:, None])[:, 0])
    shards = [merge(pieces, plan.temperature) for pieces in (kept, whole) if pieces is not None]
    return merge_ranks(shards, logits, target_logit, owned, plan.temperature, plan.group)


def _tiles(logits: torch.Tensor) -> Any:
    """The module for the vocabulary-wide work on the logits' device; ModuleNotFoundError where triton is missing."""
    if not logits.is_cuda:
        return online_torch
    try:
        from runners.kernels import online_triton  # noqa: PLC0415 -- a host without a CUDA device has no triton
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("online needs triton on CUDA, which is not installed: pip install triton") from error
    return online_triton


KERNEL = Kernel("online", run, Contract())
