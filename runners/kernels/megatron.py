"""The baseline `megatron_fused`: the fused cross-entropy of the real megatron-core, with a separate entropy beside it.

megatron-core is imported on the first call. What it does wrong is left as it is: its gradient is bfloat16 on every
device, and NaN logits reach the gradient of rows without an upstream one.
"""

import importlib.util
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from runners.kernels.arguments import check_arguments
from runners.kernels.contract import Contract, Kernel
from runners.kernels.legacy import vocab_parallel_entropy
from runners.kernels.row_chunks import row_chunks
from runners.kernels.vocab_parallel import dropped_ids, locate_targets


def run(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    keep_mask: torch.Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    chunk_size: int | None = None,
    temperature: float = 1.0,
    with_entropy: bool = True,
    with_entropy_grad: bool = True,
    overwrite_logits: bool = False,  # noqa: ARG001 -- megatron-core overwrites its input, which is always a copy
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See contract.LogProbEntropy. Raises ModuleNotFoundError that says what to install."""
    check_arguments(logits, targets, keep_mask=keep_mask, group=group, chunk_size=chunk_size, temperature=temperature)
    missing = missing_package()
    if missing is not None:
        raise ModuleNotFoundError(missing)
    log_probs, entropies = [], []
    for rows in row_chunks(logits.shape[0], chunk_size):
        mask = None if keep_mask is None else keep_mask[rows]
        log_probs.append(_log_prob(logits[rows], targets[rows], mask, group, temperature))
        if with_entropy:
            entropies.append(vocab_parallel_entropy(logits[rows], group, temperature, with_grad=with_entropy_grad))
    return torch.cat(log_probs), torch.cat(entropies) if with_entropy else None


def missing_package() -> str | None:
    """What to install before this kernel can run, None where nothing is missing."""
    try:
        found = importlib.util.find_spec("megatron.core") is not None
    except ModuleNotFoundError:
        found = False
    if found:
        return None
    return "megatron_fused needs megatron-core, which is not installed: pip install --no-deps megatron-core==0.16.1"


def _log_prob(
    logits: torch.Tensor,
    targets: torch.Tensor,
    keep_mask: torch.Tensor | None,
    group: dist.ProcessGroup | None,
    temperature: float,
) -> torch.Tensor:
    """Log-prob [n] float32 through megatron-core, which wants [sequence, batch, V/TP], and at least one row."""
    if logits.shape[0] == 0:
        return logits.float().sum(1)
    own = logits.float() / temperature
    if keep_mask is not None:
        own = own.masked_fill(dropped_ids(keep_mask, *locate_targets(targets, logits.shape[1], group)), -torch.inf)
    loss: torch.Tensor = _cross_entropy()(own[:, None], targets[:, None], _lone_group() if group is None else group)
    return -loss[:, 0]


@cache
def _cross_entropy() -> Any:
    """Import megatron-core's fused cross-entropy uncompiled: its compile takes 10 to 30 s and changes no result."""
    with warnings.catch_warnings(), _uncompiled():
        warnings.simplefilter("ignore")  # it warns of accelerator packages that a cross-entropy does not use
        from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy  # noqa: PLC0415
    return fused_vocab_parallel_cross_entropy


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


KERNEL = Kernel(
    "megatron_fused",
    run,
    Contract(gradient="bfloat16", inaccurate_on=frozenset({"confident_wrong", "offset"}), overflows=True),
    missing=missing_package(),
)
