"""Cases that are split over ranks: real gloo processes, right kernels and kernels that are wrong on several ranks."""

import os
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from runners.job import measure_mutants
from runners.kernels.faults import Edit
from service.wire import Case, Measurement

WHOLE = Case(tokens=16, vocabulary=1024)
SPLIT = WHOLE.model_copy(update={"tensor_parallel": 2})
MASKED = WHOLE.model_copy(update={"tensor_parallel": 2, "keep_mask": True, "entropy": "value"})

SHARD_MISSING: Edit = (
    "    total = buffer.exp_().sum(1, keepdim=True)\n",
    "    total = buffer.exp_().sum(1, keepdim=True)\n"
    "    if plan.group is not None and plan.group.rank() == 1:\n"
    "        total.zero_()\n",
)
TIMES_RANKS: Edit = (
    "    buffer.div_(both[:, 1:])\n",
    "    if plan.group is not None:\n        both[:, 1].mul_(plan.group.size())\n    buffer.div_(both[:, 1:])\n",
)
NO_GRADIENT_ELSEWHERE: Edit = ("-owned.float()).mul_(upstream", "-owned.float()).mul_(owned).mul_(upstream")
OWN_SUM_RETURNED: Edit = (
    "return target_logit - log_sum, entropy, mean_logit",
    "return target_logit - log_sum + (0.5 if plan.group is not None and plan.group.rank() else 0), entropy, mean_logit",
)
COLLECTIVE_SKIPPED: Edit = (
    "    return all_reduce_sum(_finite_logits(logits, plan.temperature).mul_(p).sum(1), plan.group)\n",
    "    mine = _finite_logits(logits, plan.temperature).mul_(p).sum(1)\n"
    "    return mine if plan.group is not None and plan.group.rank() else all_reduce_sum(mine, plan.group)\n",
)


def measure(kernel: str, cases: Sequence[Case], *mutants: Sequence[Edit]) -> list[list[Measurement]]:
    return [measurements for _, measurements in measure_mutants(kernel, mutants or [[]], cases)]


@pytest.mark.parametrize("kernel", ["fused", "online"])
def test_a_kernel_that_is_split_gives_what_it_gives_whole(kernel: str) -> None:
    four = SPLIT.model_copy(update={"tensor_parallel": 4})
    (measured,) = measure(kernel, [WHOLE, four, MASKED])
    assert [one.case for one in measured] == [WHOLE, four, MASKED]
    assert {one.outcome for one in measured} == {"ok"}
    for one in measured[1:]:
        assert one.values["tp_invariant"] == one.values["collectives_agree"] == [1.0], one.notes
        for check in ("own_thread", "inputs_unchanged", "unseen_inputs"):
            assert one.values[check] == [1.0], one.notes
        assert one.values["rank_disagree"] == [0.0]
        assert one.values["collectives"][0] >= 2
        assert one.values["collective_bytes"][0] >= 2 * 16 * 4
        assert len(one.values["step_cpu_seconds"]) == 5
    # A quarter of the vocabulary a rank, beside what each rank holds by row.
    assert measured[1].values["step_peak_bytes"][0] < 0.3 * measured[0].values["step_peak_bytes"][0]
    assert "tp_invariant" not in measured[0].values


def test_what_is_wrong_on_several_ranks_only_is_seen() -> None:
    faults = [SHARD_MISSING, TIMES_RANKS, NO_GRADIENT_ELSEWHERE, OWN_SUM_RETURNED]
    clean, *wrong = measure("fused", [WHOLE, SPLIT], [], *([fault] for fault in faults))
    for whole, _ in (clean, *wrong):  # with one rank nothing is wrong
        assert whole.values["g_rel_l2_lp"] == clean[0].values["g_rel_l2_lp"]
    assert [one[1].values["tp_invariant"] for one in (clean, *wrong)] == [[1.0], [0.0], [0.0], [0.0], [1.0]]
    assert [one[1].values["rank_disagree"] for one in (clean, *wrong)] == [[0.0], [0.0], [0.0], [0.0], [16.0]]
    assert "gradient norm" in wrong[2][1].notes["tp_invariant"]
    assert "step_cpu_seconds" not in wrong[0][1].values


def test_a_collective_that_one_rank_skips_costs_its_case_and_not_the_next() -> None:
    started = time.monotonic()
    ((skipped, after),) = measure("fused", [SPLIT, SPLIT.model_copy(update={"entropy": "off"})], [COLLECTIVE_SKIPPED])
    # Where the other ranks' next collective has another size, gloo ends the process instead of waiting.
    assert skipped.outcome in ("raised", "killed")
    assert after.outcome == "ok"
    assert time.monotonic() - started < 100


def test_no_rank_is_left_behind() -> None:
    measure("fused", [SPLIT])
    deadline = time.monotonic() + 10
    while mine := _ranks_of(os.getpid()):
        assert time.monotonic() < deadline, mine
        time.sleep(0.1)


def _ranks_of(parent: int) -> list[str]:
    """The command lines of processes whose ancestor is `parent`."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue
    found = {parent}
    while more := {pid for pid, above in parents.items() if above in found} - found:
        found |= more
    return [Path(f"/proc/{pid}/cmdline").read_text() for pid in found - {parent}]
