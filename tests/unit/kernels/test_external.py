"""The baselines out of other packages: right where they can run, and a plain word where they cannot."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from runners.kernels import cut_cross_entropy, external, liger, megatron
from runners.kernels.external import External
from runners.kernels.inputs import make_inputs
from runners.kernels.reference import reference
from runners.kernels.registry import kernel

ROOT = Path(__file__).parents[3]
EXTERNALS = (megatron.FUSED, megatron.UNFUSED, liger.LIGER, cut_cross_entropy.CUT_CROSS_ENTROPY)


def errors(baseline: External) -> list[tuple[float, float]]:
    """Worst log-prob error in nats and relative L2 error of its gradient, for a few kinds of inputs."""
    found = []
    for distribution, keep_mask in (("flat", False), ("spread", True), ("neg_inf", True)):
        inputs: Any = make_inputs(tokens=5, vocabulary=33, distribution=distribution, keep_mask=keep_mask)  # type: ignore[arg-type]
        logits = inputs.logits.clone().requires_grad_()
        options = {"keep_mask": inputs.keep_mask, "temperature": 0.7}
        log_prob, _ = external.run(logits, inputs.targets, **options, external=baseline)
        (gradient,) = torch.autograd.grad(log_prob, logits, inputs.upstream_log_prob)
        assert torch.equal(logits, inputs.logits)
        upstreams = {"upstream_log_prob": inputs.upstream_log_prob, "upstream_entropy": inputs.upstream_entropy}
        oracle = reference(inputs.logits, inputs.targets, **options, **upstreams)
        error = float((gradient - oracle.g_log_prob).norm() / oracle.g_log_prob.norm())
        found.append((float((log_prob.detach() - oracle.log_prob).abs().max()), error))
    return found


def assert_small(found: list[tuple[float, float]]) -> None:
    """As float32 forms ought to be."""
    assert len(found) == 3
    assert max(log_prob for log_prob, _ in found) <= 1e-5
    assert max(gradient for _, gradient in found) <= 2e-7


@pytest.mark.timeout(600)
@pytest.mark.skipif(kernel("cut_cross_entropy").missing is not None, reason=str(kernel("cut_cross_entropy").missing))
def test_the_linear_cross_entropy_of_the_identity_and_the_logits_is_right() -> None:
    assert_small(errors(cut_cross_entropy.CUT_CROSS_ENTROPY))


@pytest.mark.skipif(not external._is_installed("liger_kernel"), reason=str(liger.LIGER.missing()))
def test_ligers_cross_entropy_is_right_in_tritons_interpreter() -> None:
    code = (
        "import json, sys; sys.path.insert(0, 'tests/unit/kernels'); import test_external as t; "
        "print(json.dumps(t.errors(t.liger.LIGER)))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        cwd=ROOT,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=240,
    )
    assert_small([(log_prob, gradient) for log_prob, gradient in json.loads(done.stdout)])


@pytest.mark.skipif(kernel("megatron_unfused").missing is not None, reason=str(kernel("megatron_unfused").missing))
def test_the_unfused_megatron_leaves_the_parallel_state_as_it_was() -> None:
    assert_small(errors(megatron.UNFUSED))
    parallel_state, _ = megatron._unfused()
    assert parallel_state.get_tensor_model_parallel_group(check_initialized=False) is None


@pytest.mark.parametrize("baseline", EXTERNALS, ids=lambda each: each.name)
def test_a_missing_package_is_named_with_its_version(baseline: External, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external.importlib.util, "find_spec", lambda _: None)
    distribution = baseline.requirement.split()[-1]
    missing = f"{baseline.name} needs {distribution.partition('==')[0]}, which is not installed: pip install "
    found = baseline.kernel().missing
    assert found is not None
    assert found.startswith(missing)
    assert found.endswith(distribution)
    with pytest.raises(ModuleNotFoundError, match="which is not installed"):
        external.run(torch.zeros(1, 4), torch.zeros(1, dtype=torch.int64), external=baseline)


def test_liger_without_a_device_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external.importlib.util, "find_spec", lambda _: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(
        RuntimeError, match=r"^liger needs a CUDA device, or TRITON_INTERPRET=1: its kernels are Triton's$"
    ):
        external.run(torch.zeros(1, 4), torch.zeros(1, dtype=torch.int64), external=liger.LIGER)


@pytest.mark.parametrize("baseline", EXTERNALS, ids=lambda each: each.name)
def test_the_pinned_version_is_that_of_the_extra_and_of_the_constraints(baseline: External) -> None:
    requirement = baseline.requirement.split()[-1]
    assert f'"{requirement}' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8").lower().replace("_", "-").split()
    assert requirement in constraints


def test_a_baseline_on_one_rank_refuses_a_group() -> None:
    class TwoRanks:
        def size(self) -> int:
            return 2

    group: Any = TwoRanks()
    for baseline in EXTERNALS:
        if not baseline.contract.tensor_parallel:
            with pytest.raises(ValueError, match=f"group has 2 ranks: {baseline.name} needs the whole vocabulary"):
                external.run(torch.zeros(1, 4), torch.tensor([7]), group=group, external=baseline)
