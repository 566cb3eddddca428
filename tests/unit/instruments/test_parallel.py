"""What the ranks of a split case found, compared: hand-made results, no processes."""

import math

import pytest
import torch

from runners.instruments.parallel import disagreeing_rows, disagreement, moved, shard, variance_fault
from runners.instruments.subject import Branches
from runners.kernels.inputs import make_inputs


def branches(log_prob: list[float], gradient: list[list[float]] | None = None) -> Branches:
    g_log_prob = None if gradient is None else torch.tensor(gradient)
    return Branches(torch.tensor(log_prob), None, g_log_prob, None)


def test_a_shard_is_its_columns_and_every_row() -> None:
    inputs = make_inputs(tokens=3, vocabulary=8, keep_mask=True)
    second = shard(inputs, 1, 2)
    assert second.keep_mask is not None
    assert inputs.keep_mask is not None
    assert torch.equal(second.logits, inputs.logits[:, 4:])
    assert torch.equal(second.keep_mask, inputs.keep_mask[:, 4:])
    assert second.logits.is_contiguous()
    assert torch.equal(second.targets, inputs.targets)


def test_how_far_a_result_moved() -> None:
    found = moved(branches([1.0, 2.5], [[3.0, 0.0]]), branches([1.0, 2.0], [[3.0, 4.0]]))
    assert found == {"tp_delta_lp": 0.5, "tp_delta_g_lp": pytest.approx(0.8)}


def test_a_gradient_that_a_rank_lacks_moved_all_the_way() -> None:
    assert moved(branches([1.0]), branches([1.0], [[3.0, 4.0]]))["tp_delta_g_lp"] == 1.0
    assert moved(branches([1.0], [[1.0]]), branches([1.0], [[0.0]]))["tp_delta_g_lp"] == math.inf
    assert moved(branches([1.0], [[0.0]]), branches([1.0], [[0.0]]))["tp_delta_g_lp"] == 0.0


def test_rows_that_are_not_the_same_bits_are_counted_once() -> None:
    one, other = branches([0.0, 2.0, math.nan]), branches([-0.0, 2.0, math.nan])
    assert disagreeing_rows([one, other]) == 1  # -0.0 is other bits, the same NaN is not
    assert disagreeing_rows([one, one, one]) == 0


@pytest.mark.parametrize(
    ("other", "fault"),
    [
        ([("allreduce_", 64)], None),
        ([], "rank 0 makes 1 collectives, rank 1 0"),
        ([("allreduce_", 32)], "collective 1 is allreduce_ of 64 bytes on rank 0, allreduce_ of 32 bytes on rank 1"),
        ([("broadcast_", 64)], "collective 1 is allreduce_ of 64 bytes on rank 0, broadcast_ of 64 bytes on rank 1"),
    ],
)
def test_collectives_have_to_be_the_same_on_every_rank(other: list[tuple[str, int]], fault: str | None) -> None:
    assert disagreement([[("allreduce_", 64)], other]) == fault


def test_a_result_may_move_by_ten_times_its_reorder_noise() -> None:
    whole, split = branches([1.0], [[3.0, 4.0]]), branches([1.0], [[6.0, 8.0]])
    quiet = {"tp_delta_lp": 0.0, "perm_delta_lp": 0.0, "tp_delta_g_lp": 9e-7, "perm_delta_g_lp": 1e-7}
    assert variance_fault(quiet, split, whole) is None
    fault = variance_fault(quiet | {"tp_delta_g_lp": 1.1e-6}, split, whole)
    assert fault == "tp_delta_g_lp 1.1e-06 over 1e-06 (gradient norm 10, of one rank 5)"
    assert variance_fault(quiet | {"tp_delta_lp": math.nan}, split, whole) is not None


def test_by_chance_a_permutation_moves_nothing() -> None:
    whole = branches([1.0])
    numbers = {"tp_delta_lp": 7e-6, "perm_delta_lp": 0.0, "lp_scale": 33.0}  # two ulp of 33 are 7.6e-6
    assert variance_fault(numbers, whole, whole) is None
    assert variance_fault(numbers | {"tp_delta_lp": 1e-5}, whole, whole) is not None
