"""The inputs of a case: deterministic, the same at every tensor-parallel size, and each distribution what it says."""

import math
from typing import get_args

import pytest
import torch

from runners.kernels.inputs import Distribution, Inputs, Upstream, digest, make_inputs
from service import wire

DISTRIBUTIONS = get_args(Distribution)


def test_the_wire_knows_the_same_distributions_and_upstreams() -> None:
    assert get_args(wire.Distribution) == DISTRIBUTIONS
    assert get_args(wire.Upstream) == get_args(Upstream)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_the_same_seed_gives_the_same_inputs_and_another_seed_others(distribution: Distribution) -> None:
    digests = [digest(make_inputs(tokens=8, vocabulary=64, distribution=distribution, seed=seed)) for seed in (0, 0, 1)]
    assert digests[0] == digests[1] != digests[2]
    assert len(digests[0]) == 64


def test_the_digest_sees_every_tensor_its_dtype_and_a_missing_mask() -> None:
    inputs = make_inputs(tokens=4, vocabulary=8, keep_mask=True)
    assert inputs.keep_mask is not None
    mask = inputs.keep_mask
    others = [
        Inputs(inputs.logits + 1, inputs.targets, mask, inputs.upstream_log_prob, inputs.upstream_entropy),
        Inputs(inputs.logits.half(), inputs.targets, mask, inputs.upstream_log_prob, inputs.upstream_entropy),
        Inputs(inputs.logits, 7 - inputs.targets, mask, inputs.upstream_log_prob, inputs.upstream_entropy),
        Inputs(inputs.logits, inputs.targets, ~mask, inputs.upstream_log_prob, inputs.upstream_entropy),
        Inputs(inputs.logits, inputs.targets, None, inputs.upstream_log_prob, inputs.upstream_entropy),
        Inputs(inputs.logits, inputs.targets, mask, inputs.upstream_log_prob + 1, inputs.upstream_entropy),
        Inputs(inputs.logits, inputs.targets, mask, inputs.upstream_log_prob, inputs.upstream_entropy + 1),
    ]
    assert len({digest(inputs), *map(digest, others)}) == 8


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_the_shards_of_all_ranks_make_the_whole(distribution: Distribution) -> None:
    whole = make_inputs(tokens=5, vocabulary=64, distribution=distribution, keep_mask=True)
    shards = [
        make_inputs(tokens=5, vocabulary=64, distribution=distribution, keep_mask=True, rank=rank, world_size=4)
        for rank in range(4)
    ]
    assert torch.equal(torch.cat([shard.logits for shard in shards], 1), whole.logits)
    assert torch.equal(torch.cat([_mask(shard) for shard in shards], 1), _mask(whole))
    assert all(torch.equal(shard.targets, whole.targets) for shard in shards)
    assert all(torch.equal(shard.upstream_log_prob, whole.upstream_log_prob) for shard in shards)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize(("tokens", "vocabulary"), [(0, 5), (1, 1), (3, 4)])
def test_every_distribution_has_every_size(distribution: Distribution, tokens: int, vocabulary: int) -> None:
    inputs = make_inputs(tokens=tokens, vocabulary=vocabulary, distribution=distribution, dtype=torch.bfloat16)
    assert inputs.logits.shape == (tokens, vocabulary)
    assert inputs.logits.dtype == torch.bfloat16
    assert inputs.logits.is_contiguous()


def test_confident_targets_are_ten_above_the_rest() -> None:
    inputs = make_inputs(tokens=16, vocabulary=100, distribution="confident")
    target, rest = _split(inputs)
    assert torch.allclose(target - rest.amax(1), torch.tensor(10.0))


def test_confident_wrong_rows_are_sure_of_another_id() -> None:
    inputs = make_inputs(tokens=16, vocabulary=100, distribution="confident_wrong")
    target, rest = _split(inputs)
    assert (rest.amax(1) - target > 10).all()


def test_offset_logits_lie_about_a_thousand() -> None:
    logits = make_inputs(tokens=16, vocabulary=100, distribution="offset").logits
    assert abs(logits.mean().item() - 1000) < 1


def test_tied_rows_have_one_value_each() -> None:
    logits = make_inputs(tokens=4, vocabulary=100, distribution="ties").logits
    assert (logits == logits[:, :1]).all()
    assert logits[:, 0].unique().numel() == 4


def test_entropy_of_ties_is_the_logarithm_of_the_vocabulary() -> None:
    logits = make_inputs(tokens=4, vocabulary=100, distribution="ties").logits.double()
    p = logits.softmax(1)
    assert torch.allclose(-(p * p.log()).sum(1), torch.tensor(math.log(100), dtype=torch.float64))


def test_one_hot_rows_are_hot_at_the_target_and_elsewhere_in_turn() -> None:
    inputs = make_inputs(tokens=6, vocabulary=100, distribution="one_hot")
    target, rest = _split(inputs)
    assert target.tolist() == [80.0, -80.0] * 3
    assert rest.amax(1).tolist() == [-80.0, 80.0] * 3


def test_masked_keeps_a_thousandth_never_the_target_and_has_targets_on_every_shard_and_edge() -> None:
    inputs = make_inputs(tokens=64, vocabulary=8192, distribution="masked")
    mask = _mask(inputs)
    assert 0.0005 < mask.double().mean().item() < 0.002
    assert not mask.gather(1, inputs.targets[:, None]).any()
    assert {0, 8191} <= set(inputs.targets.tolist())
    assert (inputs.targets // 1024).unique().numel() == 8


def test_bf16_exact_logits_lose_nothing_in_bfloat16() -> None:
    logits = make_inputs(tokens=4, vocabulary=100, distribution="bf16_exact").logits
    assert torch.equal(logits.bfloat16().float(), logits)


def test_neg_inf_rows_hold_minus_infinity_but_not_at_the_target() -> None:
    inputs = make_inputs(tokens=64, vocabulary=100, distribution="neg_inf")
    target, rest = _split(inputs)
    assert torch.isfinite(target).all()
    assert 0.05 < torch.isneginf(rest).double().mean().item() < 0.15


def test_a_keep_mask_keeps_about_half_and_not_the_first_rows_target() -> None:
    inputs = make_inputs(tokens=64, vocabulary=1000, keep_mask=True)
    assert abs(_mask(inputs).double().mean().item() - 0.5) < 0.01
    assert not _mask(inputs)[0, inputs.targets[0]]
    assert make_inputs(tokens=64, vocabulary=1000).keep_mask is None


@pytest.mark.parametrize(("tokens", "zeros"), [(1, 0), (2, 0), (3, 0), (4, 1), (7, 1), (64, 16)])
def test_signed_upstreams_are_zero_in_a_quarter_of_the_rows_and_in_the_first(tokens: int, zeros: int) -> None:
    inputs = make_inputs(tokens=tokens, vocabulary=4)
    for upstream in (inputs.upstream_log_prob, inputs.upstream_entropy):
        assert int((upstream == 0).sum()) == zeros
        assert (upstream[0] == 0) == (tokens > 3)
    if tokens == 64:
        assert (inputs.upstream_log_prob > 0).any()
        assert (inputs.upstream_log_prob < 0).any()
        assert not torch.equal(inputs.upstream_log_prob, inputs.upstream_entropy)


@pytest.mark.parametrize("tokens", [1, 2, 64])
def test_one_row_upstreams_leave_one_row_and_not_the_first_of_several(tokens: int) -> None:
    upstream = make_inputs(tokens=tokens, vocabulary=4, upstream="one_row").upstream_log_prob
    assert int((upstream != 0).sum()) == 1
    assert tokens == 1 or upstream[0] == 0


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="vocabulary 5 does not divide by world_size 2"):
        make_inputs(tokens=1, vocabulary=5, world_size=2)
    with pytest.raises(ValueError, match="unknown distribution 'normal'; known are flat, spread"):
        make_inputs(tokens=1, vocabulary=5, distribution="normal")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unknown upstream 'ones'; known are signed, one_row"):
        make_inputs(tokens=1, vocabulary=5, upstream="ones")  # type: ignore[arg-type]


def _mask(inputs: Inputs) -> torch.Tensor:
    assert inputs.keep_mask is not None
    return inputs.keep_mask


def _split(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """The target's logit [N], and the others [N, V - 1]."""
    others = torch.ones_like(inputs.logits, dtype=torch.bool).scatter_(1, inputs.targets[:, None], False)
    tokens, vocabulary = inputs.logits.shape
    return inputs.logits[~others], inputs.logits[others].view(tokens, vocabulary - 1)
