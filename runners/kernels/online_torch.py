"""The vocabulary-wide work of the kernel `online` in plain torch, tile by tile, so that the working set stays in cache.

A tile is some whole rows, or some columns of one. Where an operation has a slow form (a select by a bool, a fused
multiply-add of broadcast rows) and a fast one, this takes the fast.
"""

from collections.abc import Iterator

import torch

from runners.kernels.online_rows import LOWEST, RowGradients, Sums, Wave

# Rows whose factors are worked out at a time in backward.
ROWS: int | None = 512
# Bytes of a call's temporaries: so many at least, and a 64th of the logits up to what a shared cache holds. Fewer,
# larger tiles lose less to the threads' meeting after each operation.
_LEAST_BYTES = 3 << 18
_MOST_BYTES = 4 << 20
# exp of less takes 10 to 25 times as long on a CPU, and is as good as nothing beside the exp 0 = 1 that is in each sum;
# t exp t is 0 there, where minus infinity times 0 is NaN.
_LEAST_T = -87.0
_LEAST_EXP = 2e-38  # a little more than exp(-87)
# The mantissa of a float32: all bits but these make minus infinity.
_MANTISSA = 0x007FFFFF


def sums(
    logits: torch.Tensor, keep_mask: torch.Tensor | None, temperature: float, *, entropy: bool
) -> tuple[Sums | None, Sums | None]:
    """One pass over the logits [N, V/TP]: sums over all columns, and over the kept ones, each [pieces, N].

    The first has its weighted sum with `entropy`, and is None where there is a mask and no entropy; the second is None
    without a mask.
    """
    tokens, width = logits.shape
    t_buffer, e_buffer, *x_buffer = _buffers(logits, 2 + (logits.dtype != torch.float32))
    pieces = _columns(width, t_buffer.numel() or width)
    whole = _empty_sums(logits, len(pieces), weighted=entropy) if entropy or keep_mask is None else None
    kept = None if keep_mask is None else _empty_sums(logits, len(pieces), weighted=False)
    for rows in _rows(tokens, width, t_buffer.numel()):
        for piece, columns in enumerate(pieces):
            x = logits[rows, columns]
            t, e = _like(x, t_buffer), _like(x, e_buffer)
            if x_buffer:
                x = _like(x, x_buffer[0]).copy_(x)
            if kept is not None and keep_mask is not None:
                kept_x = _drop(x, keep_mask[rows, columns], e, out=t)
                _sum_tile(kept_x, t, t, kept, piece, rows, temperature)
            if whole is not None:
                _sum_tile(x, t, e, whole, piece, rows, temperature)
    return whole, kept


def write_gradient(
    gradient: torch.Tensor,
    logits: torch.Tensor,
    keep_mask: torch.Tensor | None,
    target: tuple[torch.Tensor, torch.Tensor],
    by_row: RowGradients,
    temperature: float,
) -> None:
    """Write the gradient [n, V/TP], which may be the logits' own memory; `target` is (column, owned), both [n, 1]."""
    tokens, width = logits.shape
    dead = by_row.dead.tolist()
    has_both = by_row.whole is not None and by_row.kept is not None
    buffers = _buffers(logits, 1 + has_both + (logits.dtype != torch.float32))
    for rows in _rows(tokens, width, buffers[0].numel()):
        if all(dead[rows]):
            gradient[rows].zero_()
            continue
        for columns in _columns(width, buffers[0].numel()):
            mask = None if keep_mask is None else keep_mask[rows, columns]
            _write_tile(gradient[rows, columns], logits[rows, columns], mask, by_row, rows, buffers, temperature)
        if any(dead[rows]):
            gradient[rows].index_fill_(0, by_row.dead[rows].nonzero()[:, 0], 0.0)
    column, owned = target
    live = (owned[:, 0] & ~by_row.dead).nonzero()[:, 0]
    gradient.index_put_((live, column[live, 0]), by_row.at_target[live].to(gradient.dtype))


def _sum_tile(
    x: torch.Tensor, t: torch.Tensor, e: torch.Tensor, into: Sums, piece: int, rows: slice, temperature: float
) -> None:
    """The sums of one tile. `t` may be `x`; `e` may be `t` where no weighted sum is wanted."""
    maximum = into.maximum[piece, rows]
    torch.amax(x, 1, out=maximum).clamp_min_(LOWEST)
    _beneath(x, maximum, temperature, out=t).clamp_min_(_LEAST_T)
    torch.exp(t, out=e)
    torch.sum(e, 1, out=into.total[piece, rows])
    if into.weighted is not None:
        torch.sum(t.mul_(e), 1, out=into.weighted[piece, rows])


def _write_tile(
    gradient: torch.Tensor,
    logits: torch.Tensor,
    keep_mask: torch.Tensor | None,
    by_row: RowGradients,
    rows: slice,
    buffers: list[torch.Tensor],
    temperature: float,
) -> None:
    """The gradient of one tile, but for target columns and dead rows. The logits' place is free after its last read."""
    scratch, *others = (_like(logits, buffer) for buffer in buffers)
    x, g = logits, gradient
    if gradient.dtype != torch.float32:
        x = g = others.pop().copy_(logits)
    kept_part = None
    if by_row.kept is not None and keep_mask is not None:
        kept_part = _wave(x, by_row.kept, rows, scratch, temperature, out=others.pop() if others else g)
        keep_bits = scratch.view(torch.int32).copy_(keep_mask).neg_()  # all ones where kept
        kept_part.view(torch.int32).bitwise_and_(keep_bits)
    if by_row.whole is not None:
        _wave(x, by_row.whole, rows, scratch, temperature, out=g)
        if kept_part is not None:
            g.add_(kept_part)
    if g is not gradient:
        gradient.copy_(g)


def _wave(
    x: torch.Tensor, wave: Wave, rows: slice, scratch: torch.Tensor, temperature: float, *, out: torch.Tensor
) -> torch.Tensor:
    """exp t (constant + slope t), exactly zero where exp t is as good as that."""
    t = _beneath(x, wave.shift[rows], temperature, out=out)
    if wave.offset is not None:
        t.sub_(wave.offset[rows, None])
    t.clamp_min_(_LEAST_T)
    if wave.slope is None:
        return torch.threshold_(t.exp_(), _LEAST_EXP, 0.0).mul_(wave.constant[rows, None])
    torch.threshold_(torch.exp(t, out=scratch), _LEAST_EXP, 0.0)
    # addcmul of broadcast rows takes three times as long as its mul_ and add_.
    return t.mul_(wave.slope[rows, None]).add_(wave.constant[rows, None]).mul_(scratch)


def _beneath(x: torch.Tensor, shift: torch.Tensor, temperature: float, *, out: torch.Tensor) -> torch.Tensor:
    """(x - shift) / temperature."""
    torch.sub(x, shift[:, None], out=out)
    return out if temperature == 1.0 else out.div_(temperature)


def _drop(x: torch.Tensor, keep_mask: torch.Tensor, scratch: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    """The logits, minus infinity where they are not kept, by their bits: where and masked_fill take 6 times as long."""
    ones, bits = scratch.view(torch.int32), out.view(torch.int32)
    ones.copy_(keep_mask).sub_(1)  # all ones where dropped
    torch.bitwise_or(x.view(torch.int32), ones, out=bits)
    bits.bitwise_xor_(ones.bitwise_and_(_MANTISSA))
    return out


def _buffers(logits: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Float32 buffers of a tile's size."""
    most = min(_MOST_BYTES, max(_LEAST_BYTES, logits.numel() * logits.element_size() // 64))
    size = min(most // (4 * count), logits.numel())
    return [logits.new_empty(size, dtype=torch.float32) for _ in range(count)]


def _like(tile: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    """As much of a buffer as the tile has elements, contiguous."""
    return buffer[: tile.numel()].view(tile.shape)


def _empty_sums(logits: torch.Tensor, pieces: int, *, weighted: bool) -> Sums:
    maximum, total, products = logits.new_empty(3, pieces, logits.shape[0], dtype=torch.float32)
    return Sums(maximum, total, products if weighted else None)


def _rows(tokens: int, width: int, tile: int) -> Iterator[slice]:
    """The rows of a tile at a time, one where a row is more than a tile."""
    size = max(1, tile // width)
    return (slice(start, min(start + size, tokens)) for start in range(0, tokens, size))


def _columns(width: int, tile: int) -> list[slice]:
    """The columns of a tile at a time, in pieces of about one width."""
    pieces = -(-width // tile)
    size = -(-width // pieces)
    return [slice(start, min(start + size, width)) for start in range(0, width, size)]
