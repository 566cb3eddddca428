"""Absolute gates on a kernel's precision: limits that hold whatever the history says, from the floor of the arithmetic.

For kernels that declare a contract; what is measured and against what is the instruments' business. The limits separate
real faults from the noise of a reordered sum.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

# A bfloat16 cast moves a gradient's relative L2 error from 3e-8 to 1.4e-3: flat inputs, log-prob gradient alone.
FLAT_GRADIENT_REL_L2 = 1e-6
# Share of float32 gradients that chance alone puts on the bfloat16 grid: 2^-16.
BF16_GRID_SHARE = 1e-2
# |row sum| over row L1 of the log-prob gradient, which sums to zero over the whole vocabulary.
ZERO_SUM = 1e-5
ZERO_SUM_DISTRIBUTIONS = frozenset({"flat", "spread", "offset"})
# What a tensor-parallel sum may move beyond what a permuted vocabulary moves.
TENSOR_PARALLEL_NOISES = 10.0
# How a bfloat16 gradient may differ from the oracle's rounded to bfloat16: by so many ulp on such a share of elements.
BF16_ULPS = 1
BF16_SHARE = 1e-2


@dataclass(frozen=True, slots=True)
class GateFacts:
    """What a limit depends on. `logits_abs_max` is the greatest finite |logits / temperature|; `peer_target_error` the
    plain float32 logsumexp form's `g_tgt_rel_max` on the same inputs, 0 if not known.
    """

    distribution: str
    logits_abs_max: float
    vocabulary: int
    peer_target_error: float = 0.0


def gate_limit(
    metric: str, facts: GateFacts, *, gradient: Literal["float32", "bfloat16"] = "float32", widened: float = 1.0
) -> float | None:
    """The greatest value of a catalogue metric that a kernel with this contract may have; None where no gate applies.

    `gradient` and `widened` are the kernel's declared gradient precision and the factor on its gates. A bfloat16
    gradient is gated by `bfloat16_disagreement` instead.
    """
    limit = _output_limit(metric, facts)
    if limit is None and gradient == "float32":
        limit = _gradient_limit(metric, facts)
    return None if limit is None else limit * widened


def beyond_gates(
    values: Mapping[str, float], facts: GateFacts, *, dtype: str, gradient: Literal["float32", "bfloat16"]
) -> str | None:
    """The metrics of one case whose value is over its gate, in words: empty if none is, None if none is gated.

    `dtype` is the logits'; gates on gradients hold for float32 ones, others are judged against a rounded oracle.
    """
    precision = gradient if dtype == "float32" else "bfloat16"
    limits = {name: gate_limit(name, facts, gradient=precision) for name in values}
    gated = {name: limit for name, limit in limits.items() if limit is not None}
    if not gated:
        return None
    over = [
        f"{name} {values[name]:.2g} over {limit:.2g}" for name, limit in sorted(gated.items()) if values[name] > limit
    ]
    return ", ".join(over)


def tensor_parallel_limit(perm_delta: float) -> float:
    """How far a result may move with the number of ranks, given the case's own reorder noise."""
    return TENSOR_PARALLEL_NOISES * perm_delta


def ulp32(value: float) -> float:
    """The gap between |value| and the next float32."""
    exponent = math.frexp(value)[1] if value else -125
    return math.ldexp(1.0, max(exponent, -125) - 24)


def bfloat16_disagreement(gradient: npt.NDArray[Any], oracle: npt.NDArray[Any]) -> tuple[float, int]:
    """Compare a gradient with the oracle rounded to bfloat16, both of one shape, any float dtype.

    Returns the share of elements that differ and the greatest difference in bfloat16 ulp; (0.0, 0) for none.
    """
    if not gradient.size:
        return 0.0, 0
    distance = np.abs(_bfloat16_ordinal(gradient) - _bfloat16_ordinal(oracle))
    return float(np.count_nonzero(distance) / distance.size), int(distance.max())


def _output_limit(metric: str, facts: GateFacts) -> float | None:
    if metric == "lp_abs_max":
        return 2 * ulp32(max(facts.logits_abs_max, math.log(facts.vocabulary))) + 1e-6
    if metric == "ent_abs_max":
        return 8 * ulp32(facts.logits_abs_max) + 2e-5
    return None


def _gradient_limit(metric: str, facts: GateFacts) -> float | None:
    if metric == "g_rel_l2_lp" and facts.distribution == "flat":
        return FLAT_GRADIENT_REL_L2
    if metric == "g_bf16_grid":
        return BF16_GRID_SHARE
    if metric == "g_zero_sum_lp" and facts.distribution in ZERO_SUM_DISTRIBUTIONS:
        return ZERO_SUM
    if metric == "g_tgt_rel_max" and facts.distribution == "confident":
        return max(4 * facts.peer_target_error, 1e-4)
    return None


def _bfloat16_ordinal(values: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """The place of each value, rounded to the nearest bfloat16 (ties to even), among all bfloat16; both zeros are 0."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32).astype(np.int64)
    magnitude = bits & 0x7FFFFFFF
    rounded = (magnitude + 0x7FFF + ((magnitude >> 16) & 1)) >> 16
    return np.where(bits >> 31, -rounded, rounded)
