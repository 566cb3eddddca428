"""`online` over 2 and 4 gloo processes: against the oracle, against one process, and what its ranks say to each other.

One group of four is started for all combinations; its halves are the groups of two.
"""

import importlib.util
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from runners.kernels.reference import Reference, reference

RANK_PROGRAM = Path(__file__).parent / "online_gloo_rank.py"
ROOT = Path(__file__).parents[2]


def _load_rank_program() -> ModuleType:
    spec = importlib.util.spec_from_file_location("online_gloo_rank", RANK_PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


ranks: Any = _load_rank_program()
Results = dict[str, Any]
CASES = [
    pytest.param(tensor_parallel, combination, id=f"TP{tensor_parallel}-{'-'.join(map(str, combination))}")
    for tensor_parallel in ranks.TENSOR_PARALLEL
    for combination in ranks.COMBINATIONS
]


@pytest.fixture(scope="module")
def every_rank(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Results]]:
    """Each rank's results by (TP, combination)."""
    directory = tmp_path_factory.mktemp("gloo")
    paths = [directory / f"rank{rank}.pt" for rank in range(ranks.RANKS)]
    commands = [
        [sys.executable, str(RANK_PROGRAM), str(rank), str(directory / "rendezvous"), str(path)]
        for rank, path in enumerate(paths)
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    processes = [subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) for command in commands]
    try:
        errors = [process.communicate(timeout=240)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * ranks.RANKS, "\n".join(errors)
    return [torch.load(path) for path in paths]


def _joined(shards: list[Results]) -> Results:
    """The results of a group, gradients joined along the vocabulary."""
    gradients = {
        name: None if shards[0][name] is None else torch.cat([shard[name] for shard in shards], 1)
        for name in ("g_log_prob", "g_entropy")
    }
    return {**shards[0], **gradients}


@cache
def _oracle(combination: Any) -> Reference:
    inputs = ranks.combination_inputs(combination)
    return reference(
        inputs.logits,
        inputs.targets,
        upstream_log_prob=inputs.upstream_log_prob,
        upstream_entropy=inputs.upstream_entropy,
        keep_mask=inputs.keep_mask,
        temperature=combination.temperature,
    )


def _relative(gradient: torch.Tensor, truth: torch.Tensor) -> float:
    return ((gradient.double() - truth).norm() / truth.norm().clamp_min(2**-24)).item() if truth.numel() else 0.0


@pytest.mark.parametrize(("tensor_parallel", "combination"), CASES)
def test_outputs_and_gathered_gradients_are_the_oracles(
    tensor_parallel: int, combination: Any, every_rank: list[dict[Any, Results]]
) -> None:
    oracle = _oracle(combination)
    groups = [every_rank[start : start + tensor_parallel] for start in range(0, ranks.RANKS, tensor_parallel)]
    for group in groups:
        results = _joined([shard[tensor_parallel, combination] for shard in group])
        largest = 4e-6 if combination.distribution != "offset" else 2e-5
        assert torch.allclose(results["log_prob"].double(), oracle.log_prob, rtol=0, atol=largest)
        assert _relative(results["g_log_prob"], oracle.g_log_prob) <= 1e-6
        assert (results["entropy"] is None) == (combination.mode == "off")
        if combination.mode != "off":
            assert torch.allclose(results["entropy"].double(), oracle.entropy, rtol=0, atol=2e-6)
        if combination.mode == "gradient":
            assert _relative(results["g_entropy"], oracle.g_entropy) <= 1e-6


@pytest.mark.parametrize(("tensor_parallel", "combination"), CASES)
def test_every_rank_of_a_group_gives_the_same_bits(
    tensor_parallel: int, combination: Any, every_rank: list[dict[Any, Results]]
) -> None:
    shards = [results[tensor_parallel, combination] for results in every_rank]
    for name in ("log_prob", "entropy"):
        if shards[0][name] is not None:
            assert all(torch.equal(shard[name], shards[0][name]) for shard in shards[:tensor_parallel])


@pytest.mark.parametrize(("tensor_parallel", "combination"), CASES)
def test_two_collectives_carry_16_bytes_a_row_or_24_under_a_mask_and_28_more(
    tensor_parallel: int, combination: Any, every_rank: list[dict[Any, Results]]
) -> None:
    """One maximum a softmax, and what the ranks compare; then the target's logit, a sum a softmax and the entropy's
    weighted sum.
    """
    softmaxes = 2 if combination.keep_mask and combination.mode != "off" else 1
    sums = 1 + softmaxes + (combination.mode != "off")
    expected = [("RedOpType.MAX", 4 * softmaxes, 28), ("RedOpType.SUM", 4 * sums, 0)] if combination.tokens else []
    for results in every_rank:
        assert results[tensor_parallel, combination]["collectives"] == [
            (operation, row_bytes * combination.tokens + call_bytes) for operation, row_bytes, call_bytes in expected
        ]
