"""Log-probs and entropy of sampled tokens: a cross-entropy and an entropy, each with its own softmax."""

from typing import Any

import torch


class _LogProb(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, tokens: torch.Tensor, keep: torch.Tensor | None) -> torch.Tensor:
        scores = _masked(logits, tokens, keep)
        top = scores.amax(dim=1, keepdim=True)
        softmax = scores.sub(top).exp_()
        total = softmax.sum(dim=1, keepdim=True)
        softmax.div_(total)
        ctx.save_for_backward(softmax, tokens)
        ctx.dtype = logits.dtype
        picked = scores.gather(1, tokens[:, None])
        return picked.sub_(top).sub_(total.log_()).squeeze(1)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        softmax, tokens = ctx.saved_tensors
        scale = upstream[0][:, None]
        gradient = softmax.mul(scale.neg())
        gradient.scatter_add_(1, tokens[:, None], scale)
        gradient.masked_fill_(scale == 0, 0)
        return gradient.to(ctx.dtype), None, None


class _Entropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
        scores = logits.float()
        softmax = scores.sub(scores.amax(dim=1, keepdim=True)).exp_()
        softmax.div_(softmax.sum(dim=1, keepdim=True))
        terms = torch.special.entr(softmax)
        entropy = terms.sum(dim=1)
        ctx.save_for_backward(softmax, terms, entropy)
        ctx.dtype = logits.dtype
        return entropy

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> torch.Tensor:
        softmax, terms, entropy = ctx.saved_tensors
        gradient = torch.empty_like(softmax)
        half = (softmax.shape[0] + 1) // 2
        for rows in (slice(None, half), slice(half, None)):
            torch.sub(terms[rows], softmax[rows] * entropy[rows, None], out=gradient[rows])
        scale = upstream[0][:, None]
        return gradient.mul_(scale).masked_fill_(scale == 0, 0).to(ctx.dtype)


def _masked(logits: torch.Tensor, tokens: torch.Tensor, keep: torch.Tensor | None) -> torch.Tensor:
    """The logits that the log-prob's softmax sees: those of the keep-mask and, always, of the token itself."""
    if keep is None:
        return logits.float()
    dropped = keep.logical_not().scatter_(1, tokens[:, None], False)
    return logits.float().masked_fill(dropped, float("-inf"))


def _rows(
    logits: torch.Tensor, tokens: torch.Tensor, keep: torch.Tensor | None, with_entropy: bool, with_entropy_grad: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    log_prob: torch.Tensor = _LogProb.apply(logits, tokens, keep)
    if not with_entropy:
        return log_prob, None
    return log_prob, _Entropy.apply(logits if with_entropy_grad else logits.detach())


def log_probs_and_entropy(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    with_entropy: bool = False,
    with_entropy_grad: bool = True,
    chunk_size: int = -1,
    keep_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-prob [N] of each token and entropy [N] of each row of logits [N, V], chunk_size rows at a time."""
    if tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < logits.shape[1]:
        raise ValueError(f"tokens must lie in [0, {logits.shape[1]})")
    if chunk_size < 0 or chunk_size >= logits.shape[0]:
        return _rows(logits, tokens, keep_mask, with_entropy, with_entropy_grad)
    masks = keep_mask.split(chunk_size) if keep_mask is not None else [None] * -(-logits.shape[0] // chunk_size)
    parts = [
        _rows(*rows, with_entropy, with_entropy_grad)
        for rows in zip(logits.split(chunk_size), tokens.split(chunk_size), masks, strict=True)
    ]
    log_prob = torch.cat([part[0] for part in parts])
    return log_prob, torch.cat([part[1] for part in parts if part[1] is not None]) if with_entropy else None
