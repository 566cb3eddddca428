"""Log-probs and entropy of sampled tokens, from one softmax."""

from typing import Any

import torch


class _LogProbAndEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        tokens: torch.Tensor,
        keep: torch.Tensor | None,
        with_entropy: bool,
        with_entropy_grad: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        log_prob, softmax = _log_prob(_masked(logits, tokens, keep), tokens)
        ctx.dtype = logits.dtype
        ctx.with_entropy_grad = with_entropy and with_entropy_grad
        if not with_entropy:
            ctx.save_for_backward(softmax, tokens)
            return log_prob, None
        whole = softmax if keep is None else _log_prob(logits.float(), tokens)[1]
        terms = torch.special.entr(whole)
        entropy = terms.sum(dim=1)
        if with_entropy_grad:
            own = whole.clone() if keep is None else whole
            ctx.save_for_backward(softmax, tokens, own, terms, entropy)
        else:
            ctx.save_for_backward(softmax, tokens)
            ctx.mark_non_differentiable(entropy)
        return log_prob, entropy

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        softmax, tokens, *for_entropy = ctx.saved_tensors
        scale = upstream[0][:, None]
        gradient = softmax.mul(scale.neg())
        gradient.scatter_add_(1, tokens[:, None], scale)
        idle = scale == 0
        if ctx.with_entropy_grad:
            entropy_scale = upstream[1][:, None]
            own, terms, entropy = for_entropy
            entropy_gradient = own.mul(entropy[:, None]).sub_(terms)
            gradient.addcmul_(entropy_gradient, entropy_scale, value=-1)
            idle.logical_and_(entropy_scale == 0)
        return gradient.masked_fill_(idle, 0).to(ctx.dtype), None, None, None, None


def _log_prob(scores: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob and softmax of a block of rows."""
    top = scores.amax(dim=1, keepdim=True)
    softmax = scores.sub(top).exp_()
    total = softmax.sum(dim=1, keepdim=True)
    softmax.div_(total)
    picked = scores.gather(1, tokens[:, None])
    return picked.sub_(top).sub_(total.log_()).squeeze(1), softmax


def _masked(logits: torch.Tensor, tokens: torch.Tensor, keep: torch.Tensor | None) -> torch.Tensor:
    """The logits that the log-prob's softmax sees: those of the keep-mask and, always, of the token itself."""
    if keep is None:
        return logits.float()
    dropped = keep.logical_not().scatter_(1, tokens[:, None], False)
    return logits.float().masked_fill(dropped, float("-inf"))


def _rows(
    logits: torch.Tensor, tokens: torch.Tensor, keep: torch.Tensor | None, with_entropy: bool, with_entropy_grad: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    log_prob, entropy = _LogProbAndEntropy.apply(logits, tokens, keep, with_entropy, with_entropy_grad)
    return log_prob, entropy


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
