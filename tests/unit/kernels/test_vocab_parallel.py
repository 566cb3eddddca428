"""What ranks tell each other of their shards: equal shards agree in it, and no others by chance."""

import torch

from runners.kernels.vocab_parallel import _shard_facts

FIRST_OWNS_ALL = torch.ones(3, 1, dtype=torch.bool)
NONE_OWNED = torch.zeros(3, 1, dtype=torch.bool)


def fingerprint(logits: torch.Tensor) -> list[float]:
    """The facts but for the widths before it and the word that a shard is a rank's own behind it."""
    return [float(fact) for fact in _shard_facts(logits, NONE_OWNED, rank=1)[2:-1]]


def test_equal_shards_have_equal_facts_whatever_their_dtype_and_strides() -> None:
    logits = torch.randn(3, 40).bfloat16()
    for same in (logits.clone(), logits.float(), logits.t().contiguous().t()):
        assert torch.equal(_shard_facts(same, NONE_OWNED, rank=1), _shard_facts(logits, NONE_OWNED, rank=0))


def test_shards_that_differ_in_one_bit_of_one_great_number_have_different_facts() -> None:
    logits = torch.full((3, 4096), 1000.0)
    other = logits.clone()
    other[1, 7] = torch.nextafter(other[1, 7], torch.tensor(torch.inf))
    assert fingerprint(logits) != fingerprint(other)
    assert fingerprint(logits.index_fill(1, torch.tensor([0]), 1.0)) != fingerprint(
        logits.index_fill(1, torch.tensor([1]), 1.0)
    )


def test_no_two_of_a_thousand_random_shards_have_the_same_facts() -> None:
    shards = torch.randn(1000, 3, 8, generator=torch.Generator().manual_seed(0)).add_(1000.0)
    assert len({tuple(fingerprint(shard)) for shard in shards}) == 1000


def test_a_shard_is_a_ranks_own_if_it_holds_a_target_or_if_its_row_has_one_value() -> None:
    logits = torch.randn(3, 8)
    words = [
        _shard_facts(one, owned, rank)[-1].item()
        for one, owned, rank in (
            (logits, FIRST_OWNS_ALL, 0),
            (logits, FIRST_OWNS_ALL, 1),
            (logits, NONE_OWNED, 1),
            (torch.full((3, 8), 2.5), NONE_OWNED, 1),
            (torch.full((3, 8), torch.nan), NONE_OWNED, 1),
        )
    ]
    assert words == [0.0, 1.0, 0.0, 1.0, 1.0]
