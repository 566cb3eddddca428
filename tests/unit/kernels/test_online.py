"""What `online` promises beside what every kernel does: memory to the byte, accuracy, overwriting, threads."""

import dataclasses
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any, get_args

import pytest
import torch

from runners.instruments.memory import MemoryReading, measure_memory
from runners.instruments.subject import Options, Subject
from runners.kernels import online
from runners.kernels.inputs import Distribution, Inputs, make_inputs
from runners.kernels.reference import Reference, reference
from service.wire import EntropyMode

MIB = 1 << 20
DISTRIBUTIONS = get_args(Distribution)
MODES: tuple[EntropyMode, ...] = get_args(EntropyMode)


# --- Memory ---------------------------------------------------------------------------------------------------------


@cache
def _sized(tokens: int, vocabulary: int, dtype: torch.dtype, keep_mask: bool) -> Inputs:
    return make_inputs(tokens=tokens, vocabulary=vocabulary, dtype=dtype, keep_mask=keep_mask)


def _memory(inputs: Inputs, how: Options, **fixed: Any) -> MemoryReading:
    return measure_memory(Subject("online", partial(online.run, **fixed)), inputs, how)


def _limit(inputs: Inputs, gradient_bytes: int) -> float:
    """The gradient and max(2 % of U, 1 MiB)."""
    return gradient_bytes + max(0.02 * inputs.logits.numel() * 4, MIB)


SAVED = {("off", False): 8, ("value", False): 8, ("gradient", False): 12} | {
    ("off", True): 8,
    ("value", True): 8,
    ("gradient", True): 16,
}
OPTIONS = [{}, {"chunk_size": 3}, {"temperature": 0.7}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("keep_mask", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_peak_is_the_gradient_and_a_row_keeps_16_bytes_at_most(
    dtype: torch.dtype, mode: EntropyMode, keep_mask: bool, options: dict[str, Any]
) -> None:
    inputs = _sized(64, 32769, dtype, keep_mask)
    memory = _memory(inputs, Options(mode, **options))
    assert memory.saved_bytes == SAVED[mode, keep_mask] * 64 <= 16 * 64
    assert memory.step_peak_bytes <= _limit(inputs, inputs.logits.nbytes)
    assert memory.forward_peak_bytes <= _limit(inputs, 0)
    assert memory.largest_allocation_bytes == inputs.logits.nbytes


@pytest.mark.parametrize(("tokens", "vocabulary"), [(1, 1000), (256, 1000), (56, 151936), (2048, 4096)])
@pytest.mark.parametrize("keep_mask", [False, True])
def test_the_peak_holds_at_every_size(tokens: int, vocabulary: int, keep_mask: bool) -> None:
    inputs = _sized(tokens, vocabulary, torch.float32, keep_mask)
    memory = _memory(inputs, Options("gradient"))
    assert memory.step_peak_bytes <= _limit(inputs, inputs.logits.nbytes)


def test_the_peak_needs_no_more_than_two_hundredths_of_large_logits() -> None:
    inputs = _sized(512, 151936, torch.bfloat16, False)
    memory = _memory(inputs, Options("gradient"))
    assert inputs.logits.numel() * 4 * 0.02 > MIB
    assert memory.step_peak_bytes <= _limit(inputs, inputs.logits.nbytes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("keep_mask", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_a_gradient_in_the_logits_place_costs_nothing(mode: EntropyMode, keep_mask: bool, dtype: torch.dtype) -> None:
    inputs = _sized(64, 32769, dtype, keep_mask)
    memory = _memory(inputs, Options(mode), overwrite_logits=True)
    assert memory.step_peak_bytes <= _limit(inputs, 0)


# --- overwrite_logits -----------------------------------------------------------------------------------------------


def _step(inputs: Inputs, **options: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits, log-prob, entropy and the gradient of both."""
    logits = inputs.logits.detach().clone().requires_grad_()
    log_prob, entropy = online.run(logits, inputs.targets, keep_mask=inputs.keep_mask, **options)
    assert entropy is not None
    upstreams = (inputs.upstream_log_prob, inputs.upstream_entropy)
    (gradient,) = torch.autograd.grad((log_prob, entropy), logits, upstreams, retain_graph=True)
    return logits, log_prob, entropy, gradient


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("keep_mask", [False, True])
def test_overwriting_gives_the_same_gradient_in_the_logits_memory(keep_mask: bool, dtype: torch.dtype) -> None:
    inputs = make_inputs(tokens=9, vocabulary=70_001, keep_mask=keep_mask, dtype=dtype)
    _, _, _, expected = _step(inputs)
    logits, log_prob, _, gradient = _step(inputs, overwrite_logits=True)
    assert torch.equal(gradient, expected)
    assert gradient.data_ptr() == logits.data_ptr()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        log_prob.sum().backward()


def test_an_operation_that_still_needs_overwritten_logits_raises() -> None:
    inputs = make_inputs(tokens=3, vocabulary=9)
    leaf = inputs.logits.requires_grad_()
    logits = leaf.tanh()  # saves its result
    log_prob, _ = online.run(logits, inputs.targets, overwrite_logits=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        log_prob.sum().backward()


def test_logits_whose_elements_share_memory_are_not_overwritten() -> None:
    logits = torch.zeros(1, 9).expand(3, 9).requires_grad_()
    targets = torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"logits has strides \(0, 1\): overwrite_logits needs a place for each"):
        online.run(logits, targets, overwrite_logits=True)
    assert online.run(logits, targets)[0].shape == (3,)


# --- Accuracy -------------------------------------------------------------------------------------------------------


def _oracle(inputs: Inputs, temperature: float = 1.0) -> Reference:
    return reference(
        inputs.logits,
        inputs.targets,
        upstream_log_prob=inputs.upstream_log_prob,
        upstream_entropy=inputs.upstream_entropy,
        keep_mask=inputs.keep_mask,
        temperature=temperature,
    )


def _relative(gradient: torch.Tensor, truth: torch.Tensor, upstream: torch.Tensor) -> float:
    least = upstream.double().norm() * 2**-24
    return float((gradient.double() - truth).norm() / truth.norm().maximum(least))


def _errors(inputs: Inputs, **options: Any) -> dict[str, float]:
    """Against the oracle: outputs in nats, each output's gradient alone as a relative L2 error."""
    oracle = _oracle(inputs, options.get("temperature", 1.0))
    logits = inputs.logits.detach().requires_grad_()
    log_prob, entropy = online.run(logits, inputs.targets, keep_mask=inputs.keep_mask, **options)
    assert entropy is not None
    (g_log_prob,) = torch.autograd.grad(log_prob, logits, inputs.upstream_log_prob, retain_graph=True)
    (g_entropy,) = torch.autograd.grad(entropy, logits, inputs.upstream_entropy)
    return {
        "log_prob": (log_prob - oracle.log_prob).abs().max().item(),
        "entropy": (entropy - oracle.entropy).abs().max().item(),
        "g_log_prob": _relative(g_log_prob, oracle.g_log_prob, inputs.upstream_log_prob),
        "g_entropy": _relative(g_entropy, oracle.g_entropy, inputs.upstream_entropy),
    }


def _too_large(errors: dict[str, float], *, gradient: float = 1e-6) -> dict[str, float]:
    """Log-prob within its gate for logits of 32 to 64, entropy within a tenth of its own."""
    limits = {"log_prob": 8.6e-6, "entropy": 2e-6, "g_log_prob": gradient, "g_entropy": gradient}
    return {name: error for name, error in errors.items() if not error <= limits[name]}


@pytest.mark.parametrize("keep_mask", [False, True])
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_both_gradients_are_accurate_on_every_distribution(distribution: Distribution, keep_mask: bool) -> None:
    inputs = make_inputs(tokens=16, vocabulary=32769, distribution=distribution, keep_mask=keep_mask)
    # A confident target's gradient is 1 - p: an ulp of p is 1e-5 of it.
    gradient = 1e-5 if distribution == "confident" else 1e-6
    assert _too_large(_errors(inputs), gradient=gradient) == {}


@pytest.mark.parametrize("keep_mask", [False, True])
@pytest.mark.parametrize("vocabulary", [1, 2, 98_305, 196_609, 262_144])
def test_rows_of_one_tile_and_of_several_are_accurate(vocabulary: int, keep_mask: bool) -> None:
    inputs = make_inputs(tokens=5, vocabulary=vocabulary, keep_mask=keep_mask)
    assert _too_large(_errors(inputs, temperature=0.7)) == {}


@pytest.mark.parametrize("nothing", [-torch.inf, torch.finfo(torch.float32).min])
def test_whole_tiles_of_impossible_ids_count_for_nothing(nothing: float) -> None:
    few = make_inputs(tokens=5, vocabulary=50)
    logits = torch.full((5, 300_000), nothing)
    logits[:, 250_000:250_050] = few.logits
    inputs = dataclasses.replace(few, logits=logits, targets=few.targets + 250_000)
    many, alone = _step(inputs), _step(few)
    for wide, narrow in zip(many[1:3], alone[1:3], strict=True):
        assert torch.allclose(wide, narrow, rtol=1e-6, atol=1e-6)
    assert torch.allclose(many[3][:, 250_000:250_050], alone[3], rtol=1e-5, atol=1e-6)
    assert (many[3][:, :250_000] == 0).all()


@pytest.mark.parametrize("keep_mask", [False, True])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_impossible_ids_get_an_exactly_zero_gradient_in_every_mode(with_entropy: bool, keep_mask: bool) -> None:
    inputs = make_inputs(tokens=8, vocabulary=50, distribution="neg_inf", keep_mask=keep_mask)
    logits = inputs.logits.requires_grad_()
    log_prob, entropy = online.run(logits, inputs.targets, keep_mask=inputs.keep_mask, with_entropy=with_entropy)
    loss = (log_prob * inputs.upstream_log_prob).sum()
    if entropy is not None:
        loss = loss + (entropy * inputs.upstream_entropy).sum()
    (gradient,) = torch.autograd.grad(loss, logits)
    assert (gradient[torch.isneginf(logits)] == 0).all()
    assert (gradient != 0).any()


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_what_the_mask_drops_cannot_reach_the_log_prob(poison: float) -> None:
    inputs = make_inputs(tokens=4, vocabulary=300, keep_mask=True)
    assert inputs.keep_mask is not None
    dropped = ~inputs.keep_mask.scatter(1, inputs.targets[:, None], True)
    logits = inputs.logits.requires_grad_()
    poisoned = inputs.logits.detach().masked_fill(dropped, poison).requires_grad_()
    results = [
        online.run(each, inputs.targets, keep_mask=inputs.keep_mask, with_entropy=False)[0]
        for each in (logits, poisoned)
    ]
    assert torch.equal(*results)
    gradients = [
        torch.autograd.grad(result, each, inputs.upstream_log_prob)[0]
        for result, each in zip(results, (logits, poisoned), strict=True)
    ]
    assert torch.equal(*gradients)


def test_a_target_of_probability_zero_has_no_finite_log_prob_and_a_finite_gradient() -> None:
    inputs = make_inputs(tokens=4, vocabulary=30)
    inputs.logits.scatter_(1, inputs.targets[:, None], -torch.inf)
    _, log_prob, entropy, gradient = _step(inputs)
    assert torch.equal(log_prob, torch.full((4,), -torch.inf))
    assert torch.isfinite(entropy).all()
    assert torch.isfinite(gradient).all()


def test_float16_logits_of_any_size_are_summed_in_float32() -> None:
    inputs = make_inputs(tokens=4, vocabulary=70_000, dtype=torch.float16, distribution="flat")
    assert _too_large({**_errors(inputs), "g_log_prob": 0.0, "g_entropy": 0.0}) == {}


# --- Autograd -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep_mask", [False, True])
def test_a_second_backward_gives_the_same_bits(keep_mask: bool) -> None:
    inputs = make_inputs(tokens=9, vocabulary=70_001, keep_mask=keep_mask)
    logits, log_prob, entropy, first = _step(inputs)
    upstreams = (inputs.upstream_log_prob, inputs.upstream_entropy)
    assert torch.equal(first, torch.autograd.grad((log_prob, entropy), logits, upstreams)[0])


@pytest.mark.parametrize("keep_mask", [False, True])
def test_an_output_left_out_counts_as_one_with_a_zero_gradient(keep_mask: bool) -> None:
    inputs = make_inputs(tokens=9, vocabulary=101, keep_mask=keep_mask)
    logits, log_prob, entropy, _ = _step(inputs)
    upstreams, zeros = (inputs.upstream_log_prob, inputs.upstream_entropy), torch.zeros(9)
    for alone, pair in ((0, (upstreams[0], zeros)), (1, (zeros, upstreams[1]))):
        output = (log_prob, entropy)[alone]
        (gradient,) = torch.autograd.grad(output, logits, upstreams[alone], retain_graph=True)
        (both,) = torch.autograd.grad((log_prob, entropy), logits, pair, retain_graph=True)
        assert torch.allclose(gradient, both, rtol=1e-5, atol=1e-7)
        assert (gradient != 0).any()


def test_a_gradient_of_the_gradient_is_refused() -> None:
    inputs = make_inputs(tokens=3, vocabulary=9)
    logits = inputs.logits.requires_grad_()
    upstream = inputs.upstream_log_prob.requires_grad_()
    (gradient,) = torch.autograd.grad(online.run(logits, inputs.targets)[0], logits, upstream, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_changes_nothing(dtype: torch.dtype) -> None:
    inputs = make_inputs(tokens=9, vocabulary=70_001, keep_mask=True, dtype=dtype)
    plain = _step(inputs)
    with torch.autocast("cpu", torch.bfloat16):
        autocast = _step(inputs)
    assert all(torch.equal(one, other) for one, other in zip(plain, autocast, strict=True))


def test_calls_from_several_threads_do_not_meet() -> None:
    cases = [make_inputs(tokens=9, vocabulary=70_001, keep_mask=True, seed=seed) for seed in range(4)]
    alone = [_step(case)[1:] for case in cases]
    with ThreadPoolExecutor(4) as pool:
        together = [result[1:] for result in pool.map(_step, cases)]
    for one, other in zip(alone, together, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_cuda_device_without_triton_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnCuda:
        is_cuda = True

    monkeypatch.setitem(sys.modules, "runners.kernels.online_triton", None)
    monkeypatch.delattr("runners.kernels.online_triton", raising=False)  # where another test has imported it
    logits: Any = OnCuda()
    with pytest.raises(ModuleNotFoundError, match=r"online needs triton on CUDA.*pip install triton"):
        online._tiles(logits)
