"""A case's inputs on a device: a few drawn rows, rotated. The CPU is a device like another here."""

import pytest
import torch

from runners.instruments.cuda_inputs import INPUT_SETS, drawn_frame, input_sets, place, repeated, worst_rows
from runners.instruments.subject import Branches
from runners.kernels.inputs import Inputs, make_inputs
from runners.kernels.reference import Reference, reference
from service.wire import Case


def _oracle(inputs: Inputs) -> Reference:
    return reference(
        inputs.logits,
        inputs.targets,
        upstream_log_prob=inputs.upstream_log_prob,
        upstream_entropy=inputs.upstream_entropy,
        keep_mask=inputs.keep_mask,
    )


def test_few_tokens_are_the_inputs_of_the_case_as_on_a_cpu() -> None:
    placed = place(Case(tokens=7, vocabulary=300, keep_mask=True), "cpu")
    drawn = make_inputs(tokens=7, vocabulary=300, keep_mask=True)
    for name in Inputs.__slots__:
        assert torch.equal(getattr(placed.whole, name), getattr(drawn, name))
        assert torch.equal(getattr(placed.drawn, name), getattr(drawn, name))


@pytest.mark.parametrize("keep_mask", [False, True])
def test_every_further_row_is_a_drawn_one_rotated_and_so_is_its_truth(keep_mask: bool) -> None:
    drawn = make_inputs(tokens=5, vocabulary=203, keep_mask=keep_mask)
    whole = repeated(drawn, 13)
    truth, few = _oracle(whole), _oracle(drawn)
    for row in range(13):
        block, place_in_block = divmod(row, 5)
        columns = block * 97 % 203
        assert torch.equal(whole.logits[row], drawn.logits[place_in_block].roll(columns))
        torch.testing.assert_close(truth.log_prob[row], few.log_prob[place_in_block])
        torch.testing.assert_close(truth.g_log_prob[row], few.g_log_prob[place_in_block].roll(columns))
        torch.testing.assert_close(truth.g_entropy[row], few.g_entropy[place_in_block].roll(columns))


def test_no_two_blocks_of_rows_are_alike() -> None:
    whole = repeated(make_inputs(tokens=2, vocabulary=512), 64)
    assert len({tuple(row.tolist()) for row in whole.logits}) == 64


def test_equal_cases_have_equal_digests_and_others_have_others() -> None:
    case = Case(tokens=100, vocabulary=64)
    assert place(case, "cpu").digest == place(case, "cpu").digest
    for change in ({"tokens": 101}, {"seed": 1}, {"dtype": "bfloat16"}, {"keep_mask": True}):
        assert place(case.model_copy(update=change), "cpu").digest != place(case, "cpu").digest


def _result(inputs: Inputs) -> Branches:
    truth = _oracle(inputs)
    return Branches(truth.log_prob.float(), truth.entropy.float(), truth.g_log_prob.float(), truth.g_entropy.float())


@pytest.mark.parametrize("tokens", [5, 13, 15])
def test_a_right_result_rotated_back_is_that_of_the_drawn_rows(tokens: int) -> None:
    drawn = make_inputs(tokens=5, vocabulary=203, keep_mask=True)
    result = _result(repeated(drawn, tokens))
    rows = worst_rows(result, _oracle(drawn), 5)
    assert (rows % 5).tolist() == [0, 1, 2, 3, 4]
    for name in Branches.__slots__:
        torch.testing.assert_close(getattr(drawn_frame(result, rows), name), getattr(_result(drawn), name))


@pytest.mark.parametrize("wrong", ["log_prob", "entropy", "g_log_prob", "g_entropy"])
@pytest.mark.parametrize("value", [99.0, float("nan")])
@pytest.mark.parametrize("row", [0, 7, 12])
def test_one_wrong_row_is_the_one_that_is_measured(row: int, value: float, wrong: str) -> None:
    drawn = make_inputs(tokens=5, vocabulary=203)
    result = _result(repeated(drawn, 13))
    getattr(result, wrong)[row] = value
    rows = worst_rows(result, _oracle(drawn), 5)
    assert rows[row % 5] == row
    measured = getattr(drawn_frame(result, rows), wrong)[row % 5]
    assert bool((measured != measured).all() if value != value else (measured == value).all())


def test_a_result_without_entropy_or_gradients_has_worst_rows_too() -> None:
    drawn = make_inputs(tokens=3, vocabulary=20)
    right = _result(repeated(drawn, 9))
    result = Branches(right.log_prob, None, None, None)
    result.log_prob[4] += 1
    rows = worst_rows(result, _oracle(drawn), 3)
    assert rows[1] == 4
    assert drawn_frame(result, rows).g_log_prob is None


def test_no_token_is_a_case_too() -> None:
    placed = place(Case(tokens=0, vocabulary=8), "cpu")
    assert placed.whole.logits.shape == placed.drawn.logits.shape == (0, 8)
    nothing = _result(placed.drawn)
    assert drawn_frame(nothing, worst_rows(nothing, _oracle(placed.drawn), 0)).log_prob.shape == (0,)


@pytest.mark.parametrize("windows_above_bytes", [0, 1 << 33])
def test_the_sets_hold_the_same_rows_in_another_order_at_another_address(windows_above_bytes: int) -> None:
    inputs = make_inputs(tokens=50, vocabulary=203, keep_mask=True)
    sets = input_sets(inputs, windows_above_bytes=windows_above_bytes)
    assert len({one.logits.data_ptr() for one in sets}) == len(sets) == INPUT_SETS
    wanted = _oracle(inputs)
    for place_of_set, one in enumerate(sets):
        assert one.logits.requires_grad
        assert one.logits.is_leaf
        assert one.logits.is_contiguous()
        shift = 16 * place_of_set if windows_above_bytes == 0 else -place_of_set
        torch.testing.assert_close(_oracle(one).log_prob, wanted.log_prob.roll(-shift))
        assert torch.equal(one.upstream_entropy, inputs.upstream_entropy.roll(-shift))
    assert len({float(one.logits.detach()[0].sum()) for one in sets}) == INPUT_SETS


def test_windows_share_one_buffer_and_keep_its_alignment() -> None:
    inputs = make_inputs(tokens=40, vocabulary=203, dtype=torch.bfloat16)
    sets = input_sets(inputs, windows_above_bytes=0)
    assert len({one.logits.untyped_storage().data_ptr() for one in sets}) == 1
    assert sets[0].logits.untyped_storage().nbytes() == 72 * 203 * 2
    assert {one.logits.data_ptr() % 16 for one in sets} == {sets[0].logits.data_ptr() % 16}
