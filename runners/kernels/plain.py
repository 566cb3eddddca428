"""Kernels that leave differentiation to autograd: `eager`, `peer` and `reference`, on the whole vocabulary.

`eager` is log_softmax and gather, and `reference` the same in float64; `peer`, which precisions are compared with, is
the logsumexp form in float32. None is tensor-parallel. The oracle is another thing: runners.kernels.reference.
"""

from collections.abc import Callable
from functools import partial
from typing import Literal, Protocol

import torch
import torch.distributed as dist

from runners.kernels.arguments import check_arguments, check_whole_vocabulary
from runners.kernels.contract import Contract, Kernel
from runners.kernels.row_chunks import row_chunks
from runners.kernels.vocab_parallel import dropped_ids, locate_targets


class Rows(Protocol):
    """Log-prob [n] and entropy [n] or None of some rows x [n, V] in float32; `dropped` are the ids outside the mask.

    `temperature` is None for 1, `entropy` differentiable, a value or not wanted.
    """

    def __call__(
        self,
        x: torch.Tensor,
        targets: torch.Tensor,
        dropped: torch.Tensor | None,
        temperature: float | None,
        entropy: Literal["off", "value", "gradient"],
    ) -> tuple[torch.Tensor, torch.Tensor | None]: ...


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
    overwrite_logits: bool = False,  # noqa: ARG001 -- a permission that these kernels have no use for
    name: str,
    rows_of: Rows,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See contract.LogProbEntropy; by `rows_of`, a chunk at a time."""
    check_arguments(logits, targets, keep_mask=keep_mask, group=group, chunk_size=chunk_size, temperature=temperature)
    check_whole_vocabulary(name, group)
    # A view, so that a hook on it sees this call's gradient and no other.
    x = logits.view_as(logits)
    dropped = None if keep_mask is None else dropped_ids(keep_mask, *locate_targets(targets, logits.shape[1], None))
    mode: Literal["off", "value", "gradient"]
    mode = "off" if not with_entropy else "gradient" if with_entropy_grad else "value"
    log_probs, entropies = [], []
    for rows in row_chunks(logits.shape[0], chunk_size):
        mask = None if dropped is None else dropped[rows]
        log_prob, entropy = rows_of(x[rows], targets[rows], mask, None if temperature == 1.0 else temperature, mode)
        log_probs.append(log_prob)
        if entropy is not None:
            entropies.append(entropy)
    log_prob = torch.cat(log_probs)
    entropy = torch.cat(entropies) if with_entropy else None
    if log_prob.requires_grad:
        _zero_dead_rows(x, log_prob, entropy)
    return log_prob, entropy


def rows_by(
    x: torch.Tensor,
    targets: torch.Tensor,
    dropped: torch.Tensor | None,
    temperature: float | torch.Tensor | None,
    entropy: Literal["off", "value", "gradient"],
    *,
    log_softmax: Callable[[torch.Tensor], torch.Tensor],
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See Rows; computed in `dtype`."""
    scaled = x.to(dtype) if temperature is None else x.to(dtype) / temperature
    log_p = log_softmax(scaled if dropped is None else scaled.masked_fill(dropped, -torch.inf))
    log_prob = log_p.gather(1, targets[:, None])[:, 0].float()
    if entropy == "off":
        return log_prob, None
    whole = log_p if dropped is None else log_softmax(scaled if entropy == "gradient" else scaled.detach())
    return log_prob, _entropy(whole if entropy == "gradient" else whole.detach()).float()


def _entropy(log_p: torch.Tensor) -> torch.Tensor:
    """-sum p log p by row; entries of probability zero contribute zero, to the gradient too."""
    return -(log_p.exp() * log_p.masked_fill(log_p == -torch.inf, 0.0)).sum(1)


def _zero_dead_rows(x: torch.Tensor, log_prob: torch.Tensor, entropy: torch.Tensor | None) -> None:
    """Make x's gradient exactly zero in rows whose upstream gradients are both zero: zero times NaN is not.

    Hooks on the outputs note the rows that live, the one on x, which runs last, zeroes the others.
    """
    live = torch.zeros(x.shape[0], 1, dtype=torch.bool, device=x.device)

    def note(upstream: torch.Tensor) -> None:
        live.logical_or_(upstream[:, None] != 0)

    def zero(gradient: torch.Tensor) -> torch.Tensor:
        zeroed = gradient.masked_fill(~live, 0.0)
        live.zero_()
        return zeroed

    log_prob.register_hook(note)  # type: ignore[no-untyped-call]
    if entropy is not None and entropy.requires_grad:
        entropy.register_hook(note)  # type: ignore[no-untyped-call]
    x.register_hook(zero)  # type: ignore[no-untyped-call]


def _subtract_logsumexp(x: torch.Tensor) -> torch.Tensor:
    return x - x.logsumexp(1, keepdim=True)


def _kernel(
    name: str, log_softmax: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype, contract: Contract
) -> Kernel:
    return Kernel(
        name, partial(run, name=name, rows_of=partial(rows_by, log_softmax=log_softmax, dtype=dtype)), contract
    )


# CPU log_softmax is several times worse than logsumexp on large vocabularies, and worst, in the log-prob too, where one
# id outweighs all the others: it adds them to it one by one.
EAGER_ROWS = partial(rows_by, log_softmax=partial(torch.log_softmax, dim=1), dtype=torch.float32)
EAGER = Kernel(
    "eager",
    partial(run, name="eager", rows_of=EAGER_ROWS),
    Contract(tensor_parallel=False, inaccurate_on=frozenset({"confident_wrong"}), overflows=True, widened_gates=8.0),
)
PEER = _kernel(
    "peer",
    _subtract_logsumexp,
    torch.float32,
    Contract(tensor_parallel=False, inaccurate_on=frozenset({"confident_wrong", "offset"}), overflows=True),
)
REFERENCE = _kernel("reference", partial(torch.log_softmax, dim=1), torch.float64, Contract(tensor_parallel=False))
