"""The named sets of cases, readable top to bottom. What a case is: service.wire.Case."""

import hashlib
from itertools import product
from typing import Any, get_args

from service.catalogue import METRICS
from service.wire import Case, Distribution, Dtype, EntropyMode

_MODES: tuple[EntropyMode, ...] = ("off", "value", "gradient")
_DTYPES: tuple[Dtype, ...] = ("float32", "bfloat16")


def _grid(tokens: tuple[int, ...], vocabularies: tuple[int, ...]) -> tuple[Case, ...]:
    """Every size in every entropy mode."""
    return tuple(Case(tokens=n, vocabulary=v, entropy=mode) for n, v, mode in product(tokens, vocabularies, _MODES))


def _variants(tokens: int, vocabulary: int) -> tuple[Case, ...]:
    """Keep-mask, chunking, bfloat16 and temperature at one size."""
    size = Case(tokens=tokens, vocabulary=vocabulary)
    return (
        size.model_copy(update={"keep_mask": True}),
        size.model_copy(update={"chunk_size": max(1, tokens // 4)}),
        size.model_copy(update={"dtype": "bfloat16"}),
        size.model_copy(update={"temperature": 0.7}),
    )


# What random logits with random upstream gradients hide, in half a second a commit: pad columns of a vocabulary
# that is no multiple of a tile; entries of probability zero; the target column where its gradient is 1 - p; sums that
# are not shift-invariant; upstream gradients read as one; chunks that cost memory although the entropy is only a value.
_TELLING = (
    Case(tokens=16, vocabulary=1025, distribution="flat"),
    Case(tokens=16, vocabulary=1000, distribution="neg_inf"),
    Case(tokens=16, vocabulary=1024, distribution="confident"),
    Case(tokens=16, vocabulary=1000, distribution="offset"),
    Case(tokens=16, vocabulary=1000, upstream="one_row"),
    Case(tokens=16, vocabulary=1000, entropy="value", chunk_size=4),
)

_DISTRIBUTIONS = get_args(Distribution)
# Vocabularies of models in use; the odd ones are no multiple of a tile, and few divide by 8 ranks.
_LARGE = (128256, 151936, 262144)
_ODD = (50257, 100278, 129920, 262208)


def _shards(case: Case, ranks: tuple[int, ...]) -> tuple[Case, ...]:
    """The part of the case that one rank of so many holds, as a vocabulary of its own: one device needs no others."""
    return tuple(case.model_copy(update={"vocabulary": case.vocabulary // count}) for count in ranks)


_SMOKE_MODES: tuple[dict[str, Any], ...] = (*({"entropy": mode} for mode in _MODES), {"keep_mask": True})


def _parallel(ranks: int) -> tuple[Case, ...]:
    """What ranks may get wrong between them."""
    size = Case(tokens=64, vocabulary=32768, tensor_parallel=ranks)
    asked: tuple[dict[str, Any], ...] = (
        *({"entropy": mode} for mode in _MODES),
        {"keep_mask": True},
        {"chunk_size": 16},
        {"dtype": "bfloat16"},
        {"temperature": 0.7},
        *({"distribution": name} for name in ("flat", "masked", "neg_inf", "offset", "confident_wrong")),
    )
    return tuple(size.model_copy(update=each) for each in asked)


SUITES: dict[str, tuple[Case, ...]] = {
    # A few seconds a commit: what `ulpwatch demo` runs.
    "demo": (
        *_grid((64,), (4096,)),
        Case(tokens=7, vocabulary=1000),
        Case(tokens=32, vocabulary=4097, keep_mask=True),
        Case(tokens=32, vocabulary=4096, chunk_size=8),
        *_TELLING,
    ),
    # Under a minute a commit on two cores.
    "quick": (
        *_grid((1, 7, 64, 256), (1000, 4096, 32768, 32769)),
        *_variants(7, 4096),
        *_variants(64, 32768),
        *_TELLING,
    ),
    # The fewest and smallest cases on which every seeded fault shows (runners/kernels/faults/table.py): an odd
    # vocabulary, a first row without upstream gradient, a likely target, a mask, several chunks, each entropy mode.
    "selftest": (
        Case(tokens=16, vocabulary=1000, distribution="flat"),
        Case(tokens=16, vocabulary=1024, distribution="confident"),
        Case(tokens=16, vocabulary=1000, keep_mask=True, chunk_size=9),
        Case(tokens=16, vocabulary=1000, keep_mask=True, entropy="value", distribution="ties"),
        Case(tokens=16, vocabulary=1000, entropy="off", upstream="one_row"),
        Case(tokens=16, vocabulary=1000, dtype="bfloat16", distribution="bf16_exact"),
    ),
    # The same for the faults that only several ranks have.
    "selftest_parallel": (Case(tokens=16, vocabulary=1000, tensor_parallel=2),),
    # CPU, some minutes: every distribution at vocabularies of models, log-prob alone and both gradients.
    "precision": tuple(
        Case(tokens=64, vocabulary=v, distribution=distribution, entropy=mode)
        for v, distribution, mode in product((128256, 129920, 151936, 262144), _DISTRIBUTIONS, ("off", "gradient"))
    ),
    # CPU, over 2 and 4 gloo processes.
    "parallel": (*_parallel(2), *_parallel(4)),
    # CUDA, about three minutes: whole, and one rank's shard of 8.
    "smoke": tuple(
        shard.model_copy(update=mode)
        for n, dtype in product((1024, 8192), _DTYPES)
        for shard in _shards(Case(tokens=n, vocabulary=151936, dtype=dtype), (1, 8))
        for mode in _SMOKE_MODES
    ),
    # CUDA, every night: one rank's shard of 1, 2, 4 and 8, as trainers hold them. Several devices are not measured yet.
    "core": tuple(
        shard
        for n, v in product((2048, 4096, 8192, 16384, 32768), _LARGE)
        for shard in _shards(Case(tokens=n, vocabulary=v, dtype="bfloat16"), (1, 2, 4, 8))
    ),
    # CUDA: sizes that no tile, warp or vector divides.
    "odd": tuple(
        Case(tokens=n, vocabulary=v, dtype=dtype) for n, v, dtype in product((1, 7, 1937, 4097), _ODD, _DTYPES)
    ),
    # CUDA, every week: beyond 2^31 and 2^32 elements.
    "huge": tuple(Case(tokens=n, vocabulary=151936, dtype="bfloat16") for n in (16384, 32768)),
}
NEEDS_CUDA = frozenset({"smoke", "core", "odd", "huge"})
"""Suites whose cases are too large for a CPU."""


def suite(name: str) -> tuple[Case, ...]:
    """The cases of a suite; KeyError's message names the known suites."""
    if name not in SUITES:
        raise KeyError(f"unknown suite {name!r}; known are {', '.join(sorted(SUITES))}")
    return SUITES[name]


def suite_digest(name: str) -> str:
    """SHA-256 of what a suite asks: its cases, and the metrics that are known. KeyError as in `suite`."""
    asked = [*sorted(case.id for case in suite(name)), *sorted(metric.name for metric in METRICS)]
    return hashlib.sha256("\n".join(asked).encode()).hexdigest()
