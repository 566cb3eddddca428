"""The absolute gates: their limits, the kernels within them at real sizes, and faults outside them."""

import dataclasses
from collections.abc import Callable
from functools import cache, lru_cache
from typing import get_args

import pytest
import torch

from runners.kernels.contract import Kernel
from runners.kernels.inputs import Distribution, Inputs, make_inputs
from runners.kernels.reference import Reference, reference
from runners.kernels.registry import KERNELS, kernel
from service.catalogue import BY_NAME, METRICS
from service.detection.gates import (
    BF16_SHARE,
    BF16_ULPS,
    GateFacts,
    bfloat16_disagreement,
    gate_limit,
    tensor_parallel_limit,
    ulp32,
)

TOKENS = 64
# Every distribution at a vocabulary that is no multiple of anything.
SIZES: list[tuple[Distribution, int]] = [
    ("flat", 32768),
    ("spread", 32768),
    *((distribution, 32769) for distribution in get_args(Distribution)),
]
RUNNABLE = [known for known in KERNELS if known.missing is None and known.name not in ("compiled", "cut_cross_entropy")]


def _is_gated(subject: Kernel, distribution: str) -> bool:
    """Not the peer, which others are compared with, nor CPU log_softmax where it drops small terms."""
    return subject.name != "peer" and not (subject.name == "eager" and distribution in subject.contract.inaccurate_on)


# Kernels innermost, so that a case's oracle is computed once and kept for a moment only.
GATED = [
    pytest.param(subject, *size, id=f"{subject.name}-{size[0]}-{size[1]}")
    for size in SIZES
    for subject in RUNNABLE
    if _is_gated(subject, size[0])
]
GATED_BF16 = [
    pytest.param(subject, *size, id=f"{subject.name}-{size[0]}-{size[1]}")
    for size in SIZES
    for subject in RUNNABLE
    if subject.contract.gradient == "bfloat16"
]


@lru_cache(maxsize=2)
def _case(distribution: Distribution, vocabulary: int) -> tuple[Inputs, Reference]:
    inputs = make_inputs(tokens=TOKENS, vocabulary=vocabulary, distribution=distribution)
    return inputs, reference(
        inputs.logits,
        inputs.targets,
        upstream_log_prob=inputs.upstream_log_prob,
        upstream_entropy=inputs.upstream_entropy,
        keep_mask=inputs.keep_mask,
    )


@cache
def _measured(name: str, distribution: Distribution, vocabulary: int) -> dict[str, float]:
    """The gated metrics of a kernel, the log-prob's gradient alone."""
    inputs, oracle = _case(distribution, vocabulary)
    logits = inputs.logits.detach().requires_grad_()
    log_prob, entropy = kernel(name).run(logits, inputs.targets, keep_mask=inputs.keep_mask)
    assert entropy is not None
    (gradient,) = torch.autograd.grad(log_prob, logits, inputs.upstream_log_prob)
    return {
        "lp_abs_max": (log_prob - oracle.log_prob).abs().max().item(),
        "ent_abs_max": (entropy - oracle.entropy).abs().max().item(),
        **_gradient_metrics(gradient, inputs, oracle),
    }


def _gradient_metrics(gradient: torch.Tensor, inputs: Inputs, oracle: Reference) -> dict[str, float]:
    least = inputs.upstream_log_prob.double().abs() * 2**-24
    at_target = oracle.g_log_prob.gather(1, inputs.targets[:, None])[:, 0]
    error_at_target = (gradient.gather(1, inputs.targets[:, None])[:, 0] - at_target).abs()
    nonzero = gradient[gradient != 0]
    exact = gradient.double()
    return {
        "g_rel_l2_lp": ((exact - oracle.g_log_prob).norm() / oracle.g_log_prob.norm()).item(),
        "g_bf16_grid": ((nonzero.view(torch.int32) & 0xFFFF) == 0).double().mean().item(),
        "g_zero_sum_lp": _worst(exact.sum(1).abs(), exact.abs().sum(1), least),
        "g_tgt_rel_max": _worst(error_at_target, at_target.abs(), least),
    }


def _worst(errors: torch.Tensor, sizes: torch.Tensor, least: torch.Tensor) -> float:
    """The greatest quotient over rows with an upstream."""
    live = least > 0
    return (errors[live] / torch.maximum(sizes, least)[live]).max().item()


def _facts(distribution: Distribution, vocabulary: int) -> GateFacts:
    logits = _case(distribution, vocabulary)[0].logits
    return GateFacts(
        distribution=distribution,
        logits_abs_max=logits[torch.isfinite(logits)].abs().max().item(),
        vocabulary=vocabulary,
        peer_target_error=_measured("peer", distribution, vocabulary)["g_tgt_rel_max"],
    )


def _broken(values: dict[str, float], facts: GateFacts, subject: Kernel) -> dict[str, tuple[float, float]]:
    """The gates that do not hold: metric -> (value, limit)."""
    contract = subject.contract
    limits = {
        name: gate_limit(name, facts, gradient=contract.gradient, widened=contract.widened_gates) for name in values
    }
    return {
        name: (values[name], limit) for name, limit in limits.items() if limit is not None and not values[name] <= limit
    }


@pytest.mark.parametrize(("subject", "distribution", "vocabulary"), GATED)
def test_every_kernel_is_within_its_gates(subject: Kernel, distribution: Distribution, vocabulary: int) -> None:
    values = _measured(subject.name, distribution, vocabulary)
    assert _broken(values, _facts(distribution, vocabulary), subject) == {}


@pytest.mark.parametrize(("subject", "distribution", "vocabulary"), GATED_BF16)
def test_a_bfloat16_gradient_is_the_oracles_rounded(
    subject: Kernel, distribution: Distribution, vocabulary: int
) -> None:
    inputs, oracle = _case(distribution, vocabulary)
    logits = inputs.logits.detach().requires_grad_()
    log_prob, _ = subject.run(logits, inputs.targets, keep_mask=inputs.keep_mask, with_entropy=False)
    (gradient,) = torch.autograd.grad(log_prob, logits, inputs.upstream_log_prob)
    share, ulps = bfloat16_disagreement(gradient.numpy(), oracle.g_log_prob.numpy())
    assert share <= BF16_SHARE
    assert ulps <= BF16_ULPS


FAULTS: dict[str, Callable[[torch.Tensor, Inputs], torch.Tensor]] = {
    "a bfloat16 cast": lambda gradient, _: gradient.bfloat16().float(),
    "a target column in bfloat16": lambda gradient, inputs: gradient.scatter(
        1, inputs.targets[:, None], gradient.gather(1, inputs.targets[:, None]).bfloat16().float()
    ),
    "half of the columns missing": lambda gradient, _: torch.cat(
        (gradient[:, :16384], torch.zeros_like(gradient[:, 16384:])), 1
    ),
    "divided by N": lambda gradient, _: gradient / TOKENS,
}
SIGNALS: list[tuple[str, Distribution, set[str]]] = [
    ("a bfloat16 cast", "flat", {"g_rel_l2_lp", "g_bf16_grid", "g_zero_sum_lp"}),
    ("a target column in bfloat16", "confident", {"g_tgt_rel_max"}),
    ("half of the columns missing", "spread", {"g_zero_sum_lp"}),
    ("divided by N", "flat", {"g_rel_l2_lp"}),
]


@pytest.mark.parametrize(("fault", "distribution", "signals"), SIGNALS)
def test_a_fault_breaks_its_gates(fault: str, distribution: Distribution, signals: set[str]) -> None:
    inputs, oracle = _case(distribution, 32768)
    gradient = FAULTS[fault](oracle.g_log_prob.float(), inputs)
    broken = _broken(_gradient_metrics(gradient, inputs, oracle), _facts(distribution, 32768), kernel("fused"))
    assert signals <= set(broken)


def test_a_gate_needs_its_metric_its_distribution_and_its_contract() -> None:
    facts = GateFacts(distribution="flat", logits_abs_max=4.0, vocabulary=32768)
    assert gate_limit("g_rel_l2_lp", facts) == 1e-6
    assert gate_limit("g_rel_l2_lp", facts, widened=8.0) == 8e-6
    assert gate_limit("g_rel_l2_lp", facts, gradient="bfloat16") is None
    assert gate_limit("g_rel_l2_lp", dataclasses.replace(facts, distribution="spread")) is None
    assert gate_limit("step_peak_bytes", facts) is None
    assert {"lp_abs_max", "ent_abs_max", "g_rel_l2_lp", "g_bf16_grid", "g_zero_sum_lp", "g_tgt_rel_max"} <= set(BY_NAME)


def test_output_limits_follow_the_size_of_the_logits_and_of_the_vocabulary() -> None:
    small = GateFacts(distribution="flat", logits_abs_max=1.0, vocabulary=32768)
    assert gate_limit("lp_abs_max", small) == pytest.approx(2 * 2**-20 + 1e-6)  # ln V = 10.4
    assert gate_limit("ent_abs_max", small) == pytest.approx(8 * 2**-23 + 2e-5)
    large = dataclasses.replace(small, logits_abs_max=1000.0)
    assert gate_limit("lp_abs_max", large) == pytest.approx(2 * 2**-14 + 1e-6)


def test_the_target_gate_follows_the_peer_above_its_floor() -> None:
    facts = GateFacts(distribution="confident", logits_abs_max=1.0, vocabulary=10, peer_target_error=1e-3)
    assert gate_limit("g_tgt_rel_max", facts) == 4e-3
    assert gate_limit("g_tgt_rel_max", dataclasses.replace(facts, peer_target_error=1e-6)) == 1e-4


@pytest.mark.parametrize("value", [0.0, 1e-45, 1e-39, 2**-126, 0.75, 1.0, -1.5, 1000.0])
def test_ulp32_is_the_gap_to_the_next_float32(value: float) -> None:
    single = torch.tensor(abs(value))
    assert ulp32(value) == (torch.nextafter(single, torch.tensor(torch.inf)).double() - single.double()).item()


def test_bfloat16_disagreement_counts_elements_and_ulps_across_zero() -> None:
    one = torch.tensor([1.0, 2.0, 0.0, 3.0]).numpy()
    other = torch.tensor([1.0, 2.0 + 2**-6, -0.0, 3.0 + 2**-20], dtype=torch.float64).numpy()
    assert bfloat16_disagreement(one, other) == (0.25, 1)
    tiny = torch.tensor([2.0**-133]).numpy()
    assert bfloat16_disagreement(tiny, -tiny) == (1.0, 2)
    assert bfloat16_disagreement(one[:0], other[:0]) == (0.0, 0)


def test_bfloat16_rounding_is_torchs() -> None:
    values = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    assert bfloat16_disagreement(values.numpy(), values.bfloat16().float().numpy()) == (0.0, 0)


def test_a_tensor_parallel_result_may_move_ten_times_the_reorder_noise() -> None:
    assert tensor_parallel_limit(1e-6) == pytest.approx(1e-5)


def test_the_catalogue_names_the_gate_of_every_metric_that_has_one() -> None:
    named = {metric.name for metric in METRICS if metric.gate and not metric.name.startswith("tp_delta")}
    kinds = [GateFacts(distribution, 1.0, 1024) for distribution in get_args(Distribution)]
    assert named == {metric.name for metric in METRICS if any(gate_limit(metric.name, facts) for facts in kinds)}
