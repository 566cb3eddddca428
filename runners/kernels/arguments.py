"""The rules for a kernel's arguments, and the errors that name the one that breaks them. Computes nothing."""

import math

import torch
import torch.distributed as dist

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_arguments(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    keep_mask: torch.Tensor | None,
    group: dist.ProcessGroup | None,
    chunk_size: int | None,
    temperature: float,
) -> None:
    """Raise TypeError or ValueError naming the argument, what it is and what it must be (contract.LogProbEntropy).

    Cheap, but for one thing: reading the targets' range waits for the device on CUDA. An out-of-range target would
    else give a finite, wrong result.
    """
    for name, tensor in (("logits", logits), ("targets", targets), ("keep_mask", keep_mask)):
        _check_is_tensor(name, tensor, may_be_none=name == "keep_mask")
    _check_chunk_size(chunk_size)
    _check_temperature(temperature)
    _check_logits(logits)
    _check_targets(targets, logits, world_size=1 if group is None else group.size())
    if keep_mask is not None:
        _check_keep_mask(keep_mask, logits)


def check_whole_vocabulary(kernel: str, group: dist.ProcessGroup | None) -> None:
    """Raise ValueError where a kernel without tensor parallelism is given a group of more than one rank."""
    if group is not None and group.size() > 1:
        raise ValueError(f"group has {group.size()} ranks: {kernel} needs the whole vocabulary on one; pass group=None")


def _check_is_tensor(name: str, value: object, *, may_be_none: bool) -> None:
    if not isinstance(value, torch.Tensor) and not (may_be_none and value is None):
        raise TypeError(f"{name} is a {type(value).__name__}: it must be a tensor{' or None' if may_be_none else ''}")


def _check_chunk_size(chunk_size: object) -> None:
    rule = "it must be a whole number of rows, at least 1, or None for all rows at once"
    if chunk_size is None:
        return
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, int):
        raise TypeError(f"chunk_size is {chunk_size!r}: {rule}")
    if chunk_size < 1:
        raise ValueError(f"chunk_size is {chunk_size}: {rule}")


def _check_temperature(temperature: object) -> None:
    rule = "it must be a number, finite and above 0"
    if isinstance(temperature, bool) or not isinstance(temperature, int | float):
        raise TypeError(f"temperature is {temperature!r}: {rule}")
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature is {temperature}: {rule}")


def _check_logits(logits: torch.Tensor) -> None:
    if logits.dim() != 2 or logits.shape[1] == 0:
        raise ValueError(f"logits has shape {tuple(logits.shape)}: it must be [N, V/TP] with V/TP >= 1")
    if logits.dtype not in _DTYPES:
        raise ValueError(f"logits is {logits.dtype}: it must be one of {', '.join(map(str, _DTYPES))}")


def _check_targets(targets: torch.Tensor, logits: torch.Tensor, *, world_size: int) -> None:
    if targets.shape != logits.shape[:1]:
        raise ValueError(
            f"targets has shape {tuple(targets.shape)}: it must be [{logits.shape[0]}], one for each row of logits"
        )
    if targets.dtype != torch.int64:
        raise ValueError(f"targets is {targets.dtype}: it must be torch.int64")
    if targets.device != logits.device:
        raise ValueError(f"targets is on {targets.device}: it must be on {logits.device} with logits")
    if not targets.numel():
        return
    lowest, highest = torch.stack(targets.aminmax()).tolist()
    vocabulary = logits.shape[1] * world_size
    if lowest < 0 or highest >= vocabulary:
        raise ValueError(
            f"targets holds ids from {lowest} to {highest}: they must be in 0 .. {vocabulary - 1}; drop ignored rows"
        )


def _check_keep_mask(keep_mask: torch.Tensor, logits: torch.Tensor) -> None:
    if keep_mask.shape != logits.shape:
        raise ValueError(
            f"keep_mask has shape {tuple(keep_mask.shape)}: it must be {tuple(logits.shape)}, as logits is"
        )
    if keep_mask.dtype != torch.bool:
        raise ValueError(f"keep_mask is {keep_mask.dtype}: it must be torch.bool, True where an id is kept")
    if keep_mask.device != logits.device:
        raise ValueError(f"keep_mask is on {keep_mask.device}: it must be on {logits.device} with logits")
