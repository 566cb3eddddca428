"""What a log-prob/entropy kernel is: its signature and what it promises. Holds no kernel."""

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.distributed as dist


class LogProbEntropy(Protocol):
    """The common signature of every kernel.

    `logits` [N, V/TP] float32, bfloat16 or float16; `targets` [N] int64, ids in the whole vocabulary; `keep_mask`
    [N, V/TP] bool restricts the log-prob's softmax (the target is always kept) and leaves the entropy alone; `group` is
    the tensor-parallel group, None where this rank holds the whole vocabulary; `chunk_size` rows at a time, None for
    all; log-prob and entropy are those of logits / temperature. `with_entropy_grad=False` gives the entropy as a
    value only. Returns (log_prob [N], entropy [N] or None), float32; the gradient has the logits' dtype. Raises
    ValueError or TypeError that names the argument for anything else. A missing upstream gradient counts as zero or is
    a RuntimeError; it is never a missing gradient. Logits changed in place before backward are a RuntimeError, or
    change nothing.
    """

    def __call__(
        self,
        logits: torch.Tensor,
        targets: torch.Tensor,
        *,
        keep_mask: torch.Tensor | None = None,
        group: dist.ProcessGroup | None = None,
        chunk_size: int | None = None,
        temperature: float = 1.0,
        with_entropy: bool = True,
        with_entropy_grad: bool = True,
        overwrite_logits: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]: ...


@dataclass(frozen=True, slots=True)
class Contract:
    """What a kernel promises; the gates and the contract checks read it.

    `gradient` is the precision its log-prob gradient has for float32 logits, `gradient_on_cuda` the one there if it is
    another; `inaccurate_on` names the input distributions that it is known to be inaccurate on, most of all
    in the entropy's gradient; `overflows` says that finite logits whose differences, or quotients by the temperature,
    are beyond float32 can make a result NaN; `widened_gates` multiplies the absolute gates.
    """

    gradient: Literal["float32", "bfloat16"] = "float32"
    gradient_on_cuda: Literal["float32", "bfloat16"] | None = None
    inaccurate_on: frozenset[str] = frozenset()
    overflows: bool = False
    overwrites_logits: bool = False
    tensor_parallel: bool = True
    widened_gates: float = 1.0


@dataclass(frozen=True, slots=True)
class Kernel:
    """A named kernel with its contract. `missing` says what is not installed, None if the kernel can run here."""

    name: str
    run: LogProbEntropy
    contract: Contract
    missing: str | None = None
