"""The baseline `cut_cross_entropy`: that package's linear cross-entropy, which takes hidden states and a head's weight.

A case has logits, so the hidden states are the identity and the weight is the logits transposed: their product is the
logits, exactly. That costs N times the arithmetic, so its time and memory say little; its precision does. On a CPU the
package has one form, which it compiles; on CUDA it multiplies in its own kernel, every gradient element kept. NaN
logits reach every row of a call.
"""

import warnings
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from runners.kernels.compiled import is_watched, missing_compiler
from runners.kernels.contract import Contract
from runners.kernels.external import External

# Its kernel multiplies by blocks of at least this many.
_LEAST_HIDDEN = 16


def _loss(own: torch.Tensor, targets: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:  # noqa: ARG001
    tokens, vocabulary = own.shape
    hidden = torch.eye(tokens, max(tokens, _LEAST_HIDDEN), dtype=own.dtype, device=own.device)
    # Zero times minus infinity is NaN, and this is a product.
    weight = own.clamp_min(torch.finfo(own.dtype).min).t()
    if hidden.shape[1] > tokens:
        weight = torch.cat((weight, own.new_zeros(vocabulary, hidden.shape[1] - tokens)), 1)
    implementation = "cce" if own.is_cuda else "torch_compile"
    stance = torch.compiler.set_stance("force_eager") if is_watched() else nullcontext()
    with warnings.catch_warnings(), stance:
        warnings.simplefilter("ignore")  # torch's compiler uses what torch itself has deprecated
        loss: torch.Tensor = _linear_cross_entropy()(
            hidden, weight, targets, reduction="none", filter_eps=None, impl=implementation
        )
    return loss


@cache
def _linear_cross_entropy() -> Any:
    from cut_cross_entropy import linear_cross_entropy  # noqa: PLC0415 -- slow: it imports triton

    return linear_cross_entropy


CUT_CROSS_ENTROPY = External(
    "cut_cross_entropy",
    "cut_cross_entropy",
    "cut-cross-entropy==25.1.1",
    _loss,
    Contract(
        gradient_on_cuda="bfloat16",
        tensor_parallel=False,
        inaccurate_on=frozenset({"confident_wrong", "offset"}),
        overflows=True,
        widened_gates=8.0,
    ),
    lacks=missing_compiler,
)
