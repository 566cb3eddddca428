"""The baseline `liger`: the cross-entropy of liger-kernel, whose forward puts the gradient where its input was.

Its kernels are Triton's, for CUDA. NaN logits reach the gradient of rows without an upstream one.
"""

import os
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from runners.kernels.contract import Contract
from runners.kernels.external import External


def _loss(own: torch.Tensor, targets: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:  # noqa: ARG001
    loss: torch.Tensor = _cross_entropy()(own, targets, reduction="none")
    return loss


def _missing_device(name: str) -> str | None:
    if torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1":
        return None
    return f"{name} needs a CUDA device, or TRITON_INTERPRET=1: its kernels are Triton's"


@cache
def _cross_entropy() -> Any:
    from liger_kernel.transformers.functional import liger_cross_entropy  # noqa: PLC0415 -- slow, and for CUDA alone

    return liger_cross_entropy


LIGER = External(
    "liger",
    "liger_kernel",
    "liger-kernel==0.8.5",
    _loss,
    Contract(tensor_parallel=False, inaccurate_on=frozenset({"confident_wrong", "offset"}), overflows=True),
    lacks=_missing_device,
)
