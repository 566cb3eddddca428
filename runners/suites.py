"""The named sets of cases, readable top to bottom. What a case is: service.wire.Case."""

import hashlib
from itertools import product

from service.catalogue import METRICS
from service.wire import Case, EntropyMode

_MODES: tuple[EntropyMode, ...] = ("off", "value", "gradient")


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
}


def suite(name: str) -> tuple[Case, ...]:
    """The cases of a suite; KeyError's message names the known suites."""
    if name not in SUITES:
        raise KeyError(f"unknown suite {name!r}; known are {', '.join(sorted(SUITES))}")
    return SUITES[name]


def suite_digest(name: str) -> str:
    """SHA-256 of what a suite asks: its cases, and the metrics that are known. KeyError as in `suite`."""
    asked = [*sorted(case.id for case in suite(name)), *sorted(metric.name for metric in METRICS)]
    return hashlib.sha256("\n".join(asked).encode()).hexdigest()
