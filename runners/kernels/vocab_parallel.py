"""A vocabulary split over the ranks of a tensor-parallel group: whose column a target is, and sums over all shards.

`group=None` everywhere means that this rank holds the whole vocabulary: no collective. Knows nothing of kernels.
"""

import torch
import torch.distributed as dist


def all_reduce_max(values: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Replace `values` by their greatest over the group, in place, and return them."""
    return _all_reduce(values, dist.ReduceOp.MAX, group)


def all_reduce_max_of_shards(
    values: torch.Tensor, logits: torch.Tensor, owned: torch.Tensor, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """As `all_reduce_max` of float32 values, in a new tensor; by 28 bytes a call the ranks compare their shards too.

    `logits` is a rank's shard, `owned` bool the rows whose target it holds. Raises ValueError on every rank where the
    shards differ in width, or where each rank was handed the same columns, the whole vocabulary: they are equal,
    not of one value all along, and no target is on any rank but the first.
    """
    if group is None or group.size() == 1 or not values.numel():
        return all_reduce_max(values, group)
    facts = _shard_facts(logits, owned, group.rank())
    both = all_reduce_max(torch.cat((values.flatten(), facts)), group)
    widest, narrowest, *prints, is_parted = (both[-len(facts) :] * facts.new_tensor(_SIGNS)).tolist()
    if widest != narrowest:
        raise ValueError(
            f"logits has {logits.shape[1]} columns here and {narrowest:.0f} to {widest:.0f} on the group's ranks: each "
            "must hold V/TP; pad the vocabulary so that it divides"
        )
    if prints[0::2] == prints[1::2] and not is_parted:
        raise ValueError(
            f"logits has the same {logits.shape[1]} columns on all {group.size()} ranks: it must be [N, V/TP], this "
            "rank's own; pass its shard, or group=None for a whole vocabulary on each rank"
        )
    return both[: -len(facts)].view_as(values)


# A greatest, and a least as the greatest of what is negated, in turns.
_MULTIPLIER = 0x1E3779B97F4A7C15  # odd, without a pattern: the golden ratio's bits
_SIGNS = (1.0, -1.0, 1.0, -1.0, 1.0, -1.0, 1.0)


def _shard_facts(logits: torch.Tensor, owned: torch.Tensor, rank: int) -> torch.Tensor:
    """[7] float32: width and a fingerprint of two numbers, each also negated, and 1 where it is plain that the shard is
    this rank's own: it holds a target, other than the first rank, or the row looked at has one value all along, if any.
    """
    width = logits.shape[1]
    row = logits.detach()[logits.shape[0] // 2].float()
    places = torch.arange(1, 2 * width, 2, device=logits.device)
    # Odd multipliers, so that each bit counts; integers of 64 bits wrap. The upper 48 bits, which float32 holds in two.
    mixed = (row.contiguous().view(torch.int32).long() * (places * _MULTIPLIER)).sum()
    halves = torch.stack(((mixed >> 40) & 0xFFFFFF, (mixed >> 16) & 0xFFFFFF)).float()
    is_own = (owned.any() & (rank > 0)) | ~(row.amax() > row.amin())
    widths = halves.new_tensor([width, -width])
    return torch.cat((widths, torch.stack((halves, -halves), 1).flatten(), is_own.float()[None]))


def all_reduce_sum(values: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Replace `values` by their sum over the group, in place, and return them."""
    return _all_reduce(values, dist.ReduceOp.SUM, group)


def _all_reduce(
    values: torch.Tensor, operation: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None
) -> torch.Tensor:
    if group is not None and values.numel():
        dist.all_reduce(values, operation, group)
    return values


def locate_targets(
    targets: torch.Tensor, width: int, group: dist.ProcessGroup | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the targets on this rank's shard of `width` columns.

    `targets` [N] int64. Returns (column, owned), both [N, 1]: int64 in 0 .. width - 1, and bool, False where another
    rank owns the target and `column` means nothing.
    """
    column = targets[:, None] - (0 if group is None else group.rank() * width)
    owned = (column >= 0) & (column < width)
    return column.clamp(0, width - 1), owned


def dropped_ids(keep_mask: torch.Tensor, column: torch.Tensor, owned: torch.Tensor) -> torch.Tensor:
    """The ids outside the softmax [N, V/TP] bool: all that `keep_mask` does not keep, but never a target."""
    dropped = ~keep_mask
    return dropped.scatter_(1, column, dropped.gather(1, column) & ~owned)
