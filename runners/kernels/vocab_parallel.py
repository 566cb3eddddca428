"""A vocabulary split over the ranks of a tensor-parallel group: whose column a target is, and sums over all shards.

`group=None` everywhere means that this rank holds the whole vocabulary: no collective. Knows nothing of kernels.
"""

import torch
import torch.distributed as dist


def all_reduce_max(values: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Replace `values` by their greatest over the group, in place, and return them."""
    return _all_reduce(values, dist.ReduceOp.MAX, group)


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
