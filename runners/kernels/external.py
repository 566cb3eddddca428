"""What the baselines out of other packages share: a cross-entropy of theirs, with our separate entropy beside it.

Packages are imported on the first call. What one does wrong is left as it is, and its contract says so.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from runners.kernels.arguments import check_arguments, check_whole_vocabulary
from runners.kernels.contract import Contract, Kernel
from runners.kernels.legacy import vocab_parallel_entropy
from runners.kernels.row_chunks import row_chunks
from runners.kernels.vocab_parallel import dropped_ids, locate_targets

CrossEntropy = Callable[[torch.Tensor, torch.Tensor, dist.ProcessGroup | None], torch.Tensor]
"""Minus log-prob [n] of at least one row: of float32 logits that are its own to overwrite, targets, and the group."""


@dataclass(frozen=True, slots=True)
class External:
    """A kernel out of another package, which is installed as `requirement`; `lacks` says what else it misses here."""

    name: str
    package: str
    requirement: str
    cross_entropy: CrossEntropy
    contract: Contract
    lacks: Callable[[str], str | None] | None = None

    def missing(self) -> str | None:
        """What it lacks here, None where nothing is missing."""
        if not _is_installed(self.package):
            distribution = self.requirement.partition("==")[0].split()[-1]
            return f"{self.name} needs {distribution}, which is not installed: pip install {self.requirement}"
        return None if self.lacks is None else self.lacks(self.name)

    def kernel(self) -> Kernel:
        """As the registry wants it."""
        return Kernel(self.name, partial(run, external=self), self.contract, missing=self.missing())


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
    overwrite_logits: bool = False,  # noqa: ARG001 -- what a package overwrites is always a copy
    external: External,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See contract.LogProbEntropy. Raises ModuleNotFoundError or RuntimeError that says what is missing."""
    check_arguments(logits, targets, keep_mask=keep_mask, group=group, chunk_size=chunk_size, temperature=temperature)
    if not external.contract.tensor_parallel:
        check_whole_vocabulary(external.name, group)
    if missing := external.missing():
        raise (RuntimeError if _is_installed(external.package) else ModuleNotFoundError)(missing)
    log_probs, entropies = [], []
    for rows in row_chunks(logits.shape[0], chunk_size):
        mask = None if keep_mask is None else keep_mask[rows]
        log_probs.append(_log_prob(logits[rows], targets[rows], mask, group, temperature, external.cross_entropy))
        if with_entropy:
            entropies.append(vocab_parallel_entropy(logits[rows], group, temperature, with_grad=with_entropy_grad))
    return torch.cat(log_probs), torch.cat(entropies) if with_entropy else None


def _log_prob(
    logits: torch.Tensor,
    targets: torch.Tensor,
    keep_mask: torch.Tensor | None,
    group: dist.ProcessGroup | None,
    temperature: float,
    cross_entropy: CrossEntropy,
) -> torch.Tensor:
    """Log-prob [n] float32."""
    if logits.shape[0] == 0:
        return logits.float().sum(1)
    own = logits.float() / temperature
    if keep_mask is not None:
        own = own.masked_fill(dropped_ids(keep_mask, *locate_targets(targets, logits.shape[1], group)), -torch.inf)
    return -cross_entropy(own, targets, group)


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False
