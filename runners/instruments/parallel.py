"""Measures one kernel on one case that is split over ranks, each in a process of its own.

Every rank gets its columns of the inputs and is asked the same; all are asked before any is heard, so that the
kernel's collectives meet. A kernel whose collectives do not match costs its case.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from runners.instruments.accuracy import Yardstick, numeric_metrics, permuted
from runners.instruments.calls import Answer, Call, Kind, RaisedError, Rank, as_branches, branches_of, figures
from runners.instruments.checks import inputs_changed, thread_fault
from runners.instruments.subject import Branches, Options, ResultShapeError
from runners.instruments.unseen import fault_on, unseen
from runners.kernels.inputs import Inputs
from service.catalogue import MetricClass

# A result may move with the number of ranks by so many times what a permuted vocabulary moves it (KERNELS.md, gates).
NOISES = 10.0
# By chance a permuted vocabulary moves nothing: two ulp are always allowed, an ulp of x is at most 2 u |x|.
_ULPS, _UNIT = 4.0, 2.0**-24
_EXACT: tuple[Kind, ...] = ("memory", "work")


class RanksError(RuntimeError):
    """The kernel raised on some rank, or the ranks waited for each other in vain. Its message names the ranks."""


@dataclass(frozen=True, slots=True)
class ParallelFindings:
    """Values by metric, raw; `faults` has, by check that was made, None or the reason of its failure."""

    values: dict[str, list[float]]
    faults: dict[str, str | None]


def shard(inputs: Inputs, rank: int, size: int) -> Inputs:
    """The columns of one rank, contiguous. Targets and upstream gradients are every rank's."""
    width = inputs.logits.shape[1] // size
    columns = slice(rank * width, (rank + 1) * width)
    return replace(
        inputs,
        logits=inputs.logits[:, columns].contiguous(),
        keep_mask=None if inputs.keep_mask is None else inputs.keep_mask[:, columns].contiguous(),
    )


def measure_over_ranks(
    ranks: Sequence[Rank],
    inputs: Inputs,
    how: Options,
    yard: Yardstick,
    *,
    draw: str,
    exact_readings: int = 2,
    repetitions: int = 5,
) -> ParallelFindings:
    """Numbers, memory, work, collectives and time of a kernel that is split over `ranks`; `inputs` are the whole ones,
    and `draw` makes words for those that no rank has seen.

    The gathered shards are held against the oracle, and against the kernel's own result where one rank holds all.
    Bytes, counts and errors are those of the worst rank, times the first rank's. Raises RanksError.
    """
    parts = [as_branches(part) for part in together(ranks, Call("branches", how), inputs)]
    whole = _alone(ranks[0], inputs, how)
    numbers = _numbers(inputs, how, _joined(parts), whole, yard) | {"rank_disagree": float(disagreeing_rows(parts))}
    values = {name: [value] for name, value in numbers.items()}
    faults = {"tp_invariant": variance_fault(numbers, _joined(parts), whole.result)}
    del parts, whole
    for reading in range(exact_readings):
        for kind in _EXACT:
            given = unseen(inputs, f"{draw} {kind} {reading}")
            answers = together(ranks, Call(kind, how), given)
            for name, value in _worst([figures(answer, MetricClass.EXACT) for answer in answers]).items():
                values.setdefault(name, []).append(value)
            found = {
                "unseen_inputs": _fault_on(given, how, answers, numbers),
                "inputs_unchanged": _changed(given, answers),
                "own_thread": thread_fault(answers),
                "collectives_agree": disagreement([answer.collectives for answer in answers]),
            }
            faults |= {name: faults.get(name) or fault for name, fault in found.items()}
    times = together(ranks, Call("time", how, repetitions=repetitions, draw=draw), inputs)
    return ParallelFindings(values | figures(times[0], MetricClass.TIMING), faults)


def together(ranks: Sequence[Rank], call: Call, inputs: Inputs) -> list[Answer]:
    """What every rank answers on its columns, in their order. Raises RanksError if any rank raised."""
    for number, rank in enumerate(ranks):
        rank.begin(call, shard(inputs, number, len(ranks)))
    answers: list[Answer] = []
    faults: dict[str, list[int]] = {}
    for number, rank in enumerate(ranks):
        try:
            answers.append(rank.finish())
        except (RaisedError, ResultShapeError) as error:
            faults.setdefault(str(error), []).append(number)
    if faults:
        raise RanksError("; ".join(f"rank {', '.join(map(str, on))}: {fault}" for fault, on in faults.items()))
    return answers


@dataclass(frozen=True, slots=True)
class _Whole:
    """The kernel's result where one rank holds the whole vocabulary, and the same with that permuted: `place` says
    where each column went."""

    result: Branches
    shuffled: Branches
    place: torch.Tensor


def _alone(rank: Rank, inputs: Inputs, how: Options) -> _Whole:
    shuffled_inputs, place = permuted(inputs)
    try:
        result, shuffled = (branches_of(rank, one, how, alone=True) for one in (inputs, shuffled_inputs))
    except (RaisedError, ResultShapeError) as error:
        raise RanksError(f"rank 0 with the whole vocabulary: {error}") from error
    return _Whole(result, shuffled, place)


def _fault_on(given: Inputs, how: Options, answers: list[Answer], numbers: dict[str, float]) -> str | None:
    log_prob = answers[0].log_prob
    assert log_prob is not None
    gradient = _side_by_side([answer.gradients[0] for answer in answers])
    finite = {name: value for name, value in numbers.items() if math.isfinite(value)}
    return fault_on(given, how, log_prob=log_prob, entropy=answers[0].entropy, gradient=gradient, errors=finite)


def _changed(given: Inputs, answers: list[Answer]) -> str | None:
    for number, answer in enumerate(answers):
        if answer.left is not None and (fault := inputs_changed(shard(given, number, len(answers)), answer.left)):
            return f"rank {number}: {fault}"
    return None


def _numbers(inputs: Inputs, how: Options, split: Branches, whole: _Whole, yard: Yardstick) -> dict[str, float]:
    """The numeric metrics of the result that was split. Reorder noise is that of one rank: what goes wrong between
    ranks must not excuse itself."""
    numbers = numeric_metrics(inputs, how, split, whole.shuffled, whole.place, yard)
    of_one_rank = numeric_metrics(inputs, how, whole.result, whole.shuffled, whole.place, yard)
    noise = {name: value for name, value in of_one_rank.items() if name.startswith("perm_delta")}
    return numbers | noise | moved(split, whole.result)


def _joined(parts: list[Branches]) -> Branches:
    """The first rank's outputs with the gradient's shards side by side, None if a rank has none."""
    return Branches(
        log_prob=parts[0].log_prob,
        entropy=parts[0].entropy,
        g_log_prob=_side_by_side([part.g_log_prob for part in parts]),
        g_entropy=_side_by_side([part.g_entropy for part in parts]),
    )


def _side_by_side(shards: list[torch.Tensor | None]) -> torch.Tensor | None:
    present = [one for one in shards if one is not None]
    return torch.cat(present, 1) if len(present) == len(shards) else None


# --- Comparing --------------------------------------------------------------------------------------------------------


def moved(split: Branches, whole: Branches) -> dict[str, float]:
    """How far the result moved with the number of ranks: outputs in nats, gradients as relative L2."""
    found = {"tp_delta_lp": _largest_move(split.log_prob, whole.log_prob)}
    if split.entropy is not None and whole.entropy is not None:
        found["tp_delta_ent"] = _largest_move(split.entropy, whole.entropy)
    for branch, one, other in (("lp", split.g_log_prob, whole.g_log_prob), ("ent", split.g_entropy, whole.g_entropy)):
        if other is not None:
            found[f"tp_delta_g_{branch}"] = _relative_move(one, other)
    return found


def _largest_move(split: torch.Tensor, whole: torch.Tensor) -> float:
    both = split.isfinite() & whole.isfinite()
    return float((split.double() - whole.double()).abs()[both].max()) if bool(both.any()) else 0.0


def _relative_move(split: torch.Tensor | None, whole: torch.Tensor) -> float:
    """0 where both are zero; a gradient that autograd left undefined counts as zeros."""
    norm = float(whole.double().norm())
    change = norm if split is None else float((split.double() - whole.double()).norm())
    if norm == 0:
        return 0.0 if change == 0 else math.inf
    return change / norm


def disagreeing_rows(parts: list[Branches]) -> int:
    """Rows whose log-prob or entropy is not the same bits on every rank."""
    first = parts[0]
    differs = torch.zeros(first.log_prob.shape[0], dtype=torch.bool)
    for part in parts[1:]:
        differs |= _other_bits(first.log_prob, part.log_prob)
        if first.entropy is not None and part.entropy is not None:
            differs |= _other_bits(first.entropy, part.entropy)
    return int(differs.sum())


def _other_bits(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    if one.dtype != other.dtype:
        return torch.ones(one.shape[0], dtype=torch.bool)
    width = one.element_size()
    return (one.contiguous().view(torch.uint8) != other.contiguous().view(torch.uint8)).reshape(-1, width).any(1)


def variance_fault(numbers: dict[str, float], split: Branches, whole: Branches) -> str | None:
    """The parallel check: outputs, gradients and gradient norms are those of one rank but for reordering noise."""
    for name, noise, scale in (
        ("tp_delta_lp", "perm_delta_lp", numbers.get("lp_scale", 0.0)),
        ("tp_delta_ent", "perm_delta_ent", numbers.get("ent_scale", 0.0)),
        ("tp_delta_g_lp", "perm_delta_g_lp", 1.0),
        ("tp_delta_g_ent", "perm_delta_g_ent", 1.0),
    ):
        if name in numbers:
            limit = max(NOISES * numbers[noise], _ULPS * _UNIT * max(1.0, scale))
            if not numbers[name] <= limit:
                return f"{name} {numbers[name]:.2g} over {limit:.2g}{_norms(name, split, whole)}"
    return None


def _norms(name: str, split: Branches, whole: Branches) -> str:
    pairs = {
        "tp_delta_g_lp": (split.g_log_prob, whole.g_log_prob),
        "tp_delta_g_ent": (split.g_entropy, whole.g_entropy),
    }
    if name not in pairs:
        return ""
    norms = [0.0 if one is None else float(one.double().norm()) for one in pairs[name]]
    return f" (gradient norm {norms[0]:.6g}, of one rank {norms[1]:.6g})"


# --- Work and collectives ---------------------------------------------------------------------------------------------

Collective = tuple[str, int]


def _worst(readings: Sequence[dict[str, list[float]]]) -> dict[str, float]:
    """The greatest of each figure over the ranks."""
    names = {name for reading in readings for name in reading}
    return {name: max(max(reading[name]) for reading in readings if name in reading) for name in sorted(names)}


def disagreement(logs: Sequence[Sequence[Collective]]) -> str | None:
    """Why the collectives of the ranks, in order, each with its bytes, are not the same; None if they are."""
    first = logs[0]
    for rank, log in enumerate(logs[1:], start=1):
        if len(log) != len(first):
            return f"rank 0 makes {len(first)} collectives, rank {rank} {len(log)}"
        for place, (mine, other) in enumerate(zip(first, log, strict=True)):
            if mine != other:
                return (
                    f"collective {place + 1} is {mine[0]} of {mine[1]} bytes on rank 0, "
                    f"{other[0]} of {other[1]} bytes on rank {rank}"
                )
    return None
