"""The kernels `legacy` and `legacy_bf16`: the pair that `fused` replaced, a cross-entropy and an entropy apart.

Vocab-parallel. The cross-entropy's gradient is rounded to bfloat16: always on CUDA, as the one it models does, and on
every device in `legacy_bf16`. It keeps three vocabulary-wide buffers for backward; chunking calls the pair by chunks.
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from runners.kernels.arguments import check_arguments
from runners.kernels.contract import Contract, Kernel
from runners.kernels.row_chunks import row_chunks
from runners.kernels.vocab_parallel import (
    all_reduce_max,
    all_reduce_max_of_shards,
    all_reduce_sum,
    dropped_ids,
    locate_targets,
)


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
    overwrite_logits: bool = False,  # noqa: ARG001 -- a permission that this kernel has no use for
    round_gradient: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See contract.LogProbEntropy. `round_gradient` asks for the bfloat16 rounding where the device does not force it.

    Backward runs once, since it turns the saved softmax buffers into the gradients.
    """
    check_arguments(logits, targets, keep_mask=keep_mask, group=group, chunk_size=chunk_size, temperature=temperature)
    rounded = round_gradient or logits.is_cuda
    log_probs, entropies = [], []
    for rows in row_chunks(logits.shape[0], chunk_size):
        mask = None if keep_mask is None else keep_mask[rows]
        log_probs.append(_log_prob(logits[rows], targets[rows], mask, group, temperature, rounded=rounded))
        if with_entropy:
            entropies.append(vocab_parallel_entropy(logits[rows], group, temperature, with_grad=with_entropy_grad))
    return torch.cat(log_probs), torch.cat(entropies) if with_entropy else None


def vocab_parallel_entropy(
    logits: torch.Tensor, group: dist.ProcessGroup | None, temperature: float, *, with_grad: bool
) -> torch.Tensor:
    """Entropy [N] float32 of logits / temperature [N, V/TP], from a softmax of its own."""
    with torch.set_grad_enabled(with_grad and torch.is_grad_enabled()):
        entropy: torch.Tensor = _Entropy.apply(logits, group, temperature)  # type: ignore[no-untyped-call]
    return entropy


def _log_prob(
    logits: torch.Tensor,
    targets: torch.Tensor,
    keep_mask: torch.Tensor | None,
    group: dist.ProcessGroup | None,
    temperature: float,
    *,
    rounded: bool,
) -> torch.Tensor:
    """Log-prob [n] float32: the cross-entropy negated, over logits that are minus infinity where not kept."""
    if keep_mask is not None:
        dropped = dropped_ids(keep_mask, *locate_targets(targets, logits.shape[1], group))
        logits = logits.masked_fill(dropped, -torch.inf)
    loss: torch.Tensor = _CrossEntropy.apply(logits, targets, group, temperature, rounded)  # type: ignore[no-untyped-call]
    return -loss


class _CrossEntropy(torch.autograd.Function):
    """-log-prob [N] float32, and its gradient, rounded to bfloat16 if asked."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        group: dist.ProcessGroup | None,
        temperature: float,
        rounded: bool,
    ) -> torch.Tensor:
        softmax = _copy(logits, temperature)
        column, owned = locate_targets(targets, softmax.shape[1], group)
        softmax.sub_(all_reduce_max_of_shards(softmax.amax(1, keepdim=True), logits, owned, group))
        target_logit = softmax.gather(1, column).masked_fill_(~owned, 0.0)
        total = softmax.exp_().sum(1, keepdim=True)
        target_logit, total = all_reduce_sum(torch.cat((target_logit, total), 1), group).unbind(1)
        softmax.div_(total[:, None])
        ctx.save_for_backward(softmax, column, owned)
        ctx.temperature, ctx.rounded, ctx.dtype = temperature, rounded, logits.dtype
        return total.log() - target_logit

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        softmax, column, owned = ctx.saved_tensors
        softmax.scatter_add_(1, column, -owned.float()).mul_(upstream[:, None] / ctx.temperature)
        gradient = softmax.masked_fill_(upstream[:, None] == 0, 0.0)
        if ctx.rounded:
            gradient = gradient.to(torch.bfloat16)
        return gradient.to(ctx.dtype), None, None, None, None


class _Entropy(torch.autograd.Function):
    """max + log sum - sum p x, [N] float32, and its gradient p (sum p x - x)."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, group: dist.ProcessGroup | None, temperature: float) -> torch.Tensor:
        finite = _copy(logits, temperature).clamp_min_(torch.finfo(torch.float32).min)
        maximum = all_reduce_max(finite.amax(1, keepdim=True), group)
        exponential = (finite - maximum).exp_()
        total = all_reduce_sum(exponential.sum(1, keepdim=True), group)
        softmax = exponential.div_(total)
        mean_logit = all_reduce_sum((softmax * finite).sum(1, keepdim=True), group)
        ctx.save_for_backward(finite, softmax, mean_logit)
        ctx.temperature, ctx.dtype = temperature, logits.dtype
        return (maximum + total.log() - mean_logit)[:, 0]

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        finite, softmax, mean_logit = ctx.saved_tensors
        gradient = (mean_logit - finite).mul_(softmax).mul_(upstream[:, None] / ctx.temperature)
        return gradient.masked_fill_(upstream[:, None] == 0, 0.0).to(ctx.dtype), None, None


def _copy(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """A contiguous float32 copy of logits / temperature, never the caller's own memory."""
    copy = logits.new_empty(logits.shape, dtype=torch.float32).copy_(logits)
    return copy if temperature == 1.0 else copy.div_(temperature)


_INACCURATE_ON = frozenset({"confident_wrong", "offset"})
KERNEL = Kernel("legacy", run, Contract(gradient_on_cuda="bfloat16", inaccurate_on=_INACCURATE_ON, overflows=True))
KERNEL_BF16 = Kernel(
    "legacy_bf16",
    partial(run, round_gradient=True),
    Contract(gradient="bfloat16", inaccurate_on=_INACCURATE_ON, overflows=True),
)
