"""Runs the Triton kernels of `online` in Triton's interpreter, on a CPU, and writes their results.

A program, not a test, since the interpreter is chosen when triton is imported: `TRITON_INTERPRET=1 python
online_interpreter.py RESULTS_FILE`. The combinations are those of the table below, which the test reads too.
"""

import sys
from itertools import product
from typing import Any, NamedTuple, get_args

import torch

from runners.kernels import online
from runners.kernels.inputs import Distribution, Inputs, make_inputs

# Columns of a block, so that a row has several blocks and pieces and none that is full at its end.
BLOCK = 32
PROGRAMS = 12


class Combination(NamedTuple):
    """What is run; a combination is a key of the results."""

    distribution: Distribution
    dtype: str
    keep_mask: bool
    mode: str
    temperature: float = 1.0
    layout: str = "contiguous"
    overwrite_logits: bool = False


COMBINATIONS = [
    *(Combination(distribution, "float32", False, "gradient") for distribution in get_args(Distribution)),
    *(
        Combination("spread", dtype, keep_mask, mode, temperature)
        for dtype, keep_mask, (mode, temperature) in product(
            ("float32", "bfloat16", "float16"),
            (False, True),
            (("off", 0.7), ("value", 1.0), ("gradient", 0.7)),
        )
    ),
    Combination("masked", "float32", True, "gradient"),
    Combination("masked", "float32", True, "off"),
    Combination("neg_inf", "float32", True, "gradient"),
    Combination("spread", "float32", True, "gradient", layout="transposed"),
    Combination("spread", "bfloat16", True, "gradient", layout="sliced"),
    Combination("spread", "float32", True, "gradient", overwrite_logits=True),
    Combination("spread", "float32", False, "gradient", layout="empty"),
    Combination("spread", "float32", False, "gradient", layout="dead row of NaN"),
    Combination("spread", "float32", False, "gradient", 0.7, layout="greatest logits"),
    Combination("spread", "float32", True, "gradient", 0.7, layout="greatest logits"),
]


def combination_inputs(combination: Combination) -> Inputs:
    """The inputs of a combination, always in contiguous memory."""
    tokens, vocabulary = (0 if combination.layout == "empty" else 5), 203
    inputs = make_inputs(
        tokens=tokens,
        vocabulary=vocabulary,
        dtype=getattr(torch, combination.dtype),
        distribution=combination.distribution,
        keep_mask=combination.keep_mask,
    )
    if combination.layout == "dead row of NaN":
        assert inputs.upstream_log_prob[0] == 0
        assert inputs.upstream_entropy[0] == 0
        inputs.logits[0] = torch.nan
    if combination.layout == "greatest logits":
        inputs.logits[1:] = torch.finfo(torch.float32).min
        inputs.logits.scatter_(1, inputs.targets[:, None], torch.finfo(torch.float32).max)
    return inputs


def run_combination(combination: Combination) -> dict[str, torch.Tensor | None]:
    """Log-prob, entropy and the gradient of what the entropy mode differentiates."""
    inputs = combination_inputs(combination)
    logits = _laid_out(inputs.logits, combination.layout).requires_grad_()
    log_prob, entropy = online.run(
        logits,
        inputs.targets,
        keep_mask=inputs.keep_mask,
        temperature=combination.temperature,
        with_entropy=combination.mode != "off",
        with_entropy_grad=combination.mode == "gradient",
        overwrite_logits=combination.overwrite_logits,
    )
    outputs, upstreams = [log_prob], [inputs.upstream_log_prob]
    if combination.mode == "gradient":
        assert entropy is not None
        outputs.append(entropy)
        upstreams.append(inputs.upstream_entropy)
    (gradient,) = torch.autograd.grad(outputs, logits, upstreams)
    assert (gradient.data_ptr() == logits.data_ptr()) == (combination.overwrite_logits or not gradient.numel())
    return {
        "log_prob": log_prob.detach(),
        "entropy": None if entropy is None else entropy.detach(),
        "gradient": gradient.contiguous(),
    }


def _laid_out(logits: torch.Tensor, layout: str) -> torch.Tensor:
    if layout == "transposed":
        return logits.t().contiguous().t()
    if layout == "sliced":
        wide = torch.full((logits.shape[0], logits.shape[1] + 3), torch.nan, dtype=logits.dtype)
        wide[:, 1:-2] = logits
        return wide[:, 1:-2]
    return logits.clone()


def main(results_file: str) -> None:
    from runners.kernels import online_triton  # noqa: PLC0415 -- the test imports this module where there is no triton

    online_triton.BLOCK, online_triton._PROGRAMS = BLOCK, PROGRAMS
    tiles: Any = online_triton
    online._tiles = lambda _: tiles
    torch.save({tuple(combination): run_combination(combination) for combination in COMBINATIONS}, results_file)


if __name__ == "__main__":
    main(sys.argv[1])
