"""The baselines `megatron_fused` and `megatron_unfused`: the two cross-entropies of the real megatron-core.

The fused one's gradient is bfloat16 on every device. NaN logits reach the gradient of rows without an upstream one.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from runners.kernels.contract import Contract
from runners.kernels.external import External

_INACCURATE_ON = frozenset({"confident_wrong", "offset"})


def _fused_loss(own: torch.Tensor, targets: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """It wants [sequence, batch, V/TP]."""
    loss: torch.Tensor = _fused()(own[:, None], targets[:, None], _lone_group() if group is None else group)
    return loss[:, 0]


def _unfused_loss(own: torch.Tensor, targets: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """It asks megatron-core's parallel state for the group, which is put there for as long as the call takes."""
    parallel_state, cross_entropy = _unfused()
    names = {
        "_TENSOR_MODEL_PARALLEL_GROUP": _lone_group() if group is None else group,
        "_MPU_TENSOR_MODEL_PARALLEL_RANK": None,
        "_MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE": None,
    }
    kept = {name: getattr(parallel_state, name) for name in names}
    try:
        vars(parallel_state).update(names)
        loss: torch.Tensor = cross_entropy(own[:, None], targets[:, None])
    finally:
        vars(parallel_state).update(kept)
    return loss[:, 0]


@cache
def _fused() -> Any:
    """Import megatron-core's fused cross-entropy uncompiled: its compile takes 10 to 30 s and changes no result."""
    with warnings.catch_warnings(), _uncompiled():
        warnings.simplefilter("ignore")  # it warns of accelerator packages that a cross-entropy does not use
        from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy  # noqa: PLC0415
    return fused_vocab_parallel_cross_entropy


@cache
def _unfused() -> tuple[Any, Any]:
    """megatron-core's parallel state and its unfused cross-entropy."""
    with warnings.catch_warnings(), _uncompiled():
        warnings.simplefilter("ignore")
        from megatron.core import parallel_state  # noqa: PLC0415
        from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy  # noqa: PLC0415
    return parallel_state, vocab_parallel_cross_entropy


@contextmanager
def _uncompiled() -> Iterator[None]:
    """Let torch.compile give functions back as they are; megatron-core decorates with it while it is imported."""
    compile_ = torch.compile
    torch.compile = lambda function: function  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = compile_


@cache
def _lone_group() -> Any:
    """A group of this process alone, apart from any default group: megatron-core calls collectives always."""
    return dist.ProcessGroupGloo(torch._C._distributed_c10d.HashStore(), 0, 1, timedelta(minutes=1))


_REQUIREMENT = "--no-deps megatron-core==0.16.1"
FUSED = External(
    "megatron_fused",
    "megatron.core",
    _REQUIREMENT,
    _fused_loss,
    Contract(gradient="bfloat16", inaccurate_on=_INACCURATE_ON, overflows=True),
)
UNFUSED = External(
    "megatron_unfused",
    "megatron.core",
    _REQUIREMENT,
    _unfused_loss,
    Contract(inaccurate_on=_INACCURATE_ON, overflows=True),
)
