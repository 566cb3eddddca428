"""The arithmetic by row of the kernel `online`: a softmax's sums, how they merge, and what backward needs of them.

Everything here is [N] or [pieces, N], float32; what is as wide as the vocabulary is runners.kernels.online_torch's and
online_triton's. Maxima and shifts are logits, not yet divided by the temperature T; t = (x - shift) / T throughout.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from runners.kernels.vocab_parallel import all_reduce_max_of_shards, all_reduce_sum

# The least maximum: beneath it minus infinity stays minus infinity and never becomes NaN.
LOWEST = torch.finfo(torch.float32).min
# The least t that is told from another: exp is 0 from -104 on, and 0 x -1000 is 0 where 0 x -inf is NaN.
LEAST_T = -1000.0


@dataclass(frozen=True, slots=True)
class Sums:
    """Over some columns: `maximum` max x, at least LOWEST; `total` sum exp t and `weighted` sum t exp t beneath it."""

    maximum: torch.Tensor
    total: torch.Tensor
    weighted: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Softmax:
    """A row's softmax p = exp t / total, with `mean` sum p t, None where no entropy needs it.

    Where there is an `offset`, it is taken from t: a part of the shift that must not be rounded with it.
    """

    shift: torch.Tensor
    total: torch.Tensor
    mean: torch.Tensor | None = None
    offset: torch.Tensor | None = None

    def t(self, logit: torch.Tensor, temperature: float) -> torch.Tensor:
        """t of one logit a row."""
        t = (logit - self.shift) / temperature
        return t if self.offset is None else t - self.offset


@dataclass(frozen=True, slots=True)
class Wave:
    """One softmax's part of the gradient: exp t (constant + slope t); without `slope` exp t constant."""

    shift: torch.Tensor
    constant: torch.Tensor
    slope: torch.Tensor | None = None
    offset: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class RowGradients:
    """The gradient of rows: `whole` over all columns plus `kept` over those of the keep-mask, but `at_target` in the
    target's column, and exactly zero in the rows that are `dead` [n] bool.
    """

    whole: Wave | None
    kept: Wave | None
    at_target: torch.Tensor
    dead: torch.Tensor


def merge(pieces: Sums, temperature: float) -> Sums:
    """The sums [N] over all pieces [pieces, N] of a vocabulary."""
    maximum = pieces.maximum.amax(0)
    total, weighted = _beneath(pieces, maximum, temperature)
    return Sums(maximum, total.sum(0), None if weighted is None else weighted.sum(0))


def add_target(pieces: Sums, target_logit: torch.Tensor, is_missing: torch.Tensor) -> Sums:
    """The kept columns' sums with the target's in one piece more, for rows where it `is_missing` [N] bool."""
    maximum = torch.where(is_missing, target_logit.clamp_min(LOWEST), LOWEST)
    return Sums(
        torch.cat((pieces.maximum, maximum[None])), torch.cat((pieces.total, is_missing.float()[None])), pieces.weighted
    )


def merge_ranks(
    shards: list[Sums],
    logits: torch.Tensor,
    target_logit: torch.Tensor,
    owned: torch.Tensor,
    temperature: float,
    group: dist.ProcessGroup | None,
) -> tuple[list[Sums], torch.Tensor]:
    """The sums [N] over the whole vocabulary, and the target's t beneath the first's maximum, by two collectives.

    `logits` is this rank's shard; `target_logit` [N] counts where `owned` [N] bool says that this rank has the
    target's column.
    """
    maxima = all_reduce_max_of_shards(torch.stack([shard.maximum for shard in shards]), logits, owned, group)
    beneath = [_beneath(shard, maximum, temperature) for shard, maximum in zip(shards, maxima, strict=True)]
    target = torch.where(owned, (target_logit - maxima[0]) / temperature, 0.0)
    parts = [part for pair in beneath for part in pair if part is not None]
    target, *sums = all_reduce_sum(torch.stack([target, *parts]), group).unbind()
    remaining = iter(sums)
    merged = [
        Sums(maximum, next(remaining), None if weighted is None else next(remaining))
        for maximum, (_, weighted) in zip(maxima, beneath, strict=True)
    ]
    return merged, target


def softmax_of(sums: Sums) -> Softmax:
    """The softmax beneath its maximum, 8 bytes a row, 12 with the mean."""
    return Softmax(sums.maximum, sums.total, None if sums.weighted is None else sums.weighted / sums.total)


def pack(softmaxes: Sequence[Softmax], *, entropy: bool, temperature: float) -> list[torch.Tensor]:
    """What backward must keep of the log-prob's softmax, first, and of the entropy's, last: 4 bytes a row and tensor.

    Without `entropy` the first's shift and total. With it shift, total and mean of the last, the shift moved to the
    mean logit, where (mean - t) exp t loses least: the maximum lies ln V above it at most, so that exp t stays finite.
    Where the two differ also the log of the first's total beneath that shift.
    """
    if not entropy:
        return [softmaxes[0].shift.clone(), softmaxes[0].total.clone()]  # views keep what lies beside them
    kept, whole = softmaxes[0], softmaxes[-1]
    assert whole.mean is not None
    shift = (whole.shift + whole.mean.double() * temperature).float()
    rise = (whole.shift.double() - shift) / temperature
    packed = [shift, (whole.total * rise.exp()).float(), (whole.mean + rise).float()]
    if kept is not whole:
        packed.append(((kept.shift.double() - shift) / temperature + kept.total.double().log()).float())
    return packed


def unpack(packed: Sequence[torch.Tensor], rows: slice) -> list[Softmax]:
    """Of some rows, the softmax or the two of them that were packed."""
    shift, total, *others = (tensor[rows] for tensor in packed)
    whole = Softmax(shift, total, others[0] if others else None)
    if len(others) < 2:
        return [whole]
    return [Softmax(shift, torch.ones_like(total), offset=others[1]), whole]


def row_gradients(
    softmaxes: Sequence[Softmax],
    target_logit: torch.Tensor,
    upstream_log_prob: torch.Tensor,
    upstream_entropy: torch.Tensor | None,
    *,
    is_masked: bool,
    temperature: float,
) -> RowGradients:
    """Factors of upstream_log_prob ([j = y] - p_j) / T + upstream_entropy p_j (sum p t - t_j) / T, all [n].

    The first softmax is the log-prob's, the last the entropy's; without a keep-mask they are one, and so is the wave.
    """
    log_prob_softmax, entropy_softmax = softmaxes[0], softmaxes[-1]
    g = upstream_log_prob / temperature
    log_prob_wave = Wave(log_prob_softmax.shift, -g / log_prob_softmax.total, offset=log_prob_softmax.offset)
    log_p = log_prob_softmax.t(target_logit, temperature) - log_prob_softmax.total.log()
    at_target = -g * log_p.expm1()  # 1 - p without the cancellation
    dead = upstream_log_prob == 0
    if upstream_entropy is None or entropy_softmax.mean is None:
        whole, kept = (None, log_prob_wave) if is_masked else (log_prob_wave, None)
        return RowGradients(whole, kept, at_target, dead)
    h = upstream_entropy / temperature / entropy_softmax.total
    t = entropy_softmax.t(target_logit, temperature).clamp_min(LEAST_T)
    at_target = at_target + h * t.exp() * (entropy_softmax.mean - t)
    dead = dead & (upstream_entropy == 0)
    entropy_wave = Wave(entropy_softmax.shift, h * entropy_softmax.mean, -h)
    if is_masked:
        return RowGradients(entropy_wave, log_prob_wave, at_target, dead)
    both = Wave(entropy_wave.shift, entropy_wave.constant + log_prob_wave.constant, -h)
    return RowGradients(both, None, at_target, dead)


def _beneath(sums: Sums, maximum: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Total and weighted as they are beneath a greater maximum."""
    t = ((sums.maximum - maximum) / temperature).clamp_min(LEAST_T)
    weight = t.exp()
    weighted = None if sums.weighted is None else (sums.weighted + t * sums.total) * weight
    return sums.total * weight, weighted
