"""Faults that such kernels had in public, by number: the `quick` suite sees each, and our kernels are free of it.

1 to 23 are the project's list of situations. A wrong kernel is a mutant of `fused` or a small kernel of the test's own;
what must be seen of it is a metric or check of the catalogue that gets worse by its own rule. 10 takes two gloo
processes, 22 a CUDA device; what a call's signature decides (2) and a gradient's doubles (21) have tests of their kind.
"""

import importlib.util
import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from runners.binding import UnmeasurableError, omitted_arguments
from runners.instruments.accuracy import log_prob_gate, numeric_metrics, yardstick
from runners.instruments.calls import Local
from runners.instruments.measure import measure_case
from runners.instruments.memory import MemoryReading, measure_memory
from runners.instruments.subject import Branches, Options, Subject
from runners.kernels.contract import LogProbEntropy
from runners.kernels.faults import Edit
from runners.kernels.faults.mutation import mutated
from runners.kernels.faults.table import FAULTS
from runners.kernels.inputs import Inputs, make_inputs
from runners.kernels.reference import reference
from runners.kernels.registry import kernel
from runners.suites import suite
from service.catalogue import BY_NAME, MetricClass, Rule
from service.detection.gates import GateFacts, beyond_gates
from service.detection.rules import Reading, Relation, floor, relate, worst
from service.wire import Measurement, TargetKernel

OURS = ("online", "fused", "legacy", "eager")
QUICK = {case.id: case for case in suite("quick")}
# The smallest of its cases that show what they are named for.
PLAIN = "n7-v1000-float32-gradient"
OFF = "n7-v1000-float32-off"
VALUE = "n7-v1000-float32-value"
MASK = "n7-v4096-float32-gradient-mask"
CHUNKS = "n7-v4096-float32-gradient-chunk1"
WARM = "n7-v4096-float32-gradient-t0.7"
FLAT = "n16-v1025-float32-gradient-flat"
NEG_INF = "n16-v1000-float32-gradient-neg_inf"
CONFIDENT = "n16-v1024-float32-gradient-confident"
OFFSET = "n16-v1000-float32-gradient-offset"
ONE_ROW = "n16-v1000-float32-gradient-one_row"
VALUE_CHUNKS = "n16-v1000-float32-value-chunk4"


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# --- What is wrong, and what must be seen of it ---------------------------------------------------------------------


@dataclass(frozen=True)
class Situation:
    """A wrong kernel, the case of `quick` that shows it, what gets worse there, and the kernel it is held to."""

    number: str
    wrong: LogProbEntropy
    case: str
    signals: frozenset[str]
    than: str = "fused"


def situation(number: str, wrong: LogProbEntropy, case: str, signals: str, than: str = "fused") -> Any:
    """As a parameter of a test, named by its number."""
    return pytest.param(Situation(number, wrong, case, frozenset(signals.split()), than), id=number)


def fault(number: str) -> LogProbEntropy:
    """The seeded fault of this number."""
    (edits,) = (each.edits for each in FAULTS if each.number == number)
    return mutant(*edits)


def mutant(*edits: Edit) -> LogProbEntropy:
    """`fused` with edits."""
    return mutated(kernel("fused"), edits).run


def ignoring(option: str, value: str) -> LogProbEntropy:
    """`fused` that takes an option and does not forward it."""
    return mutant(("    check_arguments(logits,", f"    {option} = {value}\n    check_arguments(logits,"))


def cancelling(logits: torch.Tensor, targets: torch.Tensor, **options: Any) -> Any:
    """Wrong in both branches, right in their sum."""
    log_prob, entropy = kernel("fused").run(logits, targets, **options)
    error = (logits.float() * 1e-3).sum(1)
    error = error - error.detach()
    return log_prob + error, None if entropy is None else entropy - error


def keeping_the_entropys_graph(logits: torch.Tensor, targets: torch.Tensor, **options: Any) -> Any:
    """The legacy pair, whose entropy is always differentiable."""
    return kernel("legacy").run(logits, targets, **{**options, "with_entropy_grad": True})


def without_new_keyword(logits: torch.Tensor, targets: torch.Tensor, keep_mask: Any = None, group: Any = None) -> Any:
    """A function as it was before a caller passed it one keyword more."""
    return kernel("fused").run(logits, targets, keep_mask=keep_mask, group=group)


SITUATIONS = [
    situation("1", fault("15"), PLAIN, "forward_peak_bytes step_peak_bytes"),
    situation("3 rounded", fault("1"), PLAIN, "g_mantissa_bits g_bf16_grid g_rel_l2_lp"),
    situation("3 not materialised", fault("21"), PLAIN, "gradient_defined grad_coverage_miss_lp"),
    situation("4", cancelling, FLAT, "g_rel_l2_lp g_rel_l2_ent legacy_delta_g_lp"),
    situation("5", keeping_the_entropys_graph, VALUE, "saved_bytes entropy_requires_grad", than="legacy"),
    situation(
        "6",
        mutant(
            (
                "_finite_logits(logits, plan.temperature).mul_",
                "_load_(_whole_buffer(logits), logits, plan.temperature).mul_",
            )
        ),
        NEG_INF,
        "ent_abs_max g_rel_l2_ent nonfinite_unexpected",
    ),
    situation(
        "6 forward alone made finite",
        mutant(("difference.clamp_min_(_LOWEST).mul_", "difference.mul_")),
        NEG_INF,
        "g_rel_l2_ent nonfinite_unexpected",
    ),
    situation(
        "7",
        mutant(("check_arguments(logits, targets, keep_mask", "dict(keep_mask")),
        PLAIN,
        "target_range",
    ),
    situation("8", fault("6"), FLAT, "lp_abs_max ent_abs_max g_zero_sum_lp"),
    situation("9", mutant(("p.masked_fill_(dead, 0.0)\n", "pass\n")), PLAIN, "zero_upstream"),
    situation("11", fault("3"), PLAIN, "grad_coverage_miss_ent g_rel_l2_ent"),
    situation(
        "12",
        mutant(
            (
                "ctx.spent = True\n",
                "ctx.spent = True\n        twice = plan.chunk_size and ctx.saved_tensors[1].clone()\n",
            )
        ),
        VALUE_CHUNKS,
        "step_peak_bytes",
    ),
    situation("13", kernel("eager").run, CHUNKS, "saved_bytes", than="online"),
    situation("14", fault("2"), CONFIDENT, "g_tgt_rel_max"),
    situation("15", fault("5"), ONE_ROW, "grad_coverage_miss_lp g_rel_l2_lp"),
    situation(
        "16", mutant(("(upstream / -plan.temperature)", "(upstream / -plan.temperature / 7)")), PLAIN, "g_scale_lp"
    ),
    situation("17", fault("20"), OFF, "inputs_unchanged"),
    situation(
        "18",
        mutant(
            (
                "p.masked_fill_(dead, 0.0)\n",
                "p.masked_fill_(dead, 0.0)\n            p = p.copy_(p.bfloat16()) if plan.chunk_size else p\n",
            )
        ),
        CHUNKS,
        "chunk_invariant g_rel_l2_lp g_mantissa_bits",
    ),
    situation("19 keep_mask", ignoring("keep_mask", "None"), MASK, "lp_abs_max g_rel_l2_lp mask_zero_gradient"),
    situation("19 chunk_size", ignoring("chunk_size", "None"), VALUE_CHUNKS, "forward_peak_bytes"),
    situation(
        "19 temperature", ignoring("temperature", "1.0"), WARM, "lp_abs_max ent_abs_max g_rel_l2_lp g_rel_l2_ent"
    ),
    situation("19 with_entropy", ignoring("with_entropy", "True"), OFF, "entropy_presence"),
    situation("19 with_entropy_grad", ignoring("with_entropy_grad", "True"), VALUE, "entropy_requires_grad"),
    situation(
        "20",
        mutant(
            (
                "return log_prob, entropy\n\n    @static",
                "return log_prob + 1e-6 * torch.rand_like(log_prob), entropy\n\n    @static",
            )
        ),
        PLAIN,
        "repeat_bitwise",
    ),
    situation("21", mutant(("buffer.copy_(logits)", "buffer.copy_(logits.double() * 1.0)")), PLAIN, "traffic_bytes"),
    situation(
        "23",
        mutant(
            (
                "    log_prob, entropy = _LogProbEntropy.apply",
                "    if not len(targets):\n        return logits.new_zeros(0, 1), None\n"
                "    log_prob, entropy = _LogProbEntropy.apply",
            )
        ),
        PLAIN,
        "empty_batch",
    ),
]


@cache
def measured(name: str, case_id: str) -> Measurement:
    """One of our kernels as it is on a case of `quick`."""
    known = kernel(name)
    return measure_case(Local(Subject(name, known.run, contract=known.contract)), QUICK[case_id], repetitions=1)


def readings(measurement: Measurement) -> dict[str, Reading]:
    """By metric, as the rules see them."""
    finite = {name: Reading(tuple(samples)) for name, samples in measurement.values.items()}
    return finite | {name: Reading((), nonfinite=True) for name in measurement.nonfinite}


def worse(before: dict[str, Reading], after: dict[str, Reading]) -> set[str]:
    """The metrics that regress from one float32 reading to the other, each by its rule and above its floor."""
    found = set()
    for name in before.keys() & after.keys():
        metric = BY_NAME[name]
        if metric.rule is Rule.INFORMATIONAL:
            continue
        noise, scale = (_smallest(fact, before, after) for fact in (metric.noise, metric.scale))
        limit = floor(metric, "float32", noise=noise, scale=scale or 1.0)
        if relate(metric, worst(metric, before[name]), after[name], limit) is Relation.WORSE:
            found.add(name)
    return found


def _smallest(fact: str | None, *both: dict[str, Reading]) -> float:
    """Of the finite values of an informational metric, 0 without any."""
    values = [sample for each in both if fact in each for sample in each[fact].samples]
    return min(values, default=0.0)


@pytest.mark.parametrize("told", SITUATIONS)
def test_the_quick_suite_sees_what_is_wrong(told: Situation) -> None:
    wrong = measure_case(Local(Subject(told.than, told.wrong)), QUICK[told.case], repetitions=1)
    assert wrong.outcome == "ok", wrong.notes
    assert told.signals <= worse(readings(measured(told.than, told.case)), readings(wrong))


def test_nothing_is_seen_of_a_kernel_that_stays_as_it_is() -> None:
    """So that no signal above is there always."""
    for name, case_id in {(param.values[0].than, param.values[0].case) for param in SITUATIONS}:
        again = measure_case(Local(Subject(name, kernel(name).run)), QUICK[case_id], repetitions=1)
        assert worse(readings(measured(name, case_id)), readings(again)) == set(), case_id


# --- Our kernels are free of it --------------------------------------------------------------------------------------

CASES = (PLAIN, OFF, VALUE, MASK, CHUNKS, WARM, FLAT, NEG_INF, CONFIDENT, OFFSET, ONE_ROW, VALUE_CHUNKS)


@pytest.mark.parametrize("case_id", CASES)
@pytest.mark.parametrize("name", OURS)
def test_our_kernels_pass_every_check_and_are_within_their_gates(name: str, case_id: str) -> None:
    measurement, contract, case = measured(name, case_id), kernel(name).contract, QUICK[case_id]
    checks = {
        key: value for key, value in measurement.values.items() if BY_NAME[key].metric_class is MetricClass.CONTRACT
    }
    assert checks
    assert {key for key, value in checks.items() if value != [1.0]} == set(), measurement.notes
    values = {key: samples[0] for key, samples in measurement.values.items()}
    assert measurement.nonfinite == []
    assert {
        key: values[key] for key in values if key.startswith(("grad_", "nonfinite", "lp_pos")) and values[key]
    } == {}
    if case.distribution not in contract.inaccurate_on:
        facts = GateFacts(case.distribution, values["logits_abs_max"], case.vocabulary, values["peer_tgt_rel_max"])
        gated = {key: value / contract.widened_gates for key, value in values.items()}
        assert not beyond_gates(gated, facts, dtype=case.dtype, gradient=contract.gradient)


def memory(name: str, how: Options, *, tokens: int = 16) -> MemoryReading:
    """Of one of our kernels, after a warm-up."""
    inputs, subject = make_inputs(tokens=tokens, vocabulary=4096), Subject(name, kernel(name).run)
    measure_memory(subject, inputs, how)
    return measure_memory(subject, inputs, how)


MODES = ("off", "value", "gradient")
SLACK_BYTES = 4096


@pytest.mark.parametrize(("name", "mode"), list(product(("online", "fused"), MODES)))
def test_01_the_peak_is_never_above_the_legacy_pairs(name: str, mode: Any) -> None:
    assert memory(name, Options(mode)).step_peak_bytes <= memory("legacy", Options(mode)).step_peak_bytes + SLACK_BYTES


def test_02_an_entry_that_lacks_what_a_caller_passes_is_named_and_ours_take_everything() -> None:
    arguments = {"logits": "logits", "targets": "targets", "with_entropy_grad": "with_entropy_grad"}
    target = TargetKernel(name="fused", entry="a:b", arguments=arguments, returns=["log_prob"])
    with pytest.raises(UnmeasurableError, match="takes no parameter 'with_entropy_grad'"):
        omitted_arguments(target, without_new_keyword, omittable=())
    called = measure_case(Local(Subject("fused", without_new_keyword)), QUICK[PLAIN], repetitions=1)  # type: ignore[arg-type]
    assert (called.outcome, "unexpected keyword" in called.notes["outcome"]) == ("raised", True)
    for name in OURS:
        assert set(inspect.signature(LogProbEntropy.__call__).parameters) - {"self"} <= set(
            inspect.signature(kernel(name).run).parameters
        )


@pytest.mark.parametrize("chunk_size", [None, 4])
@pytest.mark.parametrize("name", OURS)
def test_05_metric_only_entropy_saves_what_no_entropy_saves(name: str, chunk_size: int | None) -> None:
    off, value = (memory(name, Options(mode, chunk_size)).saved_bytes for mode in ("off", "value"))  # type: ignore[arg-type]
    assert value <= off + SLACK_BYTES


@pytest.mark.parametrize("vocabulary", [1023, 1025, 1152, 129_920])
@pytest.mark.parametrize("name", OURS)
def test_08_a_vocabulary_beside_a_tiles_multiple_has_no_phantom_columns(name: str, vocabulary: int) -> None:
    inputs = make_inputs(tokens=3, vocabulary=vocabulary)
    inputs = replace(inputs, logits=inputs.logits - 100.0)
    log_prob = kernel(name).run(inputs.logits, inputs.targets)[0]
    truth = oracle(inputs).log_prob
    assert (log_prob - truth).abs().max() <= kernel(name).contract.widened_gates * log_prob_gate(130.0, vocabulary)


def oracle(inputs: Inputs) -> Any:
    """The float64 oracle."""
    upstreams = {"upstream_log_prob": inputs.upstream_log_prob, "upstream_entropy": inputs.upstream_entropy}
    return reference(inputs.logits, inputs.targets, keep_mask=inputs.keep_mask, **upstreams)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["online", "fused"])
def test_12_chunking_never_costs_memory(name: str, mode: Any) -> None:
    whole, chunked = memory(name, Options(mode)), memory(name, Options(mode, chunk_size=4))
    for metric in ("forward_peak_bytes", "step_peak_bytes", "saved_bytes"):
        assert getattr(chunked, metric) <= getattr(whole, metric) + SLACK_BYTES, metric


def test_13_what_is_saved_grows_with_the_rows_by_bytes_and_not_by_the_vocabulary() -> None:
    few, many = (memory("online", Options(chunk_size=2), tokens=tokens).saved_bytes for tokens in (16, 64))
    assert many - few <= 48 * 16


@pytest.mark.parametrize("name", OURS)
def test_18_a_weights_gradient_is_as_right_in_many_chunks_as_in_one(name: str) -> None:
    errors = [_weight_error(name, chunk_size) for chunk_size in (None, 16, 4, 1)]
    assert max(errors) <= 1.5 * errors[0] <= 1e-6


def _weight_error(name: str, chunk_size: int | None) -> float:
    """Relative L2 error of the gradient of a head's weight through a kernel."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(size, 24, generator=generator) for size in (64, 200))
    targets = torch.randint(200, (64,), generator=generator)
    gradients = []
    for dtype in (torch.float32, torch.float64):
        leaf = weight.to(dtype).requires_grad_()
        logits = hidden.to(dtype) @ leaf.T
        if dtype == torch.float32:
            log_prob = kernel(name).run(logits, targets, chunk_size=chunk_size)[0]
        else:
            log_prob = logits.log_softmax(1).gather(1, targets[:, None])[:, 0]
        gradients.append(torch.autograd.grad(log_prob.sum(), leaf)[0].double())
    return float((gradients[0] - gradients[1]).norm() / gradients[1].norm())


@pytest.mark.parametrize("name", OURS)
def test_19_every_option_changes_what_it_is_for(name: str) -> None:
    inputs = make_inputs(tokens=6, vocabulary=40, keep_mask=True)
    logits = inputs.logits.requires_grad_()

    def run(**options: Any) -> Any:
        return kernel(name).run(logits, inputs.targets, **options)

    plain = run()
    assert not torch.equal(run(keep_mask=inputs.keep_mask)[0], plain[0])
    assert not torch.equal(run(temperature=0.7)[0], plain[0])
    assert not torch.equal(run(temperature=0.7)[1], plain[1])
    assert run(with_entropy=False)[1] is None
    assert (plain[1].requires_grad, run(with_entropy_grad=False)[1].requires_grad) == (True, False)


@pytest.mark.parametrize("name", OURS)
def test_20_five_calls_give_the_same_bits(name: str) -> None:
    inputs = make_inputs(tokens=16, vocabulary=5000)
    logits = inputs.logits.requires_grad_()

    def gradient() -> torch.Tensor:
        log_prob, entropy = kernel(name).run(logits, inputs.targets)
        assert entropy is not None
        return torch.autograd.grad((log_prob, entropy), logits, (inputs.upstream_log_prob, inputs.upstream_entropy))[0]

    first = gradient()
    assert all(torch.equal(gradient(), first) for _ in range(4))


class _WideDoubles(TorchDispatchMode):
    """Collects the operations that make a float64 tensor as wide as the vocabulary."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.elements, self.found = elements, set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dtype == torch.float64 and result.numel() >= self.elements:
            self.found.add(str(func))
        return result


@pytest.mark.parametrize("name", OURS)
def test_21_no_vocabulary_wide_work_is_in_float64(name: str) -> None:
    inputs = make_inputs(tokens=4, vocabulary=500)
    logits = inputs.logits.requires_grad_()
    with _WideDoubles(logits.numel()) as wide:
        log_prob, entropy = kernel(name).run(logits, inputs.targets, temperature=0.7)
        assert entropy is not None
        (log_prob.sum() + entropy.sum()).backward()
    assert wide.found == set()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("tokens", [16_384, 32_768])
def test_22_rows_beyond_two_and_four_thousand_million_elements_are_right(tokens: int) -> None:
    """16384 x 151936 is over 2^31 elements, 32768 x 151936 over 2^32."""
    vocabulary, rows = 151_936, [0, 1, tokens // 2, tokens - 2, tokens - 1]
    logits = torch.randn(tokens, vocabulary, dtype=torch.bfloat16, device="cuda").requires_grad_()
    targets = torch.randint(vocabulary, (tokens,), device="cuda")
    log_prob, entropy = kernel("online").run(logits, targets)
    assert entropy is not None
    ones = torch.ones(tokens, device="cuda")
    (gradient,) = torch.autograd.grad((log_prob, entropy), logits, (ones, ones))
    few = Inputs(logits.detach()[rows].cpu(), targets[rows].cpu(), None, torch.ones(5), torch.ones(5))
    truth = oracle(few)
    torch.testing.assert_close(log_prob[rows].cpu().double(), truth.log_prob, rtol=0, atol=1e-5)
    torch.testing.assert_close(entropy[rows].cpu().double(), truth.entropy, rtol=0, atol=3e-5)
    expected = (truth.g_log_prob + truth.g_entropy).bfloat16()
    torch.testing.assert_close(gradient[rows].cpu(), expected, rtol=2**-7, atol=1e-9)


# --- 10 and other faults of two ranks --------------------------------------------------------------------------------

RANK_PROGRAM = Path(__file__).parent / "situations_gloo_rank.py"
ROOT = Path(__file__).parents[2]


def _load_rank_program() -> ModuleType:
    spec = importlib.util.spec_from_file_location("situations_gloo_rank", RANK_PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


ranks: Any = _load_rank_program()
Shards = Callable[[Any], list[Any]]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Shards:
    """Each rank's results by name."""
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
    results = [torch.load(path) for path in paths]
    return lambda name: [each[name] for each in results]


def gathered(parts: list[dict[str, torch.Tensor]]) -> dict[str, Reading]:
    """The numeric metrics of a group's outputs and of its shards' gradients joined."""
    inputs = ranks.inputs_of()
    joined = [torch.cat([part[name] for part in parts], 1) for name in ("g_log_prob", "g_entropy")]
    result = Branches(parts[0]["log_prob"], parts[0]["entropy"], *joined)
    place = torch.arange(inputs.logits.shape[1])
    values = numeric_metrics(inputs, Options(), result, result, place, yardstick(inputs, 1.0))
    return {name: Reading((value,)) for name, value in values.items()}


@pytest.mark.parametrize(
    ("wrong", "signals"),
    [
        ("non-owner shards get no gradient", {"g_rel_l2_lp", "g_zero_sum_lp"}),
        ("one shard missing from the sum", {"lp_abs_max", "ent_abs_max", "g_zero_sum_lp"}),
        ("sum multiplied by the ranks", {"g_rel_l2_lp", "g_zero_sum_lp", "lp_abs_max"}),
        ("group not forwarded", {"lp_abs_max", "g_rel_l2_lp"}),
    ],
)
def test_10_gathered_shards_show_what_is_wrong_between_ranks(wrong: str, signals: set[str], shards: Shards) -> None:
    assert signals <= worse(gathered(shards("fused")), gathered(shards(wrong)))


@pytest.mark.parametrize("name", ranks.KERNELS)
def test_10_our_kernels_gradients_over_two_ranks_are_the_oracles(name: str, shards: Shards) -> None:
    for key in (name, (name, "chunked")):
        values = {metric: reading.samples[0] for metric, reading in gathered(shards(key)).items()}
        assert max(values["g_rel_l2_lp"], values["g_rel_l2_ent"]) <= 1e-6
        assert max(values["g_zero_sum_lp"], values["lp_abs_max"], values["ent_abs_max"]) <= 1e-5


@pytest.mark.parametrize("name", ranks.KERNELS)
def test_a_whole_vocabulary_on_each_rank_is_refused_by_both(name: str, shards: Shards) -> None:
    for refusal in shards((name, "whole")):
        assert refusal.startswith("logits has the same 64 columns on all 2 ranks: it must be [N, V/TP]")


@pytest.mark.parametrize("name", ranks.KERNELS)
def test_a_vocabulary_that_does_not_divide_is_refused_by_both(name: str, shards: Shards) -> None:
    for rank, refusal in enumerate(shards((name, "uneven"))):
        assert refusal.startswith(f"logits has {4 - rank} columns here and 3 to 4 on the group's ranks: each must hold")


@pytest.mark.parametrize("name", ranks.KERNELS)
def test_shards_that_are_equal_by_chance_are_taken(name: str, shards: Shards) -> None:
    assert shards((name, "equal values")) + shards((name, "equal shards")) == [""] * 4
