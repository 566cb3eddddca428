"""The inputs of a case: logits, targets, keep-mask and upstream gradients, the same for every kernel and every run.

Knows the distributions that hide or show faults; knows nothing of kernels, and judges nothing.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

Distribution = Literal[
    "flat", "spread", "confident", "confident_wrong", "offset", "ties", "one_hot", "masked", "bf16_exact", "neg_inf"
]
Upstream = Literal["signed", "one_row"]


@dataclass(frozen=True, slots=True)
class Inputs:
    """One rank's inputs. Two of these are the same inputs if their `digest` is equal.

    `logits` [N, V/TP] in the case's dtype, without requires_grad; `targets` [N] int64, ids in the whole vocabulary;
    `keep_mask` [N, V/TP] bool or None, False at the target in some rows; `upstream_log_prob`, `upstream_entropy` [N]
    float32.
    """

    logits: torch.Tensor
    targets: torch.Tensor
    keep_mask: torch.Tensor | None
    upstream_log_prob: torch.Tensor
    upstream_entropy: torch.Tensor


def make_inputs(
    *,
    tokens: int,
    vocabulary: int,
    dtype: torch.dtype = torch.float32,
    distribution: Distribution = "spread",
    keep_mask: bool = False,
    upstream: Upstream = "signed",
    seed: int = 0,
    rank: int = 0,
    world_size: int = 1,
) -> Inputs:
    """Make rank `rank`'s share of the inputs of a case, on the CPU.

    Every rank draws the whole vocabulary and takes its columns, so that the whole does not depend on `world_size`.
    `masked` always has a keep-mask; every other distribution has one if `keep_mask`. Raises ValueError for an unknown
    distribution or upstream, and where the vocabulary does not divide.
    """
    if vocabulary % world_size:
        raise ValueError(f"vocabulary {vocabulary} does not divide by world_size {world_size}: choose one that does")
    if distribution not in _LOGITS:
        raise ValueError(f"unknown distribution {distribution!r}; known are {', '.join(_LOGITS)}")
    if upstream not in _UPSTREAMS:
        raise ValueError(f"unknown upstream {upstream!r}; known are {', '.join(_UPSTREAMS)}")
    generator = torch.Generator().manual_seed(seed)
    masked = distribution == "masked"
    targets = (
        _spread_targets(tokens, vocabulary) if masked else torch.randint(vocabulary, (tokens,), generator=generator)
    )
    logits = _LOGITS[distribution](torch.randn(tokens, vocabulary, generator=generator), targets, generator)
    mask = _keep_mask(targets, vocabulary, masked, generator) if masked or keep_mask else None
    width = vocabulary // world_size
    columns = slice(rank * width, (rank + 1) * width)
    return Inputs(
        logits=logits[:, columns].to(dtype).contiguous(),
        targets=targets,
        keep_mask=None if mask is None else mask[:, columns].contiguous(),
        upstream_log_prob=_UPSTREAMS[upstream](tokens, generator),
        upstream_entropy=_UPSTREAMS[upstream](tokens, generator),
    )


def digest(inputs: Inputs) -> str:
    """SHA-256, hexadecimal, over dtype, shape and bytes of every tensor of `inputs`."""
    sha = hashlib.sha256()
    for name in Inputs.__slots__:
        tensor: torch.Tensor | None = getattr(inputs, name)
        if tensor is None:
            sha.update(f"{name}:None;".encode())
            continue
        sha.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
        sha.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()


def _flat(noise: torch.Tensor, targets: torch.Tensor, generator: torch.Generator) -> torch.Tensor:  # noqa: ARG001
    """N(0, 1)."""
    return noise


def _spread(noise: torch.Tensor, targets: torch.Tensor, generator: torch.Generator) -> torch.Tensor:  # noqa: ARG001
    """6 N(0, 1): some ids have nearly all the probability."""
    return noise.mul_(6.0)


def _confident(noise: torch.Tensor, targets: torch.Tensor, generator: torch.Generator) -> torch.Tensor:  # noqa: ARG001
    """The target is 10 above the row's greatest logit: its gradient is the small difference 1 - p."""
    return noise.scatter_(1, targets[:, None], noise.amax(1, keepdim=True) + 10.0)


def _confident_wrong(noise: torch.Tensor, targets: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """20 more on one id that is not the target."""
    wrong = _another_id(targets, noise.shape[1], generator)[:, None]
    return noise.scatter_add_(1, wrong, torch.full(wrong.shape, 20.0))


def _offset(noise: torch.Tensor, targets: torch.Tensor, generator: torch.Generator) -> torch.Tensor:  # noqa: ARG001
    """N(0, 1) + 1000: a form that is not shift-invariant loses digits."""
    return noise.add_(1000.0)


def _ties(noise: torch.Tensor, targets: torch.Tensor, generator: torch.Generator) -> torch.Tensor:  # noqa: ARG001
    """One value all along a row: the entropy is ln V exactly."""
    return noise[:, :1].expand_as(noise)


def _one_hot(noise: torch.Tensor, targets: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """-80 but for one +80: at the target in even rows, elsewhere in odd ones."""
    even = torch.arange(targets.shape[0]) % 2 == 0
    hot = torch.where(even, targets, _another_id(targets, noise.shape[1], generator))
    return noise.fill_(-80.0).scatter_(1, hot[:, None], 80.0)


def _bf16_exact(noise: torch.Tensor, targets: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Spread, on the bfloat16 grid: a bfloat16 and a float32 input must give identical output."""
    return _spread(noise, targets, generator).bfloat16().float()


def _neg_inf(noise: torch.Tensor, targets: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """N(0, 1) with about a tenth of the ids, never the target, at probability zero."""
    target_logits = noise.gather(1, targets[:, None])
    noise.masked_fill_(torch.rand(noise.shape, generator=generator) < 0.1, -torch.inf)
    return noise.scatter_(1, targets[:, None], target_logits)


_LOGITS: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Generator], torch.Tensor]] = {
    "flat": _flat,
    "spread": _spread,
    "confident": _confident,
    "confident_wrong": _confident_wrong,
    "offset": _offset,
    "ties": _ties,
    "one_hot": _one_hot,
    "masked": _spread,
    "bf16_exact": _bf16_exact,
    "neg_inf": _neg_inf,
}


def _another_id(targets: torch.Tensor, vocabulary: int, generator: torch.Generator) -> torch.Tensor:
    """A random id that is not the target; the target itself in a vocabulary of one."""
    step = torch.randint(1, max(2, vocabulary), targets.shape, generator=generator)
    return (targets + step) % vocabulary


def _spread_targets(tokens: int, vocabulary: int) -> torch.Tensor:
    """Targets from the first to the last column in even steps, so that every shard owns some."""
    return torch.arange(tokens) * (vocabulary - 1) // max(1, tokens - 1)


def _keep_mask(targets: torch.Tensor, vocabulary: int, sparse: bool, generator: torch.Generator) -> torch.Tensor:
    """A random nucleus: half of the ids without the first row's target; if `sparse` 0.1 % without any target."""
    share = 0.001 if sparse else 0.5
    mask = torch.rand(targets.shape[0], vocabulary, generator=generator) < share
    absent = slice(None) if sparse else slice(0, 1)
    mask[absent].scatter_(1, targets[absent, None], False)
    return mask


def _signed(tokens: int, generator: torch.Generator) -> torch.Tensor:
    """N(0, 1) with exact zeros in a quarter of the rows, the first among them where N > 3."""
    values = torch.randn(tokens, generator=generator)
    zeros = torch.randperm(max(0, tokens - 1), generator=generator)[: max(0, tokens // 4 - 1)] + 1
    values[zeros] = 0.0
    values[: 1 if tokens > 3 else 0] = 0.0
    return values


def _one_row(tokens: int, generator: torch.Generator) -> torch.Tensor:
    """Zero but for one row, which is not the first where there are more."""
    values = torch.zeros(tokens)
    if tokens:
        row = int(torch.randint(min(1, tokens - 1), tokens, (1,), generator=generator))
        values[row] = torch.randn(1, generator=generator)[0]
    return values


_UPSTREAMS: dict[str, Callable[[int, torch.Generator], torch.Tensor]] = {"signed": _signed, "one_row": _one_row}
