"""Inputs that no kernel has seen: other values, the same pattern; and what is not their honest result."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from runners.instruments.subject import Options, Subject, branches
from runners.instruments.unseen import fault_on, unseen
from runners.kernels.inputs import Inputs, make_inputs

ERRORS = {"lp_abs_max": 1e-6, "ent_abs_max": 1e-6, "g_row_rel_l2_max_lp": 1e-6, "g_row_rel_l2_max_ent": 1e-6}
DISTRIBUTIONS: tuple[Any, ...] = (
    "flat", "spread", "confident", "confident_wrong", "offset", "ties", "one_hot", "masked", "bf16_exact", "neg_inf"
)  # fmt: skip


def fault(subject: Subject, given: Inputs, seen: Inputs | None = None, mode: Any = "gradient") -> str | None:
    """Of what a subject gives on `seen`, taken for its result on `given`."""
    got = branches(subject, seen or given, Options(mode))
    assert got.g_log_prob is not None
    gradient = got.g_log_prob if got.g_entropy is None else got.g_log_prob + got.g_entropy
    return fault_on(given, Options(mode), log_prob=got.log_prob, entropy=got.entropy, gradient=gradient, errors=ERRORS)


def test_the_same_words_give_the_same_inputs_and_others_give_others() -> None:
    inputs = make_inputs(tokens=8, vocabulary=64, keep_mask=True)
    one, again, other = (unseen(inputs, draw).logits for draw in ("a", "a", "b"))
    assert torch.equal(one, again)
    assert not torch.isin(one, inputs.logits).any()
    assert not torch.isin(other, torch.cat((inputs.logits, one))).any()


@pytest.mark.parametrize(
    ("distribution", "dtype"),
    [*((each, torch.float32) for each in DISTRIBUTIONS), ("ties", torch.bfloat16), ("neg_inf", torch.bfloat16)],
)
def test_the_pattern_of_the_inputs_is_kept(distribution: Any, dtype: torch.dtype) -> None:
    inputs = make_inputs(tokens=8, vocabulary=64, dtype=dtype, distribution=distribution, keep_mask=True)
    other = unseen(inputs, "a")
    assert pattern(other) == pattern(inputs)
    assert other.logits.dtype == dtype
    assert other.logits.is_contiguous()


def pattern(inputs: Inputs) -> list[int]:
    assert inputs.keep_mask is not None
    at_target = inputs.keep_mask.gather(1, inputs.targets[:, None])
    greatest = inputs.logits.amax(1, keepdim=True)
    counted = (
        inputs.keep_mask,
        at_target,
        inputs.logits.isinf(),
        inputs.logits == greatest,
        inputs.logits.gather(1, inputs.targets[:, None]) == greatest,
        inputs.upstream_log_prob == 0,
        inputs.upstream_entropy == 0,
    )
    return [int(each.sum()) for each in counted]


@pytest.mark.parametrize("tokens", [0, 1, 8])
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_an_honest_result_has_no_fault(clean: Subject, distribution: Any, tokens: int) -> None:
    given = unseen(make_inputs(tokens=tokens, vocabulary=64, distribution=distribution), "a")
    assert fault(clean, given) is None
    assert fault(clean, given, mode="off") is None


@pytest.mark.parametrize("tokens", [1, 8])
def test_a_result_of_other_inputs_has_one(clean: Subject, tokens: int) -> None:
    inputs = make_inputs(tokens=tokens, vocabulary=64)
    given = unseen(inputs, "a")
    assert fault(clean, given, inputs) == "log_prob of inputs never seen before is not what they give"


def test_a_gradient_of_other_inputs_has_one(clean: Subject) -> None:
    given = unseen(make_inputs(tokens=8, vocabulary=64), "a")
    honest, stale = (branches(clean, one, Options("off")) for one in (given, unseen(given, "b")))
    found = fault_on(
        given, Options("off"), log_prob=honest.log_prob, entropy=None, gradient=stale.g_log_prob, errors=ERRORS
    )
    assert found == "the gradient of inputs never seen before is not what they give"


def test_a_kernel_that_is_imprecise_on_its_case_may_be_so_here(clean: Subject) -> None:
    given = unseen(make_inputs(tokens=8, vocabulary=64), "a")
    got = branches(clean, given, Options("off"))
    rough = replace(got, log_prob=got.log_prob * 1.2)

    def found(**errors: float) -> str | None:
        return fault_on(
            given, Options("off"), log_prob=rough.log_prob, entropy=None, gradient=got.g_log_prob, errors=errors
        )

    known = {"g_row_rel_l2_max_lp": 1e-6}
    assert found(lp_abs_max=1e-6, **known) is not None
    assert found(lp_abs_max=2.0, **known) is None
    assert found(**known) is None, "what is not finite on the case is not looked at"
