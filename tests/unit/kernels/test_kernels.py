"""What every kernel that runs here promises (contract.LogProbEntropy), and what `fused` promises beside."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from runners.kernels.contract import Kernel
from runners.kernels.inputs import Distribution, Inputs, digest, make_inputs
from runners.kernels.reference import reference
from runners.kernels.registry import KERNELS, kernel

# Kernels that compile for seconds have tests of their own: test_compiled.py, test_external.py.
COMPILING = {"compiled", "cut_cross_entropy"}
RUNNABLE = [
    pytest.param(known, id=known.name) for known in KERNELS if known.missing is None and known.name not in COMPILING
]
# megatron-core's cross-entropies multiply NaN by zero.
KEEPS_DEAD_ROWS = [param for param in RUNNABLE if not param.id.startswith("megatron")]
every_kernel = pytest.mark.parametrize("subject", RUNNABLE)
# Float32 sums in another order.
CLOSE = {"rtol": 1e-5, "atol": 2e-6}


@dataclasses.dataclass(frozen=True)
class Results:
    log_prob: torch.Tensor
    entropy: torch.Tensor | None
    gradient: torch.Tensor


def run(subject: Kernel, inputs: Inputs, *, log_prob: bool = True, entropy: bool = True, **options: Any) -> Results:
    """Forward and backward with the upstream gradients of the outputs chosen; `options` go to the kernel."""
    logits = inputs.logits.detach().requires_grad_()
    results = subject.run(logits, inputs.targets, keep_mask=inputs.keep_mask, **options)
    outputs, upstreams = [], []
    if log_prob:
        outputs.append(results[0])
        upstreams.append(inputs.upstream_log_prob)
    if entropy and results[1] is not None and results[1].requires_grad:
        outputs.append(results[1])
        upstreams.append(inputs.upstream_entropy)
    (gradient,) = torch.autograd.grad(outputs, logits, upstreams)
    return Results(results[0].detach(), None if results[1] is None else results[1].detach(), gradient)


def close(one: Results, other: Results, *, bits: bool = False) -> bool:
    tolerance = {"rtol": 0.0, "atol": 0.0} if bits else CLOSE
    pairs = [(one.log_prob, other.log_prob), (one.gradient.float(), other.gradient.float())]
    if one.entropy is not None and other.entropy is not None:
        pairs.append((one.entropy, other.entropy))
    return all(torch.allclose(a, b, **tolerance) for a, b in pairs)


@every_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_outputs_are_float32_and_the_gradient_has_the_logits_dtype(subject: Kernel, dtype: torch.dtype) -> None:
    inputs = make_inputs(tokens=5, vocabulary=33, dtype=dtype, keep_mask=True)
    results = run(subject, inputs)
    assert results.log_prob.dtype == torch.float32
    assert results.entropy is not None
    assert results.entropy.dtype == torch.float32
    assert results.gradient.dtype == dtype
    assert results.log_prob.shape == results.entropy.shape == (5,)
    upcast = run(subject, dataclasses.replace(inputs, logits=inputs.logits.float()))
    assert torch.equal(results.log_prob, upcast.log_prob)
    assert torch.allclose(results.gradient.float(), upcast.gradient, rtol=2**-7, atol=1e-6)


@every_kernel
@pytest.mark.parametrize("keep_mask", [False, True])
def test_entropy_is_given_and_differentiable_exactly_when_asked_for(subject: Kernel, keep_mask: bool) -> None:
    inputs = make_inputs(tokens=4, vocabulary=10, keep_mask=keep_mask)
    logits = inputs.logits.requires_grad_()
    call = {"keep_mask": inputs.keep_mask}
    assert subject.run(logits, inputs.targets, with_entropy=False, **call)[1] is None
    value = subject.run(logits, inputs.targets, with_entropy_grad=False, **call)[1]
    graph = subject.run(logits, inputs.targets, **call)[1]
    assert value is not None
    assert graph is not None
    assert not value.requires_grad
    assert graph.requires_grad
    assert torch.equal(value, graph)


@every_kernel
def test_without_a_graph_the_results_are_the_same_and_need_none(subject: Kernel) -> None:
    inputs = make_inputs(tokens=4, vocabulary=10, keep_mask=True)
    with torch.no_grad():
        log_prob, entropy = subject.run(inputs.logits.requires_grad_(), inputs.targets, keep_mask=inputs.keep_mask)
    results = run(subject, inputs)
    assert not log_prob.requires_grad
    assert torch.equal(log_prob, results.log_prob)
    assert entropy is not None
    assert results.entropy is not None
    assert torch.equal(entropy, results.entropy)


@every_kernel
@pytest.mark.parametrize("chunk_size", [None, 3])
@pytest.mark.parametrize("keep_mask", [False, True])
def test_no_tokens_give_empty_results_connected_to_the_graph(
    subject: Kernel, chunk_size: int | None, keep_mask: bool
) -> None:
    inputs = make_inputs(tokens=0, vocabulary=7, keep_mask=keep_mask)
    results = run(subject, inputs, chunk_size=chunk_size)
    assert results.log_prob.shape == (0,)
    assert results.entropy is not None
    assert results.entropy.shape == (0,)
    assert results.gradient.shape == (0, 7)


@every_kernel
def test_non_contiguous_logits_give_the_same_result(subject: Kernel) -> None:
    inputs = make_inputs(tokens=6, vocabulary=40, keep_mask=True)
    strided = dataclasses.replace(inputs, logits=inputs.logits.t().contiguous().t())
    assert not strided.logits.is_contiguous()
    assert close(run(subject, inputs), run(subject, strided))


@every_kernel
@pytest.mark.parametrize("keep_mask", [False, True])
@pytest.mark.parametrize("chunk_size", [1, 2, 7, 8])
def test_every_chunk_size_gives_the_same_result(subject: Kernel, keep_mask: bool, chunk_size: int) -> None:
    inputs = make_inputs(tokens=7, vocabulary=40, keep_mask=keep_mask)
    assert close(run(subject, inputs), run(subject, inputs, chunk_size=chunk_size))


@every_kernel
def test_the_same_call_gives_the_same_bits(subject: Kernel) -> None:
    inputs = make_inputs(tokens=16, vocabulary=1000)
    assert close(run(subject, inputs), run(subject, inputs), bits=True)


@every_kernel
@pytest.mark.parametrize("distribution", ["flat", "neg_inf"])
def test_inputs_are_bit_identical_afterwards(subject: Kernel, distribution: Distribution) -> None:
    inputs = make_inputs(tokens=5, vocabulary=33, distribution=distribution, keep_mask=True)
    before = digest(inputs)
    run(subject, inputs, temperature=0.7)
    assert digest(inputs) == before


@every_kernel
def test_temperature_divides_the_logits(subject: Kernel) -> None:
    inputs = make_inputs(tokens=5, vocabulary=33, keep_mask=True)
    warm = run(subject, inputs, temperature=2.0)
    halved = run(subject, dataclasses.replace(inputs, logits=inputs.logits / 2))
    assert close(warm, dataclasses.replace(halved, gradient=halved.gradient / 2))


def test_the_float64_kernel_divides_by_a_float64_temperature() -> None:
    inputs = make_inputs(tokens=64, vocabulary=200)
    log_prob, entropy = kernel("reference").run(inputs.logits, inputs.targets, temperature=0.7)
    for found, expected in zip((log_prob, entropy), reference_results(inputs, 0.7)[:2], strict=True):
        assert torch.equal(found, expected)


@every_kernel
def test_a_masked_out_target_is_kept(subject: Kernel) -> None:
    inputs = make_inputs(tokens=5, vocabulary=9)
    alone = dataclasses.replace(inputs, keep_mask=torch.zeros(5, 9, dtype=torch.bool))
    results = run(subject, alone, entropy=False)
    assert torch.equal(results.log_prob, torch.zeros(5))
    assert (results.gradient == 0).all()


@every_kernel
def test_masked_entries_get_an_exactly_zero_log_prob_gradient(subject: Kernel) -> None:
    inputs = make_inputs(tokens=16, vocabulary=50, keep_mask=True)
    assert inputs.keep_mask is not None
    dropped = ~inputs.keep_mask.scatter(1, inputs.targets[:, None], True)
    gradient = run(subject, inputs, entropy=False).gradient
    assert (gradient[dropped] == 0).all()
    assert (gradient[~dropped] != 0).any()


@every_kernel
def test_entropy_and_its_gradient_come_from_the_unmasked_logits(subject: Kernel) -> None:
    inputs = make_inputs(tokens=16, vocabulary=50, keep_mask=True)
    masked = run(subject, inputs, log_prob=False)
    unmasked = run(subject, dataclasses.replace(inputs, keep_mask=None), log_prob=False)
    assert masked.entropy is not None
    assert unmasked.entropy is not None
    assert torch.equal(masked.entropy, unmasked.entropy)
    assert torch.equal(masked.gradient, unmasked.gradient)


@every_kernel
@pytest.mark.parametrize("output", ["log_prob", "entropy"])
def test_each_output_used_alone_gives_a_defined_gradient(subject: Kernel, output: str) -> None:
    inputs = make_inputs(tokens=16, vocabulary=50)
    alone = run(subject, inputs, log_prob=output == "log_prob", entropy=output == "entropy")
    assert (alone.gradient != 0).any()


@every_kernel
def test_the_branches_add_up(subject: Kernel) -> None:
    inputs = make_inputs(tokens=16, vocabulary=50, keep_mask=True)
    both = run(subject, inputs).gradient
    apart = run(subject, inputs, entropy=False).gradient + run(subject, inputs, log_prob=False).gradient
    assert torch.allclose(both, apart, **CLOSE)


@pytest.mark.parametrize("subject", KEEPS_DEAD_ROWS)
@pytest.mark.parametrize("chunk_size", [None, 2])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_a_row_without_an_upstream_has_a_zero_gradient_whatever_its_logits(
    subject: Kernel, chunk_size: int | None, poison: float
) -> None:
    inputs = make_inputs(tokens=5, vocabulary=9)
    inputs.logits[0] = poison
    assert inputs.upstream_log_prob[0] == inputs.upstream_entropy[0] == 0
    gradient = run(subject, inputs, chunk_size=chunk_size).gradient
    assert (gradient[0] == 0).all()
    assert torch.isfinite(gradient).all()
    assert (gradient[1:] != 0).any()


@pytest.mark.parametrize("name", ["eager", "peer", "reference"])
def test_a_second_backward_knows_its_own_dead_rows(name: str) -> None:
    inputs = make_inputs(tokens=2, vocabulary=9)
    inputs.logits[0] = torch.nan
    logits = inputs.logits.requires_grad_()
    log_prob, _ = kernel(name).run(logits, inputs.targets)
    torch.autograd.grad(log_prob, logits, torch.ones(2), retain_graph=True)
    (gradient,) = torch.autograd.grad(log_prob, logits, torch.tensor([0.0, 1.0]))
    assert (gradient[0] == 0).all()
    assert (gradient[1] != 0).any()


@every_kernel
@pytest.mark.parametrize("entropy", [False, True])
def test_logits_changed_before_backward_are_a_loud_error_or_change_nothing(subject: Kernel, entropy: bool) -> None:
    inputs = make_inputs(tokens=5, vocabulary=40, keep_mask=True)
    expected = run(subject, inputs, entropy=entropy).gradient
    leaf = inputs.logits.clone().requires_grad_()
    logits = leaf * 1.0
    log_prob, entropies = subject.run(logits, inputs.targets, keep_mask=inputs.keep_mask)
    assert entropies is not None
    loss = (log_prob * inputs.upstream_log_prob).sum()
    if entropy:
        loss = loss + (entropies * inputs.upstream_entropy).sum()
    logits.detach().fill_(7.0)
    try:
        (gradient,) = torch.autograd.grad(loss, leaf)
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)  # noqa: PT017 -- one of two right answers
    else:
        assert torch.equal(gradient, expected)


EXTREMES = [
    [3.4e38, -3.4e38, 0.0],
    [3.4e38, 3.4e38, -3.4e38],
    [-3.4e38, -3.4e38, -3.4e38],
    [0.0, -3.4e38, 1.0],
]


def extreme(row: list[float]) -> Inputs:
    """The row once for each target."""
    return Inputs(torch.tensor([row]).expand(3, 3).clone(), torch.arange(3), None, torch.ones(3), torch.ones(3))


@pytest.mark.parametrize("subject", [param for param in RUNNABLE if not param.values[0].contract.overflows])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("row", EXTREMES, ids=str)
def test_the_greatest_finite_logits_give_the_oracles_results(
    subject: Kernel, row: list[float], temperature: float
) -> None:
    inputs = extreme(row)
    log_prob, entropy = reference_results(inputs, temperature)[:2]
    outputs = run(subject, inputs, temperature=temperature)
    assert outputs.entropy is not None
    torch.testing.assert_close(outputs.log_prob, log_prob, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(outputs.entropy, entropy, rtol=1e-6, atol=1e-6)
    for number, name in ((2, "log_prob"), (3, "entropy")):
        alone = run(subject, inputs, temperature=temperature, log_prob=number == 2, entropy=number == 3).gradient
        expected = reference_results(inputs, temperature)[number]
        torch.testing.assert_close(alone, expected, rtol=1e-6, atol=1e-6, msg=f"gradient of {name}")


def reference_results(inputs: Inputs, temperature: float) -> tuple[torch.Tensor, ...]:
    """The oracle's log-prob, entropy and both gradients, rounded to float32."""
    oracle = reference(
        inputs.logits,
        inputs.targets,
        upstream_log_prob=inputs.upstream_log_prob,
        upstream_entropy=inputs.upstream_entropy,
        temperature=temperature,
    )
    return oracle.log_prob.float(), oracle.entropy.float(), oracle.g_log_prob.float(), oracle.g_entropy.float()


@pytest.mark.parametrize("subject", [param for param in RUNNABLE if param.values[0].contract.overflows])
def test_a_kernel_whose_contract_says_so_overflows(subject: Kernel) -> None:
    results = [run(subject, extreme(row), temperature=0.5) for row in EXTREMES]
    assert any(torch.isnan(result.log_prob).any() or torch.isnan(result.gradient).any() for result in results)


def test_the_gradient_of_fused_is_finite_where_only_differences_overflow() -> None:
    assert torch.isfinite(run(kernel("fused"), extreme(EXTREMES[0])).gradient).all()


@pytest.mark.parametrize("subject", KEEPS_DEAD_ROWS)
def test_a_row_with_one_upstream_only_keeps_its_gradient(subject: Kernel) -> None:
    inputs = make_inputs(tokens=2, vocabulary=9)
    inputs.upstream_log_prob[:] = torch.tensor([0.0, 1.0])
    inputs.upstream_entropy[:] = torch.tensor([1.0, 0.0])
    assert (run(subject, inputs).gradient != 0).any(1).all()


@every_kernel
def test_impossible_ids_contribute_zero_forward_and_backward(subject: Kernel) -> None:
    inputs = make_inputs(tokens=8, vocabulary=50, distribution="neg_inf")
    results = run(subject, inputs)
    assert results.entropy is not None
    assert torch.isfinite(results.entropy).all()
    assert torch.isfinite(results.gradient).all()
    assert (results.gradient[torch.isneginf(inputs.logits)] == 0).all()


@pytest.mark.parametrize("subject", KEEPS_DEAD_ROWS)
def test_no_group_means_no_collective(subject: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        pytest.fail("a collective was called")

    monkeypatch.setattr(dist, "all_reduce", refuse)
    run(subject, make_inputs(tokens=3, vocabulary=4, keep_mask=True))


class _TwoRanks:
    """As much of a group as an argument check reads."""

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 1


def _wrong_values() -> Iterator[Any]:
    logits, targets = torch.zeros(3, 4), torch.zeros(3, dtype=torch.int64)
    for label, match, call in (
        ("dimensions", r"logits has shape \(3,\)", {"logits": torch.zeros(3)}),
        ("no columns", r"logits has shape \(3, 0\)", {"logits": torch.zeros(3, 0)}),
        ("integers", "logits is torch.int64: it must be one of", {"logits": torch.zeros(3, 4, dtype=torch.int64)}),
        ("doubles", "logits is torch.float64: it must be one of", {"logits": torch.zeros(3, 4, dtype=torch.float64)}),
        ("too few targets", r"targets has shape \(2,\): it must be \[3\]", {"targets": targets[:2]}),
        ("column of targets", r"targets has shape \(3, 1\)", {"targets": targets[:, None]}),
        ("int32 targets", "targets is torch.int32: it must be torch.int64", {"targets": targets.int()}),
        ("float targets", "targets is torch.float32: it must be torch.int64", {"targets": targets.float()}),
        (
            "ignored target",
            "ids from -100 to 0: they must be in 0 .. 3",
            {"targets": targets - targets.new([0, 100, 0])},
        ),
        ("padded target", "ids from 0 to 4", {"targets": targets + targets.new([0, 4, 0])}),
        ("mask shape", r"keep_mask has shape \(3, 5\)", {"keep_mask": torch.ones(3, 5, dtype=torch.bool)}),
        ("mask of rows", r"keep_mask has shape \(3,\)", {"keep_mask": torch.ones(3, dtype=torch.bool)}),
        ("mask dtype", "keep_mask is torch.float32: it must be torch.bool", {"keep_mask": torch.ones(3, 4)}),
        ("chunk size", "chunk_size is 0: it must be a whole number of rows, at least 1, or None", {"chunk_size": 0}),
        ("negative chunk size", "chunk_size is -1: ", {"chunk_size": -1}),
        ("temperature", "temperature is 0.0: it must be a number, finite and above 0", {"temperature": 0.0}),
        ("negative temperature", "temperature is -0.5: ", {"temperature": -0.5}),
        ("NaN temperature", "temperature is nan: ", {"temperature": float("nan")}),
        ("infinite temperature", "temperature is inf: ", {"temperature": float("inf")}),
    ):
        yield pytest.param(match, {"logits": logits, "targets": targets} | call, id=label)


def _wrong_types() -> Iterator[Any]:
    logits, targets = torch.zeros(3, 4), torch.zeros(3, dtype=torch.int64)
    for match, call in (
        ("logits is a list: it must be a tensor", {"logits": logits.tolist()}),
        ("targets is a list: it must be a tensor", {"targets": targets.tolist()}),
        ("keep_mask is a list: it must be a tensor or None", {"keep_mask": logits.bool().tolist()}),
        ("chunk_size is 1.5: it must be a whole number of rows", {"chunk_size": 1.5}),
        ("chunk_size is True: it must be a whole number of rows", {"chunk_size": True}),
        ("chunk_size is '2': it must be a whole number of rows", {"chunk_size": "2"}),
        ("temperature is True: it must be a number", {"temperature": True}),
        ("temperature is '1': it must be a number", {"temperature": "1"}),
        ("temperature is None: it must be a number", {"temperature": None}),
        (r"temperature is tensor\(1.\): it must be a number", {"temperature": torch.tensor(1.0)}),
    ):
        yield pytest.param(match, {"logits": logits, "targets": targets} | call, id=match.partition(":")[0])


@every_kernel
@pytest.mark.parametrize(("match", "call"), list(_wrong_values()))
def test_a_wrong_argument_is_named(subject: Kernel, match: str, call: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=match):
        subject.run(**call)


@every_kernel
@pytest.mark.parametrize(("match", "call"), list(_wrong_types()))
def test_an_argument_of_a_wrong_type_is_named(subject: Kernel, match: str, call: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=match):
        subject.run(**call)


VOCAB_PARALLEL = [param for param in RUNNABLE if param.values[0].contract.tensor_parallel]


@pytest.mark.parametrize("subject", VOCAB_PARALLEL)
def test_a_target_beyond_every_rank_is_named(subject: Kernel) -> None:
    group: Any = _TwoRanks()
    with pytest.raises(ValueError, match=r"targets holds ids from 8 to 8: they must be in 0 \.\. 7"):
        subject.run(torch.zeros(1, 4), torch.tensor([8]), group=group)


@pytest.mark.parametrize("name", ["eager", "peer", "reference"])
def test_a_kernel_without_tensor_parallelism_refuses_a_group(name: str) -> None:
    assert not kernel(name).contract.tensor_parallel
    group: Any = _TwoRanks()
    with pytest.raises(ValueError, match=f"group has 2 ranks: {name} needs the whole vocabulary"):
        kernel(name).run(torch.zeros(1, 4), torch.tensor([7]), group=group)


# --- fused ----------------------------------------------------------------------------------------------------------


def _saved_bytes(**options: Any) -> int:
    """Bytes of the distinct storages that fused's graph keeps, the inputs apart."""
    inputs = make_inputs(tokens=8, vocabulary=64, keep_mask=options.pop("keep_mask", False))
    logits = inputs.logits.requires_grad_()
    storages: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        results = kernel("fused").run(logits, inputs.targets, keep_mask=inputs.keep_mask, **options)
    assert results[0].requires_grad
    for tensor in (logits, inputs.targets):
        storages.pop(tensor.untyped_storage().data_ptr(), None)
    return sum(storages.values())


@pytest.mark.parametrize("keep_mask", [False, True])
@pytest.mark.parametrize("chunk_size", [None, 2])
def test_metric_only_entropy_saves_what_no_entropy_saves(keep_mask: bool, chunk_size: int | None) -> None:
    off = _saved_bytes(keep_mask=keep_mask, chunk_size=chunk_size, with_entropy=False)
    value = _saved_bytes(keep_mask=keep_mask, chunk_size=chunk_size, with_entropy_grad=False)
    gradient = _saved_bytes(keep_mask=keep_mask, chunk_size=chunk_size)
    assert off == value == 8 * 64 * 4
    assert gradient > off


def test_a_second_backward_through_fused_raises() -> None:
    inputs = make_inputs(tokens=4, vocabulary=9)
    logits = inputs.logits.requires_grad_()
    log_prob, _ = kernel("fused").run(logits, inputs.targets)
    log_prob.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="run forward again"):
        log_prob.sum().backward()


@pytest.mark.parametrize(("used", "unused"), [(0, "entropy"), (1, "log_prob")])
def test_a_missing_upstream_gradient_is_a_loud_error(used: int, unused: str, monkeypatch: pytest.MonkeyPatch) -> None:
    materialise = torch.autograd.function.FunctionCtx.set_materialize_grads
    monkeypatch.setattr(
        torch.autograd.function.FunctionCtx, "set_materialize_grads", lambda ctx, _: materialise(ctx, False)
    )
    inputs = make_inputs(tokens=4, vocabulary=9)
    output = kernel("fused").run(inputs.logits.requires_grad_(), inputs.targets)[used]
    assert output is not None
    with pytest.raises(RuntimeError, match=f"no upstream gradient for {unused}.*add 0 \\* {unused}"):
        output.sum().backward()


# --- the registry ---------------------------------------------------------------------------------------------------


def test_a_kernel_is_found_by_name_and_an_unknown_name_lists_the_known_ones() -> None:
    assert [kernel(known.name) for known in KERNELS] == list(KERNELS)
    assert {"reference", "fused", "legacy", "eager", "megatron_fused"} <= {known.name for known in KERNELS}
    with pytest.raises(KeyError, match="unknown kernel 'quick'; known are fused, legacy"):
        kernel("quick")
