"""Inputs that a kernel cannot have seen, and whether what it made of them is right.

A kernel that remembers results, or puts its work off until somebody looks, shows figures on known inputs that it cannot
keep on these. Judges no precision: that is measured on the case's own inputs.
"""

import math
import zlib
from collections.abc import Mapping, Sequence
from secrets import SystemRandom

import torch

from runners.instruments.subject import Options
from runners.kernels.inputs import Inputs
from runners.kernels.reference import reference

# Rows that are compared with the oracle: enough for a stale result to show, few enough to cost nothing.
_ROWS = 8
_CHANCE = SystemRandom()
# A result is wrong if its error is this many times the error on the case's own inputs, ...
_FACTOR = 8.0
# ... which counts as at least the rounding of a bfloat16 result.
_UNIT = 2.0**-8
# A gradient whose rows are so far off on the case's own inputs is wrong, and says nothing on others.
_WRONG = 0.1
# An entropy gradient may be all rounding, where a row's logits are equal: this share of the upstream is no error.
_SLACK = 2.0**-15


def unseen(inputs: Inputs, draw: str) -> Inputs:
    """Inputs with other values and the same pattern, the same ones for the same words `draw`.

    Rows are shifted cyclically, and every row of the logits is multiplied by a factor of its own in [0.5, 0.9): ties,
    infinities, masks, targets under them and zero upstream gradients stay as many as they were, so that a kernel whose
    work depends on them does the same work. (In a half precision logits that lie next to each other may meet.) No
    storage is shared with `inputs`.
    """
    tokens = inputs.logits.shape[0]
    generator = torch.Generator().manual_seed(zlib.crc32(draw.encode()))
    shift = int(torch.randint(max(1, tokens), (1,), generator=generator, dtype=torch.int64))
    factors = torch.rand(tokens, 1, generator=generator, dtype=torch.float32).mul_(0.4).add_(0.5)
    return Inputs(
        logits=inputs.logits.detach().roll(shift, 0).mul_(factors.to(inputs.logits.dtype)),
        targets=inputs.targets.roll(shift),
        keep_mask=None if inputs.keep_mask is None else inputs.keep_mask.roll(shift, 0),
        upstream_log_prob=inputs.upstream_log_prob.roll(shift),
        upstream_entropy=inputs.upstream_entropy.roll(shift),
    )


def fault_on(
    inputs: Inputs,
    how: Options,
    *,
    log_prob: torch.Tensor,
    entropy: torch.Tensor | None,
    gradient: torch.Tensor | None,
    errors: Mapping[str, float],
) -> str | None:
    """Why outputs and gradient of a step on `inputs` are not the kernel's honest results, None if they are.

    A few rows are compared with the oracle. `errors` holds the errors on the case's own inputs, by metric: a kernel
    that is imprecise there may be so here.
    """
    rows = _rows(inputs)
    truth = reference(
        inputs.logits[rows],
        inputs.targets[rows],
        keep_mask=None if inputs.keep_mask is None else inputs.keep_mask[rows],
        temperature=how.temperature,
        upstream_log_prob=inputs.upstream_log_prob[rows],
        upstream_entropy=inputs.upstream_entropy[rows],
    )
    outputs = (("log_prob", log_prob, truth.log_prob, "lp_abs_max"), ("entropy", entropy, truth.entropy, "ent_abs_max"))
    for name, output, wanted, error in outputs:
        if output is None or error not in errors:
            continue
        limit = _FACTOR * (_UNIT * wanted.abs().clamp(min=1.0)).clamp(min=errors[error])
        if not bool(((output[rows].double() - wanted).abs() <= limit).all()):
            return f"{name} of inputs never seen before is not what they give"
    branches = ("lp", "ent") if how.entropy == "gradient" and entropy is not None else ("lp",)
    known = max(errors.get(f"g_row_rel_l2_max_{branch}", math.inf) for branch in branches)
    if known > _WRONG:
        return None
    found = torch.zeros_like(truth.g_log_prob) if gradient is None else gradient[rows].double()
    parts = [truth.g_log_prob, truth.g_entropy][: len(branches)]
    # The parts may nearly cancel: an error is relative to what was added up.
    scale = torch.stack([part.norm(dim=1) for part in parts]).sum(0)
    slack = _SLACK * (inputs.upstream_log_prob[rows].abs() + inputs.upstream_entropy[rows].abs()) / how.temperature
    limit = _FACTOR * max(_UNIT, known) * scale + slack
    is_right = (found - torch.stack(parts).sum(0)).norm(dim=1) <= limit
    return None if bool(is_right.all()) else "the gradient of inputs never seen before is not what they give"


def _rows(inputs: Inputs) -> torch.Tensor:
    """Row numbers that nobody can know beforehand, half of them with an upstream gradient where there are such rows."""
    tokens = inputs.logits.shape[0]
    used = ((inputs.upstream_log_prob != 0) | (inputs.upstream_entropy != 0)).nonzero()[:, 0].tolist()
    chosen = [*_some(used, _ROWS // 2), *_some(range(tokens), _ROWS // 2)]
    return torch.tensor(sorted(set(chosen)), dtype=torch.int64)


def _some(numbers: Sequence[int], count: int) -> list[int]:
    return _CHANCE.sample(numbers, min(count, len(numbers)))
