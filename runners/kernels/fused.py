"""The kernel `fused`: one autograd function for log-prob and entropy, vocab-parallel, in place on its own buffers.

It models the optimised kernel of trainers, order of operations included: max, subtract, exp, sum, divide; entropy =
max + log sum - sum p x. That order loses the entropy's gradient on rows with a large offset or one wrong, likely id,
and divides by the temperature before it subtracts, which may overflow.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from runners.kernels.arguments import check_arguments
from runners.kernels.contract import Contract, Kernel
from runners.kernels.row_chunks import row_chunks
from runners.kernels.vocab_parallel import all_reduce_max_of_shards, all_reduce_sum, dropped_ids, locate_targets

_LOWEST = torch.finfo(torch.float32).min


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
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See contract.LogProbEntropy. Backward runs once, since it turns the saved softmax into the gradient.

    In U (one float32 buffer of the logits' size) it saves 1 and peaks at 2, each 1 more for a keep-mask together with
    an entropy gradient. Temporaries hold one chunk of rows.
    """
    check_arguments(logits, targets, keep_mask=keep_mask, group=group, chunk_size=chunk_size, temperature=temperature)
    graph = logits.requires_grad and torch.is_grad_enabled()
    plan = _Plan(
        group=group,
        chunk_size=chunk_size,
        temperature=temperature,
        entropy=with_entropy,
        graph=graph,
        entropy_graph=graph and with_entropy and with_entropy_grad,
    )
    log_prob, entropy = _LogProbEntropy.apply(logits, targets, keep_mask, plan)  # type: ignore[no-untyped-call]
    return log_prob, entropy


@dataclass(frozen=True, slots=True)
class _Plan:
    """How to run. `graph`, `entropy_graph`: whether the log-prob's, the entropy's backward may come."""

    group: dist.ProcessGroup | None
    chunk_size: int | None
    temperature: float
    entropy: bool
    graph: bool
    entropy_graph: bool


class _LogProbEntropy(torch.autograd.Function):
    """Forward and backward by chunks of rows; only the buffers kept for backward hold all rows."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, keep_mask: torch.Tensor | None, plan: _Plan
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        log_prob = logits.new_empty(targets.shape, dtype=torch.float32)
        entropy = torch.empty_like(log_prob) if plan.entropy else None
        mean_logit = torch.empty_like(log_prob) if plan.entropy_graph else None
        softmax = _whole_buffer(logits) if plan.graph else None
        # Under a mask the entropy, which is that of the unmasked logits, needs a softmax of its own.
        entropy_softmax = _whole_buffer(logits) if plan.entropy_graph and keep_mask is not None else softmax
        for rows in row_chunks(logits.shape[0], plan.chunk_size):
            p = _whole_buffer(logits[rows]) if softmax is None else softmax[rows]
            q = p if entropy_softmax is None else entropy_softmax[rows]
            mask = None if keep_mask is None else keep_mask[rows]
            log_prob[rows], row_entropy, row_mean = _forward_rows(p, q, logits[rows], targets[rows], mask, plan)
            if entropy is not None and row_entropy is not None:
                entropy[rows] = row_entropy
            if mean_logit is not None and row_mean is not None:
                mean_logit[rows] = row_mean
            del p, q  # a temporary must be gone before the next chunk's is made

        ctx.plan, ctx.dtype, ctx.spent = plan, logits.dtype, False
        ctx.set_materialize_grads(True)
        if plan.entropy_graph:
            ctx.save_for_backward(targets, softmax, entropy_softmax, mean_logit, logits)
        else:
            ctx.save_for_backward(targets, softmax)
            if entropy is not None:
                ctx.mark_non_differentiable(entropy)
        return log_prob, entropy

    @staticmethod
    def backward(
        ctx: Any, upstream_log_prob: torch.Tensor | None, upstream_entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        plan: _Plan = ctx.plan
        if upstream_log_prob is None or (plan.entropy_graph and upstream_entropy is None):
            name = "log_prob" if upstream_log_prob is None else "entropy"
            raise RuntimeError(
                f"fused got no upstream gradient for {name}, and would lose the other's too: let autograd materialise "
                f"gradients (set_materialize_grads), or add 0 * {name}.sum() to the loss"
            )
        if ctx.spent:
            raise RuntimeError("fused's backward ran already and made its softmax the gradient: run forward again")
        ctx.spent = True
        targets, softmax, *saved = ctx.saved_tensors
        gradient = softmax if ctx.dtype == torch.float32 else torch.empty_like(softmax, dtype=ctx.dtype)
        for rows in row_chunks(softmax.shape[0], plan.chunk_size):
            p, upstream = softmax[rows], upstream_log_prob[rows, None]
            dead = upstream == 0
            entropy_term = None
            if upstream_entropy is not None and plan.entropy_graph:
                entropy_softmax, mean_logit, logits = (tensor[rows] for tensor in saved)
                entropy_term = _entropy_gradient(
                    entropy_softmax, logits, mean_logit, upstream_entropy[rows, None], plan.temperature
                )
                dead &= upstream_entropy[rows, None] == 0
            _log_prob_gradient_(p, targets[rows], upstream, plan)
            if entropy_term is not None:
                p.add_(entropy_term)
            p.masked_fill_(dead, 0.0)
            if gradient is not softmax:
                gradient[rows] = p
            del entropy_term
        return gradient, None, None, None


def _forward_rows(
    p: torch.Tensor,
    q: torch.Tensor,
    logits: torch.Tensor,
    targets: torch.Tensor,
    keep_mask: torch.Tensor | None,
    plan: _Plan,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Fill `p` with the log-prob's softmax and `q`, where it is another buffer, with the entropy's.

    Returns log-prob, entropy and sum q x of the rows, [n] float32; the last two None without entropy.
    """
    column, owned = locate_targets(targets, logits.shape[1], plan.group)
    entropy, mean_logit = None, None
    if plan.entropy and keep_mask is not None:
        maximum, log_sum, _ = _softmax_(q, logits, None, column, owned, plan)
        mean_logit = _mean_logit(q, logits, plan)
        entropy = maximum + log_sum - mean_logit
    dropped = None if keep_mask is None else dropped_ids(keep_mask, column, owned)
    maximum, log_sum, target_logit = _softmax_(p, logits, dropped, column, owned, plan)
    if plan.entropy and keep_mask is None:
        mean_logit = _mean_logit(p, logits, plan)
        entropy = maximum + log_sum - mean_logit
    return target_logit - log_sum, entropy, mean_logit


def _softmax_(
    buffer: torch.Tensor,
    logits: torch.Tensor,
    dropped: torch.Tensor | None,
    column: torch.Tensor,
    owned: torch.Tensor,
    plan: _Plan,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Make `buffer` this shard's part of the softmax of logits / temperature, the dropped ids apart.

    Returns by row, [n] float32: the maximum, the log of the sum beneath it, the target's logit beneath the maximum.
    """
    _load_(buffer, logits, plan.temperature)
    if dropped is not None:
        buffer.masked_fill_(dropped, -torch.inf)
    maximum = all_reduce_max_of_shards(buffer.amax(1, keepdim=True), logits, owned, plan.group)
    buffer.sub_(maximum)
    target_logit = buffer.gather(1, column).masked_fill_(~owned, 0.0)
    total = buffer.exp_().sum(1, keepdim=True)
    both = all_reduce_sum(torch.cat((target_logit, total), 1), plan.group)
    buffer.div_(both[:, 1:])
    return maximum[:, 0], both[:, 1].log(), both[:, 0]


def _mean_logit(p: torch.Tensor, logits: torch.Tensor, plan: _Plan) -> torch.Tensor:
    """sum p x by row over the whole vocabulary, x = logits / temperature."""
    return all_reduce_sum(_finite_logits(logits, plan.temperature).mul_(p).sum(1), plan.group)


def _log_prob_gradient_(p: torch.Tensor, targets: torch.Tensor, upstream: torch.Tensor, plan: _Plan) -> None:
    """Turn `p` into upstream ([j = y] - p_j) / temperature; `upstream` [n, 1]."""
    column, owned = locate_targets(targets, p.shape[1], plan.group)
    p.scatter_add_(1, column, -owned.float()).mul_(upstream / -plan.temperature)


def _entropy_gradient(
    p: torch.Tensor, logits: torch.Tensor, mean_logit: torch.Tensor, upstream: torch.Tensor, temperature: float
) -> torch.Tensor:
    """upstream p_j (sum p x - x_j) / temperature in a new buffer; `upstream` [n, 1]."""
    difference = _load_(_whole_buffer(logits), logits, temperature).sub_(mean_logit[:, None])
    return difference.clamp_min_(_LOWEST).mul_(p).mul_(upstream / -temperature)


def _whole_buffer(logits: torch.Tensor) -> torch.Tensor:
    """An empty float32 buffer of the logits' shape."""
    return logits.new_empty(logits.shape, dtype=torch.float32)


def _load_(buffer: torch.Tensor, logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Put logits / temperature into a float32 buffer."""
    buffer.copy_(logits)
    return buffer if temperature == 1.0 else buffer.div_(temperature)


def _finite_logits(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """A float32 copy of logits / temperature with the lowest number for minus infinity: p = 0 times that is 0."""
    return _load_(_whole_buffer(logits), logits, temperature).clamp_min_(_LOWEST)


KERNEL = Kernel("fused", run, Contract(inaccurate_on=frozenset({"confident_wrong", "offset"}), overflows=True))
