"""The float64 oracle: log-prob, entropy and both gradients from plain maths, in closed form.

Shares nothing with the kernels, so that it cannot share their faults. Imports torch and the standard library only.
"""

from dataclasses import dataclass

import torch

# Elements of one block of rows: small enough for its float64 temporaries to stay in cache.
_BLOCK_ELEMENTS = 1 << 16


@dataclass(frozen=True, slots=True)
class Reference:
    """What a kernel ought to give, float64: `log_prob`, `entropy` [N]; the gradients with respect to the logits of
    sum(upstream_log_prob * log_prob) and of sum(upstream_entropy * entropy), apart, [N, V].
    """

    log_prob: torch.Tensor
    entropy: torch.Tensor
    g_log_prob: torch.Tensor
    g_entropy: torch.Tensor


def reference(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    upstream_log_prob: torch.Tensor,
    upstream_entropy: torch.Tensor,
    keep_mask: torch.Tensor | None = None,
    temperature: float = 1.0,
) -> Reference:
    """Evaluate the closed forms on the whole vocabulary, the logits upcast as they are.

    `logits` [N, V] any float dtype; `targets` [N] int64; `keep_mask` [N, V] bool restricts the log-prob's softmax, the
    target always kept; upstreams [N]. For z = logits / temperature, p = softmax z:
        log_prob = z_y - lse z           d log_prob / d z_j = [j = y] - p_j
        entropy  = -sum p log p          d entropy / d z_j  = p_j (sum p z - z_j)
    Entries of probability zero contribute zero; a row with a zero upstream has a zero gradient whatever its logits.
    Works by blocks of rows: beyond the results it needs about a dozen rows of float64, or 8 MiB where that is more.
    """
    tokens, vocabulary = logits.shape
    result = Reference(
        log_prob=torch.empty(tokens, dtype=torch.float64, device=logits.device),
        entropy=torch.empty(tokens, dtype=torch.float64, device=logits.device),
        g_log_prob=torch.empty(tokens, vocabulary, dtype=torch.float64, device=logits.device),
        g_entropy=torch.empty(tokens, vocabulary, dtype=torch.float64, device=logits.device),
    )
    for start in range(0, tokens, max(1, _BLOCK_ELEMENTS // vocabulary)):
        rows = slice(start, start + max(1, _BLOCK_ELEMENTS // vocabulary))
        z = logits[rows].double() / temperature
        log_p, p = _softmax(z)
        kept_log_p, kept_p = (log_p, p) if keep_mask is None else _softmax(_restrict(z, targets[rows], keep_mask[rows]))
        result.log_prob[rows] = kept_log_p.gather(1, targets[rows, None])[:, 0]
        result.g_log_prob[rows] = _log_prob_gradient(
            kept_p, targets[rows], upstream_log_prob[rows].double() / temperature
        )
        result.entropy[rows], result.g_entropy[rows] = _entropy_and_gradient(
            log_p, p, upstream_entropy[rows].double() / temperature
        )
    return result


def _softmax(z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """log p = z - lse z and p by row, shifted by the row's maximum."""
    shifted = z - z.amax(1, keepdim=True)
    exponential = shifted.exp()
    total = exponential.sum(1, keepdim=True)
    return shifted - total.log(), exponential / total


def _restrict(z: torch.Tensor, targets: torch.Tensor, keep_mask: torch.Tensor) -> torch.Tensor:
    """Minus infinity outside the kept ids and the target."""
    return torch.where(keep_mask.scatter(1, targets[:, None], True), z, -torch.inf)


def _log_prob_gradient(p: torch.Tensor, targets: torch.Tensor, upstream: torch.Tensor) -> torch.Tensor:
    """upstream ([j = y] - p_j)."""
    at_target = 1.0 - p.gather(1, targets[:, None])
    return _scale_rows((-p).scatter(1, targets[:, None], at_target), upstream)


def _entropy_and_gradient(
    log_p: torch.Tensor, p: torch.Tensor, upstream: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """H = -sum p log p and upstream p_j (-H - log p_j): log p = z - lse, and lse drops out."""
    finite_log_p = torch.where(log_p == -torch.inf, 0.0, log_p)
    entropy = -(p * finite_log_p).sum(1)
    return entropy, _scale_rows(p * (-entropy[:, None] - finite_log_p), upstream)


def _scale_rows(derivative: torch.Tensor, upstream: torch.Tensor) -> torch.Tensor:
    """Each row times its upstream gradient, exactly zero where that is zero."""
    return torch.where(upstream[:, None] == 0, 0.0, derivative * upstream[:, None])
