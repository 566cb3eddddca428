"""`fused` against the pair it replaced, on one process and on two gloo processes, and both against the oracle.

One group is started for all combinations. Tolerances are the fused kernel's own project's, on its fixture sizes;
log-prob and entropy backward are compared apart.
"""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from runners.kernels.inputs import make_inputs
from runners.kernels.reference import Reference, reference
from runners.kernels.registry import kernel
from service.detection.gates import GateFacts, gate_limit, tensor_parallel_limit

RANK_PROGRAM = Path(__file__).parent / "kernels_gloo_rank.py"
ROOT = Path(__file__).parents[2]
WORLD_SIZE = 2


def _load_rank_program() -> ModuleType:
    spec = importlib.util.spec_from_file_location("kernels_gloo_rank", RANK_PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


ranks: Any = _load_rank_program()
Results = dict[str, Any]
# (combination, TP) -> results over the whole vocabulary
Lookup = Callable[[Any, int], Results]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Results]]:
    """Each rank's results of every combination, from one group of two processes."""
    directory = tmp_path_factory.mktemp("gloo")
    commands = [
        [sys.executable, str(RANK_PROGRAM), str(rank), str(WORLD_SIZE), str(directory / "rendezvous"), str(path)]
        for rank, path in enumerate(_result_files(directory))
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    processes = [subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) for command in commands]
    try:
        errors = [process.communicate(timeout=240)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * WORLD_SIZE, "\n".join(errors)
    return [torch.load(path) for path in _result_files(directory)]


def _result_files(directory: Path) -> list[Path]:
    return [directory / f"rank{rank}.pt" for rank in range(WORLD_SIZE)]


@cache
def _whole(combination: Any) -> Results:
    """The results on this process alone."""
    return dict(ranks.run_combination(combination, ranks.combination_inputs(combination), None))


@pytest.fixture
def lookup(shards: list[dict[Any, Results]]) -> Lookup:
    """Results of a combination; those of two ranks joined along the vocabulary."""

    def look(combination: Any, tensor_parallel: int) -> Results:
        if tensor_parallel == 1:
            return _whole(combination)
        first, second = (shard[combination] for shard in shards)
        joined = dict(first)
        for name in ("g_log_prob", "g_entropy"):
            joined[name] = None if first[name] is None else torch.cat((first[name], second[name]), 1)
        return joined

    return look


def _largest(one: torch.Tensor, other: torch.Tensor) -> float:
    return (one.double() - other.double()).abs().max().item()


def _relative(one: torch.Tensor, other: torch.Tensor) -> float:
    return ((one.double() - other).norm() / other.norm()).item()


def _rounded(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.bfloat16()


PARITY = list(product(ranks.FIXTURES, ranks.CHUNK_SIZES, ranks.MASKS, ranks.MODES, (1, 2)))


@pytest.mark.parametrize(("fixture", "chunk_size", "mask", "mode", "tensor_parallel"), PARITY)
def test_fused_and_legacy_agree(
    fixture: tuple[int, int], chunk_size: int | None, mask: bool, mode: str, tensor_parallel: int, lookup: Lookup
) -> None:
    fused, legacy, legacy_bf16 = (
        lookup((name, fixture, chunk_size, mask, mode), tensor_parallel) for name in ranks.NAMES
    )
    assert _largest(fused["log_prob"], legacy["log_prob"]) <= 1e-8
    assert _largest(fused["g_log_prob"], legacy["g_log_prob"]) <= 1e-8
    assert _largest(_rounded(fused["g_log_prob"]), _rounded(legacy_bf16["g_log_prob"])) <= 1e-8
    assert torch.equal(legacy_bf16["g_log_prob"], _rounded(legacy_bf16["g_log_prob"]).float())
    assert not torch.equal(legacy["g_log_prob"], legacy_bf16["g_log_prob"])
    assert (fused["entropy"] is None) == (legacy["entropy"] is None) == (mode == "off")
    if mode != "off":
        assert _largest(fused["entropy"], legacy["entropy"]) <= 1e-4
    if mode == "gradient":
        assert _largest(fused["g_entropy"], legacy["g_entropy"]) <= 1e-6
        assert (fused["g_entropy"] != 0).any()


@pytest.mark.parametrize("combination", ranks.COMBINATIONS, ids=str)
def test_every_rank_gives_the_same_outputs(combination: Any, shards: list[dict[Any, Results]]) -> None:
    first, second = (shard[combination] for shard in shards)
    assert torch.equal(first["log_prob"], second["log_prob"])
    assert first["entropy"] is None or torch.equal(first["entropy"], second["entropy"])


@cache
def _oracle(mask: bool) -> tuple[Any, Reference]:
    inputs = ranks.combination_inputs(("fused", ranks.REAL_SIZE, None, mask, "gradient"))
    return inputs, reference(
        inputs.logits,
        inputs.targets,
        upstream_log_prob=inputs.upstream_log_prob,
        upstream_entropy=inputs.upstream_entropy,
        keep_mask=inputs.keep_mask,
    )


@pytest.mark.parametrize("name", ["fused", "legacy"])
@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_at_a_real_size_outputs_and_gradients_are_the_oracles(
    name: str, mask: bool, tensor_parallel: int, lookup: Lookup
) -> None:
    inputs, oracle = _oracle(mask)
    results = lookup((name, ranks.REAL_SIZE, None, mask, "gradient"), tensor_parallel)
    facts = GateFacts(
        distribution="flat", logits_abs_max=inputs.logits.abs().max().item(), vocabulary=ranks.REAL_SIZE[1]
    )
    errors = {
        "lp_abs_max": _largest(results["log_prob"], oracle.log_prob),
        "ent_abs_max": _largest(results["entropy"], oracle.entropy),
        "g_rel_l2_lp": _relative(results["g_log_prob"], oracle.g_log_prob),
    }
    limits = {metric: gate_limit(metric, facts) or 0.0 for metric in errors}
    assert {metric: error for metric, error in errors.items() if error > limits[metric]} == {}
    assert _relative(results["g_entropy"], oracle.g_entropy) <= 1e-6


@pytest.mark.parametrize("name", ["fused", "legacy"])
def test_two_ranks_move_a_result_no_more_than_ten_times_its_reorder_noise(name: str, lookup: Lookup) -> None:
    combination = (name, ranks.REAL_SIZE, None, False, "gradient")
    whole, split = lookup(combination, 1), lookup(combination, 2)
    inputs = ranks.combination_inputs(combination)
    order = torch.randperm(inputs.logits.shape[1], generator=torch.Generator().manual_seed(1))
    log_prob, entropy = kernel(name).run(inputs.logits[:, order], order.argsort()[inputs.targets])
    assert entropy is not None
    assert _largest(whole["log_prob"], split["log_prob"]) <= tensor_parallel_limit(
        _largest(whole["log_prob"], log_prob)
    )
    assert _largest(whole["entropy"], split["entropy"]) <= tensor_parallel_limit(_largest(whole["entropy"], entropy))


def test_no_tokens_work_on_two_ranks(shards: list[dict[Any, Results]]) -> None:
    for shard in shards:
        assert shard["empty"]["log_prob"].shape == (0,)
        assert shard["empty"]["g_entropy"].shape == (0, 2)


def test_the_fixtures_hold_targets_of_both_ranks() -> None:
    for tokens, vocabulary in ranks.FIXTURES:
        targets = make_inputs(tokens=tokens, vocabulary=vocabulary, distribution="flat", seed=7).targets
        assert (targets < vocabulary // 2).any()
        assert (targets >= vocabulary // 2).any()
