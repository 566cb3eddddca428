"""The vocabulary-wide work of the kernel `online` as Triton kernels: one reads the logits, one writes their gradient.

Imports triton, so import it only where a CUDA device calls for it. A row's offset is 64 bits wide, strides are any, and
nothing is tuned at run time: a kernel is compiled anew for another dtype or option, or where sizes or strides divide by
16 and did not before.
"""

import torch
import triton
import triton.language as tl

from runners.kernels.online_rows import LEAST_T, LOWEST, RowGradients, Sums

# Columns that a program works on at a time: 16 for each thread of 8 warps, four 16-byte loads in flight for float32.
BLOCK = 4096
WARPS = 8
# Blocks of logits on their way from memory while another is worked on.
STAGES = tl.constexpr(3)
# Programs that keep a large device busy; rows are split into pieces where there are fewer.
_PROGRAMS = 1024
# Rows whose factors are worked out at a time in backward: all.
ROWS: int | None = None

_LOWEST = tl.constexpr(LOWEST)
_LEAST_T = tl.constexpr(LEAST_T)


def sums(
    logits: torch.Tensor, keep_mask: torch.Tensor | None, temperature: float, *, entropy: bool
) -> tuple[Sums | None, Sums | None]:
    """See online_torch.sums."""
    tokens, width = logits.shape
    blocks = triton.cdiv(width, BLOCK)
    span = triton.cdiv(blocks, min(blocks, max(1, _PROGRAMS // max(1, tokens)))) * BLOCK
    pieces = triton.cdiv(width, span)
    has_whole = entropy or keep_mask is None
    maximum, total, weighted, kept_maximum, kept_total = logits.new_empty(5, pieces, tokens, dtype=torch.float32)
    mask = logits if keep_mask is None else keep_mask.view(torch.uint8)
    if tokens:
        with torch.cuda.device_of(logits):
            _sums_kernel[(tokens, pieces)](
                logits,
                mask,
                maximum,
                total,
                weighted,
                kept_maximum,
                kept_total,
                tokens,
                width,
                span,
                *logits.stride(),
                *mask.stride(),
                temperature,
                has_whole=has_whole,
                has_weighted=entropy,
                has_kept=keep_mask is not None,
                is_scaled=temperature != 1.0,
                block=BLOCK,
                num_warps=WARPS,
            )
    whole = Sums(maximum, total, weighted if entropy else None) if has_whole else None
    return whole, None if keep_mask is None else Sums(kept_maximum, kept_total, None)


def write_gradient(
    gradient: torch.Tensor,
    logits: torch.Tensor,
    keep_mask: torch.Tensor | None,
    target: tuple[torch.Tensor, torch.Tensor],
    rows: RowGradients,
    temperature: float,
) -> None:
    """See online_torch.write_gradient."""
    tokens, width = logits.shape
    if not tokens:
        return
    column = torch.where(target[1], target[0], -1)  # no column is -1
    nothing = rows.at_target
    whole, kept = rows.whole, rows.kept
    mask = logits if keep_mask is None else keep_mask.view(torch.uint8)
    blocks = triton.cdiv(width, BLOCK)
    with torch.cuda.device_of(logits):
        _gradient_kernel[(tokens * blocks,)](
            gradient,
            logits,
            mask,
            nothing if whole is None else whole.shift,
            nothing if whole is None else whole.constant,
            nothing if whole is None or whole.slope is None else whole.slope,
            nothing if kept is None else kept.shift,
            nothing if kept is None else kept.constant,
            nothing if kept is None or kept.offset is None else kept.offset,
            column,
            rows.at_target,
            rows.dead.view(torch.uint8),
            width,
            blocks,
            *gradient.stride(),
            *logits.stride(),
            *mask.stride(),
            temperature,
            has_whole=whole is not None,
            has_slope=whole is not None and whole.slope is not None,
            has_kept=kept is not None,
            has_offset=kept is not None and kept.offset is not None,
            is_scaled=temperature != 1.0,
            block=BLOCK,
            num_warps=WARPS,
        )


@triton.jit(do_not_specialize=["tokens"])
def _sums_kernel(
    logits,
    keep_mask,
    maximum,
    total,
    weighted,
    kept_maximum,
    kept_total,
    tokens,
    width,
    span,
    row_stride,
    column_stride,
    mask_row_stride,
    mask_column_stride,
    temperature,
    has_whole: tl.constexpr,
    has_weighted: tl.constexpr,
    has_kept: tl.constexpr,
    is_scaled: tl.constexpr,
    block: tl.constexpr,
):
    """The sums of one piece of one row. Every lane has sums beneath a maximum of its own, merged once at the end."""
    row = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    start = piece * span
    end = tl.minimum(start + span, width)
    m = tl.full([block], _LOWEST, tl.float32)
    s = tl.zeros([block], tl.float32)
    q = tl.zeros([block], tl.float32)
    kept_m = tl.full([block], _LOWEST, tl.float32)
    kept_s = tl.zeros([block], tl.float32)
    for first in tl.range(start, end, block, num_stages=STAGES):
        columns = (first + tl.arange(0, block)).to(tl.int64)
        inside = columns < end
        x = tl.load(logits + row * row_stride + columns * column_stride, mask=inside, other=-float("inf"))
        x = x.to(tl.float32)
        if has_whole:
            m, s, q = _add(m, s, q, x, temperature, has_weighted, is_scaled)
        if has_kept:
            keep = tl.load(keep_mask + row * mask_row_stride + columns * mask_column_stride, mask=inside, other=0)
            kept_x = tl.where(keep != 0, x, -float("inf"))
            kept_m, kept_s, _ = _add(kept_m, kept_s, kept_s, kept_x, temperature, False, is_scaled)
    place = piece.to(tl.int64) * tokens + row
    if has_whole:
        _store_merged(maximum, total, weighted, place, m, s, q, temperature, has_weighted, is_scaled)
    if has_kept:
        _store_merged(
            kept_maximum, kept_total, kept_total, place, kept_m, kept_s, kept_s, temperature, False, is_scaled
        )


@triton.jit
def _add(m, s, q, x, temperature, has_weighted: tl.constexpr, is_scaled: tl.constexpr):
    """Add a logit to each lane with a single exp: of the smaller of it and the maximum beneath the greater."""
    is_greater = x > m
    t = _t(tl.where(is_greater, m, x), tl.where(is_greater, x, m), 0.0, temperature, is_scaled)
    e = tl.exp(t)
    if has_weighted:
        q = tl.where(is_greater, (q + t * s) * e, q + t * e)
        s = tl.where(is_greater, s * e + 1.0, s + e)
    else:
        s = tl.where(is_greater, s * e + 1.0, s + e)
        q = s
    return tl.where(is_greater, x, m), s, q


@triton.jit
def _store_merged(
    maximum, total, weighted, place, m, s, q, temperature, has_weighted: tl.constexpr, is_scaled: tl.constexpr
):
    """Merge all lanes."""
    greatest = tl.max(m, 0)
    t = _t(m, greatest, 0.0, temperature, is_scaled)
    e = tl.exp(t)
    tl.store(maximum + place, greatest)
    tl.store(total + place, tl.sum(s * e, 0))
    if has_weighted:
        tl.store(weighted + place, tl.sum((q + t * s) * e, 0))


@triton.jit
def _gradient_kernel(
    gradient,
    logits,
    keep_mask,
    shift,
    constant,
    slope,
    kept_shift,
    kept_constant,
    kept_offset,
    target_column,
    at_target,
    dead,
    width,
    blocks,
    gradient_row_stride,
    gradient_column_stride,
    row_stride,
    column_stride,
    mask_row_stride,
    mask_column_stride,
    temperature,
    has_whole: tl.constexpr,
    has_slope: tl.constexpr,
    has_kept: tl.constexpr,
    has_offset: tl.constexpr,
    is_scaled: tl.constexpr,
    block: tl.constexpr,
):
    """One block of one row's gradient, which may lie where the logits do. A dead row is not read."""
    row = (tl.program_id(0) // blocks).to(tl.int64)
    columns = (tl.program_id(0) % blocks).to(tl.int64) * block + tl.arange(0, block)
    inside = columns < width
    place = gradient + row * gradient_row_stride + columns * gradient_column_stride
    g = tl.zeros([block], tl.float32)
    if tl.load(dead + row) == 0:
        x = tl.load(logits + row * row_stride + columns * column_stride, mask=inside, other=-float("inf")).to(
            tl.float32
        )
        if has_whole:
            t = _t(x, tl.load(shift + row), 0.0, temperature, is_scaled)
            factor = tl.load(constant + row)
            if has_slope:
                factor += tl.load(slope + row) * t
            g = tl.exp(t) * factor
        if has_kept:
            keep = tl.load(keep_mask + row * mask_row_stride + columns * mask_column_stride, mask=inside, other=0)
            offset = 0.0
            if has_offset:
                offset = tl.load(kept_offset + row)
            kept_t = _t(x, tl.load(kept_shift + row), offset, temperature, is_scaled)
            g += tl.where(keep != 0, tl.exp(kept_t) * tl.load(kept_constant + row), 0.0)
        g = tl.where(columns == tl.load(target_column + row), tl.load(at_target + row), g)
    tl.store(place, g.to(gradient.dtype.element_ty), mask=inside)


@triton.jit
def _t(x, shift, offset, temperature, is_scaled: tl.constexpr):
    """(x - shift) / temperature - offset, at least -1000 so that exp t times it is 0 and not NaN; NaN stays NaN."""
    t = x - shift
    if is_scaled:
        t = t / temperature
    t -= offset
    return tl.where(t < _LEAST_T, _LEAST_T, t)
