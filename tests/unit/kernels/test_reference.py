"""The oracle against plain maths, and against float64 autograd where that has no special cases."""

import ast
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from runners.kernels import reference as module
from runners.kernels.inputs import Distribution, Inputs, make_inputs
from runners.kernels.reference import Reference, reference


def _reference(inputs: Inputs, temperature: float = 1.0) -> Reference:
    return reference(
        inputs.logits,
        inputs.targets,
        upstream_log_prob=inputs.upstream_log_prob,
        upstream_entropy=inputs.upstream_entropy,
        keep_mask=inputs.keep_mask,
        temperature=temperature,
    )


def test_a_row_worked_out_by_hand() -> None:
    # p = (1/2, 1/4, 1/4): ln p = -(1, 2, 2) ln 2, H = 3/2 ln 2.
    logits = torch.tensor([[2.0, 1.0, 1.0]], dtype=torch.float64) * math.log(2)
    upstream = torch.tensor([2.0])
    result = reference(logits, torch.tensor([1]), upstream_log_prob=upstream, upstream_entropy=upstream)
    assert result.log_prob.item() == pytest.approx(-2 * math.log(2), rel=1e-14)
    assert result.entropy.item() == pytest.approx(1.5 * math.log(2), rel=1e-14)
    assert result.g_log_prob.tolist()[0] == pytest.approx([-1.0, 1.5, -0.5], rel=1e-14)
    assert result.g_entropy.tolist()[0] == pytest.approx(
        [-0.5 * math.log(2), 0.25 * math.log(2), 0.25 * math.log(2)], rel=1e-14
    )


@pytest.mark.parametrize("distribution", ["flat", "spread", "masked", "ties"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_it_agrees_with_float64_autograd(distribution: Distribution, temperature: float) -> None:
    inputs = make_inputs(tokens=9, vocabulary=70, distribution=distribution, keep_mask=True)
    result = _reference(inputs, temperature)
    for name, upstream in (("log_prob", inputs.upstream_log_prob), ("entropy", inputs.upstream_entropy)):
        x = inputs.logits.double().requires_grad_()
        value = _textbook(x / temperature, inputs)[name]
        value.backward(upstream.double())
        assert torch.allclose(getattr(result, name), value.detach(), rtol=1e-13, atol=1e-13)
        assert x.grad is not None
        assert torch.allclose(getattr(result, f"g_{name}"), x.grad, rtol=1e-12, atol=1e-14)


def _textbook(z: torch.Tensor, inputs: Inputs) -> dict[str, torch.Tensor]:
    assert inputs.keep_mask is not None
    kept = inputs.keep_mask | (torch.arange(z.shape[1]) == inputs.targets[:, None])
    p = z.exp() / z.exp().sum(1, keepdim=True)
    kept_sum = (z.exp() * kept).sum(1)
    return {
        "log_prob": z[torch.arange(z.shape[0]), inputs.targets] - kept_sum.log(),
        "entropy": -(p * p.log()).sum(1),
    }


def test_entries_of_probability_zero_contribute_zero() -> None:
    inputs = make_inputs(tokens=16, vocabulary=50, distribution="neg_inf")
    result = _reference(inputs)
    smaller = inputs.logits[1:2][:, torch.isfinite(inputs.logits[1])]
    alone = reference(
        smaller,
        torch.zeros(1, dtype=torch.int64),
        upstream_log_prob=torch.ones(1),
        upstream_entropy=inputs.upstream_entropy[1:2],
    )
    assert torch.allclose(result.entropy[1], alone.entropy[0], rtol=1e-14)
    assert torch.allclose(result.g_entropy[1][torch.isfinite(inputs.logits[1])], alone.g_entropy[0], rtol=1e-12)
    impossible = torch.isneginf(inputs.logits)
    assert (result.g_entropy[impossible] == 0).all()
    assert (result.g_log_prob[impossible] == 0).all()


def test_rows_without_an_upstream_have_a_zero_gradient_whatever_their_logits() -> None:
    inputs = make_inputs(tokens=8, vocabulary=5)
    inputs.logits[0] = torch.nan
    result = _reference(inputs)
    assert inputs.upstream_log_prob[0] == inputs.upstream_entropy[0] == 0
    assert (result.g_log_prob[0] == 0).all()
    assert (result.g_entropy[0] == 0).all()


def test_low_precision_logits_are_taken_as_they_are() -> None:
    exact = make_inputs(tokens=4, vocabulary=33, distribution="bf16_exact")
    rounded = make_inputs(tokens=4, vocabulary=33, distribution="bf16_exact", dtype=torch.bfloat16)
    assert torch.equal(_reference(exact).g_entropy, _reference(rounded).g_entropy)


def test_blocks_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make_inputs(tokens=7, vocabulary=40, keep_mask=True)
    whole = _reference(inputs)
    monkeypatch.setattr(module, "_BLOCK_ELEMENTS", 100)
    blocked = _reference(inputs)
    assert torch.equal(whole.g_log_prob, blocked.g_log_prob)
    assert torch.equal(whole.g_entropy, blocked.g_entropy)


def test_no_rows_give_empty_results() -> None:
    result = _reference(make_inputs(tokens=0, vocabulary=5))
    assert result.log_prob.shape == (0,)
    assert result.g_entropy.shape == (0, 5)


def test_it_imports_torch_and_the_standard_library_only() -> None:
    tree = ast.parse(Path(module.__file__).read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported == {"dataclasses", "torch"}


def test_the_largest_precision_case_fits_in_two_gibibytes() -> None:
    program = """
import resource
from runners.kernels.inputs import make_inputs
from runners.kernels.reference import reference
inputs = make_inputs(tokens=64, vocabulary=262144)
reference(inputs.logits, inputs.targets, upstream_log_prob=inputs.upstream_log_prob,
          upstream_entropy=inputs.upstream_entropy)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(result.stdout) < 2 << 30
