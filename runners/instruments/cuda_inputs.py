"""A case's inputs on a CUDA device: a few rows are drawn on the CPU, and every further row is one of them, rotated.

So they are the same on every machine, cost no minutes to draw and to hash, and the oracle of a few rows is the oracle
of all: results are rotated back, and of those that ought to be equal the worst is measured. Calls no kernel.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from runners.instruments.subject import Branches
from runners.kernels.inputs import Inputs, digest, make_inputs
from runners.kernels.reference import Reference
from service.wire import Case

# Rows that are drawn: each costs the CPU some 20 ms of comparing with the oracle at a real vocabulary.
ROWS = 16
# By how many columns each further block of rows is rotated.
_STEP = 97
_RECIPE = "rotated-16-rows/1"
INPUT_SETS = 3
# Rows between two input sets that share memory: a multiple of 16 bytes at any vocabulary and dtype.
_SHIFT = 16
# Logits of more bytes than this are timed as windows of one buffer, since three of them may not fit.
_WINDOWS_ABOVE_BYTES = 1 << 33


@dataclass(frozen=True, slots=True)
class PlacedInputs:
    """The inputs of a case on a device, and the drawn rows of which they are made, on the CPU."""

    whole: Inputs
    drawn: Inputs
    digest: str


def place(case: Case, device: torch.device | str) -> PlacedInputs:
    """Make the inputs of a case on a device. Equal cases have equal inputs on every device."""
    drawn = make_inputs(
        tokens=min(case.tokens, ROWS),
        vocabulary=case.vocabulary,
        dtype=getattr(torch, case.dtype),
        distribution=case.distribution,
        keep_mask=case.keep_mask,
        upstream=case.upstream,
        seed=case.seed,
    )
    words = f"{_RECIPE} {case.tokens} {digest(drawn)}"
    whole = repeated(on_device(drawn, device), case.tokens)
    return PlacedInputs(whole, drawn, hashlib.sha256(words.encode()).hexdigest())


def repeated(drawn: Inputs, tokens: int) -> Inputs:
    """Inputs of `tokens` rows: the drawn ones, and block after block of them rotated over the vocabulary."""
    count, vocabulary = drawn.logits.shape
    whole = Inputs(
        logits=drawn.logits.new_empty(tokens, vocabulary),
        targets=drawn.targets.new_empty(tokens),
        keep_mask=None if drawn.keep_mask is None else drawn.keep_mask.new_empty(tokens, vocabulary),
        upstream_log_prob=drawn.upstream_log_prob.new_empty(tokens),
        upstream_entropy=drawn.upstream_entropy.new_empty(tokens),
    )
    for rows, columns in _blocks(tokens, count, vocabulary):
        length = rows.stop - rows.start
        whole.logits[rows] = drawn.logits[:length].roll(columns, 1)
        whole.targets[rows] = (drawn.targets[:length] + columns) % vocabulary
        if whole.keep_mask is not None and drawn.keep_mask is not None:
            whole.keep_mask[rows] = drawn.keep_mask[:length].roll(columns, 1)
        whole.upstream_log_prob[rows] = drawn.upstream_log_prob[:length]
        whole.upstream_entropy[rows] = drawn.upstream_entropy[:length]
    return whole


def worst_rows(result: Branches, truth: Reference, count: int) -> torch.Tensor:
    """For each of `count` drawn rows the number of the row, of all that repeat it, whose results are furthest off.

    Errors of log-prob and entropy, and the relative ones of their gradients, are added up; NaN is the furthest. The
    oracle of the drawn rows, `truth`, is on the result's device.
    """
    tokens = result.log_prob.shape[0]
    error = result.log_prob.new_full((-(-tokens // max(1, count)) * count,), -1.0, dtype=torch.float64)
    outputs = ((result.log_prob, truth.log_prob), (result.entropy, truth.entropy))
    gradients = ((result.g_log_prob, truth.g_log_prob), (result.g_entropy, truth.g_entropy))
    for rows, columns in _blocks(tokens, count, truth.g_log_prob.shape[1]):
        length = rows.stop - rows.start
        total = error.new_zeros(length)
        for output, wanted in outputs:
            if output is not None:
                total += (output[rows].double() - wanted[:length]).abs()
        for gradient, wanted in gradients:
            if gradient is not None:
                norm = wanted[:length].norm(dim=1).clamp_min(torch.finfo(torch.float64).tiny)
                total += (gradient[rows].roll(-columns, 1).double() - wanted[:length]).norm(dim=1) / norm
        error[rows] = total.nan_to_num(nan=torch.inf)
    blocks = error.view(-1, count).argmax(0) if tokens else error.new_empty(0, dtype=torch.int64)
    return blocks * count + torch.arange(count, device=error.device)


def drawn_frame(result: Branches, rows: torch.Tensor) -> Branches:
    """The given rows of a result, one for each drawn row, on the CPU and rotated back to their drawn columns."""
    taken = [None if output is None else output[rows].cpu() for output in (result.log_prob, result.entropy)]
    assert taken[0] is not None
    gradients = [
        None if gradient is None else _rotated_back(gradient, rows)
        for gradient in (result.g_log_prob, result.g_entropy)
    ]
    return Branches(taken[0], taken[1], *gradients)


def _rotated_back(gradient: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    vocabulary = gradient.shape[1]
    back = gradient.new_empty(len(rows), vocabulary)
    for place_, row in enumerate(rows.tolist()):
        back[place_] = gradient[row].roll(-(row // len(rows) * _STEP % vocabulary))
    return back.cpu()


def _blocks(tokens: int, count: int, vocabulary: int) -> Iterator[tuple[slice, int]]:
    """The rows of each block, the last perhaps shorter, and by how many columns it is rotated."""
    for start in range(0, tokens, max(1, count)):
        yield slice(start, min(start + count, tokens)), start // count * _STEP % vocabulary


def on_device(inputs: Inputs, device: torch.device | str) -> Inputs:
    """The inputs on a device."""
    return Inputs(
        logits=inputs.logits.to(device),
        targets=inputs.targets.to(device),
        keep_mask=None if inputs.keep_mask is None else inputs.keep_mask.to(device),
        upstream_log_prob=inputs.upstream_log_prob.to(device),
        upstream_entropy=inputs.upstream_entropy.to(device),
    )


def input_sets(inputs: Inputs, *, windows_above_bytes: int = _WINDOWS_ABOVE_BYTES) -> list[Inputs]:
    """Three sets to be timed in turns, at other addresses and with other rows, whose logits require grad.

    Copies with rows and vocabulary rotated; of larger logits windows of one buffer that holds 32 rows more.
    """
    tokens, vocabulary = inputs.logits.shape
    if inputs.logits.nbytes <= windows_above_bytes or tokens <= 2 * _SHIFT:
        return [_rotated(inputs, shift, vocabulary) for shift in range(INPUT_SETS)]
    order = torch.arange(tokens + (INPUT_SETS - 1) * _SHIFT, device=inputs.logits.device) % tokens
    logits = inputs.logits.detach()[order]
    keep_mask = None if inputs.keep_mask is None else inputs.keep_mask[order]
    windows = [slice(start, start + tokens) for start in range(0, INPUT_SETS * _SHIFT, _SHIFT)]
    return [
        Inputs(
            logits=logits[window].requires_grad_(),
            targets=inputs.targets[order[window]],
            keep_mask=None if keep_mask is None else keep_mask[window],
            upstream_log_prob=inputs.upstream_log_prob[order[window]],
            upstream_entropy=inputs.upstream_entropy[order[window]],
        )
        for window in windows
    ]


def _rotated(inputs: Inputs, shift: int, vocabulary: int) -> Inputs:
    return Inputs(
        logits=inputs.logits.detach().roll((shift, shift), (0, 1)).requires_grad_(),
        targets=(inputs.targets.roll(shift) + shift) % vocabulary,
        keep_mask=None if inputs.keep_mask is None else inputs.keep_mask.roll((shift, shift), (0, 1)),
        upstream_log_prob=inputs.upstream_log_prob.roll(shift),
        upstream_entropy=inputs.upstream_entropy.roll(shift),
    )
