"""The numeric metrics: a kernel's outputs and gradients against the float64 oracle, and against other fp32 forms.

Definitions are KERNELS.md's. Judges nothing: a value that came out NaN or infinite is returned as such. Kernels under
measurement are handed no value of the oracle.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from runners.instruments.subject import Branch, Branches, Options, Subject, branches
from runners.kernels import registry
from runners.kernels.inputs import Inputs
from runners.kernels.reference import Reference, reference

ORACLE = "closed-form-float64/1"
_PEER, _LEGACY = "peer", "legacy_bf16"
# Denominators are at least this share of the row's upstream gradient.
_FLOOR = 2.0**-24
# Significant bits of a gradient's dtype, the hidden one included.
_PRECISION = {torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
# Elements in a block of rows: a handful of float64 temporaries of this size stay in cache.
_BLOCK_ELEMENTS = 1 << 16


@dataclass(frozen=True, slots=True)
class Yardstick:
    """What every kernel is held against on one set of inputs.

    `legacy_gradient` is the legacy kernel's log-prob gradient rounded to bfloat16; `peer_error` the relative L2 error
    of the plain fp32 form's gradient, by branch; `peer_target_error` its worst relative error at the target column;
    `logit_scale` the largest finite |logit / temperature|.
    """

    oracle: Reference
    legacy_log_prob: torch.Tensor
    legacy_gradient: torch.Tensor
    peer_error: dict[Branch, float]
    peer_target_error: float
    logit_scale: float


@dataclass(frozen=True, slots=True)
class _RowSums:
    """Sums over each row of a gradient G and its oracle R, float64 [N]."""

    error_square: torch.Tensor
    oracle_square: torch.Tensor
    product: torch.Tensor
    total: torch.Tensor
    magnitude: torch.Tensor

    @property
    def is_zero(self) -> torch.Tensor:
        """Rows whose gradient is zero throughout, bool [N]."""
        return self.magnitude == 0


def yardstick(inputs: Inputs, temperature: float) -> Yardstick:
    """Evaluates oracle, legacy kernel and peer on the whole vocabulary."""
    oracle = reference(
        inputs.logits,
        inputs.targets,
        keep_mask=inputs.keep_mask,
        temperature=temperature,
        upstream_log_prob=inputs.upstream_log_prob,
        upstream_entropy=inputs.upstream_entropy,
    )
    peer = branches(Subject(_PEER, registry.kernel(_PEER).run), inputs, Options("gradient", temperature=temperature))
    legacy = branches(Subject(_LEGACY, registry.kernel(_LEGACY).run), inputs, Options("off", temperature=temperature))
    pairs: dict[Branch, tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]] = {
        "lp": (peer.g_log_prob, oracle.g_log_prob, inputs.upstream_log_prob),
        "ent": (peer.g_entropy, oracle.g_entropy, inputs.upstream_entropy),
    }
    peer_at_target = _at_target(inputs, _or_zeros(peer.g_log_prob, inputs.logits))
    finite = inputs.logits.abs()[inputs.logits.isfinite()]
    return Yardstick(
        oracle=oracle,
        legacy_log_prob=legacy.log_prob,
        legacy_gradient=_or_zeros(legacy.g_log_prob, inputs.logits).bfloat16(),
        peer_error={
            branch: _relative_l2(_row_sums(_or_zeros(gradient, inputs.logits), truth), upstream)
            for branch, (gradient, truth, upstream) in pairs.items()
        },
        peer_target_error=_target_error(inputs, peer_at_target, oracle.g_log_prob, inputs.logits.dtype),
        logit_scale=float(finite.max()) / temperature if finite.numel() else 0.0,
    )


def permuted(inputs: Inputs) -> tuple[Inputs, torch.Tensor]:
    """The same inputs with the vocabulary shuffled, and for each old column its new place [V]."""
    vocabulary = inputs.logits.shape[1]
    order = torch.randperm(vocabulary, generator=torch.Generator().manual_seed(vocabulary))
    place = torch.empty_like(order).scatter_(0, order, torch.arange(vocabulary))
    shuffled = Inputs(
        logits=inputs.logits.index_select(1, order),
        targets=place[inputs.targets],
        keep_mask=None if inputs.keep_mask is None else inputs.keep_mask.index_select(1, order),
        upstream_log_prob=inputs.upstream_log_prob,
        upstream_entropy=inputs.upstream_entropy,
    )
    return shuffled, place


def numeric_metrics(
    inputs: Inputs, how: Options, result: Branches, shuffled: Branches, place: torch.Tensor, yard: Yardstick
) -> dict[str, float]:
    """All numeric metrics of one kernel on one case, by name; a value may be NaN or infinite.

    `shuffled` is the kernel's result on `permuted` inputs, `place` their order. A gradient that autograd left undefined
    counts as zeros.
    """
    oracle = yard.oracle
    metrics = _output_metrics("lp", result.log_prob, shuffled.log_prob, oracle.log_prob)
    metrics["lp_pos_count"] = float((result.log_prob > 0).sum())
    metrics["legacy_delta_lp"] = _largest((result.log_prob - yard.legacy_log_prob).abs(), oracle.log_prob.isfinite())
    unexpected = _unexpected(result.log_prob, oracle.log_prob)
    if result.entropy is not None and shuffled.entropy is not None:
        metrics |= _output_metrics("ent", result.entropy, shuffled.entropy, oracle.entropy)
        metrics["ent_range_viol"] = entropy_range_violations(
            result.entropy, vocabulary=inputs.logits.shape[1], logit_scale=yard.logit_scale
        )
        unexpected += _unexpected(result.entropy, oracle.entropy)

    g_log_prob = _or_zeros(result.g_log_prob, inputs.logits)
    shuffled_g_log_prob = _or_zeros(shuffled.g_log_prob, inputs.logits)
    metrics |= _gradient_metrics(
        "lp", g_log_prob, shuffled_g_log_prob, place, oracle.g_log_prob, inputs.upstream_log_prob, yard
    )
    metrics |= _target_metrics(inputs, g_log_prob, shuffled_g_log_prob, place, oracle.g_log_prob)
    metrics["legacy_delta_g_lp"] = _distance_in_bfloat16(g_log_prob, yard.legacy_gradient)
    if g_log_prob.dtype == torch.float32:
        metrics["g_bf16_grid"] = bf16_grid_share(g_log_prob)
        metrics["g_mantissa_bits"] = float(mantissa_bits(g_log_prob))
    unexpected += _unexpected(g_log_prob, oracle.g_log_prob)
    if how.entropy == "gradient":
        g_entropy = _or_zeros(result.g_entropy, inputs.logits)
        metrics |= _gradient_metrics(
            "ent",
            g_entropy,
            _or_zeros(shuffled.g_entropy, inputs.logits),
            place,
            oracle.g_entropy,
            inputs.upstream_entropy,
            yard,
        )
        unexpected += _unexpected(g_entropy, oracle.g_entropy)
    metrics["nonfinite_unexpected"] = float(unexpected)
    metrics["logits_abs_max"] = yard.logit_scale
    metrics["peer_tgt_rel_max"] = yard.peer_target_error
    return metrics


def log_prob_gate(logit_scale: float, vocabulary: int) -> float:
    """The absolute gate of a float32 log-prob in nats: 2 ulp(max(|x|max, ln V)) + 1e-6."""
    return 2 * float(np.spacing(np.float32(max(logit_scale, math.log(vocabulary))))) + 1e-6


def entropy_gate(logit_scale: float) -> float:
    """The absolute gate of a float32 entropy in nats: 8 ulp(|x|max) + 2e-5."""
    return 8 * float(np.spacing(np.float32(logit_scale))) + 2e-5


def entropy_range_violations(entropy: torch.Tensor, *, vocabulary: int, logit_scale: float) -> float:
    """Rows of `entropy` [N] outside [0, ln V] by more than the entropy gate."""
    slack = entropy_gate(logit_scale)
    return float(((entropy < -slack) | (entropy > math.log(vocabulary) + slack)).sum())


def bf16_grid_share(gradient: torch.Tensor) -> float:
    """Share of the finite, non-zero elements of a float32 `gradient` whose low 16 mantissa bits are zero; 0 of none."""
    bits = _magnitude_bits(gradient)
    non_zero = np.count_nonzero(bits)
    on_grid = np.count_nonzero((bits & 0xFFFF) == 0) - (bits.size - non_zero)
    return float(on_grid / non_zero) if non_zero else 0.0


def mantissa_bits(gradient: torch.Tensor) -> int:
    """24 less the low mantissa bits that are zero in every finite element of a float32 `gradient`; 0 if all are zero.

    24 is full float32, 8 a cast to bfloat16, 11 to float16.
    """
    used = int(np.bitwise_or.reduce(_magnitude_bits(gradient), axis=None, initial=0))
    if not used:
        return 0
    mantissa = used & 0x7FFFFF
    always_zero = (mantissa & -mantissa).bit_length() - 1 if mantissa else 23
    return 24 - always_zero


def _magnitude_bits(gradient: torch.Tensor) -> "np.ndarray[tuple[int, ...], np.dtype[np.int32]]":
    """The elements' bits without the sign, so that both zeros are 0, as is what is not finite."""
    bits: np.ndarray[tuple[int, ...], np.dtype[np.int32]] = gradient.contiguous().view(torch.int32).numpy()
    magnitude = bits & 0x7FFFFFFF
    return np.where(magnitude < 0x7F800000, magnitude, 0)


def _output_metrics(
    branch: Branch, output: torch.Tensor, shuffled: torch.Tensor, oracle: torch.Tensor
) -> dict[str, float]:
    finite = oracle.isfinite()
    return {
        f"{branch}_abs_max": _largest((output.double() - oracle).abs(), finite),
        f"{branch}_scale": _largest(oracle.abs(), finite),
        f"perm_delta_{branch}": _largest((output.double() - shuffled.double()).abs(), finite),
    }


def _gradient_metrics(
    branch: Branch,
    gradient: torch.Tensor,
    shuffled: torch.Tensor,
    place: torch.Tensor,
    oracle: torch.Tensor,
    upstream: torch.Tensor,
    yard: Yardstick,
) -> dict[str, float]:
    """The metrics of one branch. Rows without an upstream gradient count in `grad_leak` and the overall L2 only."""
    sums = _row_sums(gradient, oracle)
    floor = _FLOOR * upstream.double().abs()
    counts = floor > 0
    reaches = sums.oracle_square.sqrt() > floor
    relative_l2 = _relative_l2(sums, upstream)
    row_error = sums.error_square.sqrt() / sums.oracle_square.sqrt().maximum(floor)
    oracle_square = float(sums.oracle_square.sum())
    has_scale = oracle_square > float(floor.square().sum())
    ulp_p50, ulp_p999 = _ulp_quantiles(gradient, oracle, floor, (0.5, 0.999))
    unit = 2.0 ** -_PRECISION[gradient.dtype]
    return {
        f"g_rel_l2_{branch}": relative_l2,
        f"g_row_rel_l2_max_{branch}": _largest(row_error, counts),
        f"g_ulp_p50_{branch}": ulp_p50,
        f"g_ulp_p999_{branch}": ulp_p999,
        f"g_zero_sum_{branch}": _largest(sums.total.abs() / sums.magnitude.maximum(floor), counts),
        f"g_scale_{branch}": float(sums.product.sum()) / oracle_square - 1 if has_scale else 0.0,
        f"g_ratio_to_peer_{branch}": relative_l2 / max(yard.peer_error[branch], unit),
        f"grad_coverage_miss_{branch}": float((reaches & sums.is_zero).sum()),
        f"grad_leak_{branch}": float((~counts & ~sums.is_zero).sum()),
        f"perm_delta_g_{branch}": _reorder_noise(gradient, shuffled, place, sums, floor),
    }


def _target_metrics(
    inputs: Inputs, gradient: torch.Tensor, shuffled: torch.Tensor, place: torch.Tensor, oracle: torch.Tensor
) -> dict[str, float]:
    """Relative error and reorder noise of the log-prob gradient at the target column."""
    value = _at_target(inputs, gradient)
    again = shuffled.gather(1, place[inputs.targets[:, None]])[:, 0].double()
    _, denominator = _target_truth(inputs, oracle, gradient.dtype)
    return {
        "g_tgt_rel_max": _target_error(inputs, value, oracle, gradient.dtype),
        "perm_delta_tgt": _largest((value - again).abs() / denominator, inputs.upstream_log_prob != 0),
    }


def _target_error(inputs: Inputs, value: torch.Tensor, oracle: torch.Tensor, dtype: torch.dtype) -> float:
    truth, denominator = _target_truth(inputs, oracle, dtype)
    return _largest((value - truth).abs() / denominator, inputs.upstream_log_prob != 0)


def _at_target(inputs: Inputs, gradient: torch.Tensor) -> torch.Tensor:
    """A gradient's value at each row's target, float64 [N]."""
    return gradient.gather(1, inputs.targets[:, None])[:, 0].double()


def _target_truth(inputs: Inputs, oracle: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The oracle's gradient at each row's target, rounded once to `dtype`, and what errors there are relative to."""
    truth = _rounded_once(oracle.gather(1, inputs.targets[:, None])[:, 0], dtype)
    return truth, truth.abs().maximum(_FLOOR * inputs.upstream_log_prob.double().abs())


def _row_sums(gradient: torch.Tensor, oracle: torch.Tensor) -> _RowSums:
    tokens, vocabulary = gradient.shape
    sums = torch.empty(5, tokens, dtype=torch.float64)
    for rows in _blocks(tokens, vocabulary):
        value = gradient[rows].double()
        truth = _rounded_once(oracle[rows], gradient.dtype)
        error = value - truth
        sums[0, rows] = torch.linalg.vecdot(error, error)
        sums[1, rows] = torch.linalg.vecdot(truth, truth)
        sums[2, rows] = torch.linalg.vecdot(value, truth)
        sums[3, rows] = value.sum(1)
        sums[4, rows] = value.abs().sum(1)
    return _RowSums(*sums.unbind())


def _relative_l2(sums: _RowSums, upstream: torch.Tensor) -> float:
    """||G - R|| / ||R||, 0 where there is no upstream gradient at all and G is zero."""
    error = math.sqrt(float(sums.error_square.sum()))
    floor = _FLOOR * float(upstream.double().norm())
    denominator = max(math.sqrt(float(sums.oracle_square.sum())), floor)
    if denominator == 0:
        return 0.0 if error == 0 else math.inf
    return error / denominator


def _reorder_noise(
    gradient: torch.Tensor, shuffled: torch.Tensor, place: torch.Tensor, sums: _RowSums, floor: torch.Tensor
) -> float:
    """||G - G of the permuted vocabulary|| / ||R||."""
    square = 0.0
    for rows in _blocks(*gradient.shape):
        change = gradient[rows].double() - shuffled[rows].index_select(1, place).double()
        square += float(change.square_().sum())
    denominator = max(math.sqrt(float(sums.oracle_square.sum())), float(floor.norm()))
    return math.sqrt(square) / denominator if denominator else 0.0


def _ulp_quantiles(
    gradient: torch.Tensor, oracle: torch.Tensor, floor: torch.Tensor, shares: tuple[float, ...]
) -> list[float]:
    """Nearest-rank quantiles of |G - R| over the rows with an upstream gradient, in ulps of max(|R|, floor).

    An ulp is that of the gradient's dtype at this magnitude, never below its smallest subnormal.
    """
    kept = floor.nonzero()[:, 0]
    vocabulary = gradient.shape[1]
    errors = torch.empty(len(kept), vocabulary)
    limits = torch.finfo(gradient.dtype)
    for rows in _blocks(len(kept), vocabulary):
        truth = _rounded_once(oracle[kept[rows]], gradient.dtype)
        error = (gradient[kept[rows]].double() - truth).abs_()
        magnitude = truth.abs_().maximum(floor[kept[rows], None])
        ulp = _power_of_two_below(magnitude).mul_(limits.eps).clamp_min_(limits.smallest_normal * limits.eps)
        errors[rows] = error.div_(ulp)
    if not errors.numel():
        return [0.0 for _ in shares]
    ranks = [max(0, math.ceil(share * errors.numel()) - 1) for share in shares]
    ordered = np.partition(errors.numpy(), ranks, axis=None)
    return [float(ordered[rank]) for rank in ranks]


def _power_of_two_below(values: torch.Tensor) -> torch.Tensor:
    """2^floor(log2 x) of positive float64 normals, by their exponent bits."""
    return (values.view(torch.int64) & 0x7FF0000000000000).view(torch.float64)


def _distance_in_bfloat16(gradient: torch.Tensor, legacy: torch.Tensor) -> float:
    """||G - L|| / ||L||, both in bfloat16; 0 where L and G are zero."""
    square = legacy_square = 0.0
    for rows in _blocks(*gradient.shape):
        truth = legacy[rows].double()
        square += float((gradient[rows].bfloat16().double() - truth).square_().sum())
        legacy_square += float(truth.square_().sum())
    if legacy_square == 0:
        return 0.0 if square == 0 else math.inf
    return math.sqrt(square / legacy_square)


def _rounded_once(oracle: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The oracle as a perfect kernel would return it in a half precision; as it is where the gradient is float32."""
    return oracle if dtype == torch.float32 else oracle.to(dtype).double()


def _unexpected(value: torch.Tensor, oracle: torch.Tensor) -> int:
    """Elements that are finite in one of the two only."""
    if bool(value.sum().isfinite()) and bool(oracle.sum().isfinite()):
        return 0  # one NaN or infinity would show in the sum
    return sum(int((value[rows].isfinite() != oracle[rows].isfinite()).sum()) for rows in _blocks(*value.shape))


def _largest(values: torch.Tensor, where: torch.Tensor) -> float:
    """The greatest of the chosen values, NaN if one of them is NaN, 0 if none is chosen."""
    chosen = values[where]
    return float(chosen.max()) if chosen.numel() else 0.0


def _or_zeros(gradient: torch.Tensor | None, logits: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(logits) if gradient is None else gradient


def _blocks(tokens: int, vocabulary: int = 1) -> Iterator[slice]:
    """Row ranges of about _BLOCK_ELEMENTS elements each."""
    rows = max(1, _BLOCK_ELEMENTS // vocabulary)
    return (slice(start, start + rows) for start in range(0, tokens, rows))
