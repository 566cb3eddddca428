"""The kernels on a CUDA device against the float64 oracle: precision, layouts, sizes beyond 32 bits, bad input."""

import math
from collections.abc import Callable
from functools import lru_cache
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist

from runners.instruments.accuracy import Yardstick, bf16_grid_share, numeric_metrics, permuted, yardstick
from runners.instruments.cuda_inputs import ROWS, PlacedInputs, drawn_frame, on_device, place, worst_rows
from runners.instruments.subject import Branches, Options, Subject, branches
from runners.kernels import online
from runners.kernels.faults.mutation import edited
from runners.kernels.inputs import Distribution, Inputs, make_inputs
from runners.kernels.reference import Reference
from runners.kernels.registry import kernel
from service.detection.gates import GateFacts, beyond_gates
from service.wire import Case

pytestmark = pytest.mark.gpu
DISTRIBUTIONS = get_args(Distribution)
ODD = 32769
LARGE = 151936
DTYPES = ("float32", "bfloat16", "float16")


@lru_cache(maxsize=4)
def _yardstick(case: Case) -> Yardstick:
    return yardstick(place(case, "cpu").drawn, case.temperature)


def _of_drawn_rows(case: Case) -> Yardstick:
    return _yardstick(case.model_copy(update={"tokens": min(case.tokens, ROWS), "entropy": "gradient"}))


def _oracle_on(yard: Yardstick, device: torch.device) -> Reference:
    return Reference(*(getattr(yard.oracle, name).to(device) for name in Reference.__slots__))


def _worst(name: str, case: Case, device: torch.device, **options: Any) -> tuple[PlacedInputs, Branches]:
    """The inputs of a case and a kernel's worst results of all rows, in the frame of the drawn rows."""
    placed = place(case, device)
    subject = Subject(name, lambda *given, **keywords: kernel(name).run(*given, **(keywords | options)))
    how = Options(case.entropy, case.chunk_size, case.temperature)
    result = branches(subject, placed.whole, how)
    rows = worst_rows(result, _oracle_on(_of_drawn_rows(case), device), placed.drawn.logits.shape[0])
    return placed, drawn_frame(result, rows)


def _metrics(name: str, case: Case, device: torch.device) -> dict[str, float]:
    placed, result = _worst(name, case, device)
    shuffled_inputs, order = permuted(placed.drawn)
    how = Options(case.entropy, case.chunk_size, case.temperature)
    subject = Subject(name, kernel(name).run)
    shuffled = branches(subject, on_device(shuffled_inputs, device), how)
    shuffled = drawn_frame(shuffled, torch.arange(len(shuffled.log_prob)))
    return numeric_metrics(placed.drawn, how, result, shuffled, order, _of_drawn_rows(case))


def _beyond_gates(metrics: dict[str, float], case: Case) -> str | None:
    facts = GateFacts(
        distribution=case.distribution,
        logits_abs_max=metrics["logits_abs_max"],
        vocabulary=case.vocabulary,
        peer_target_error=metrics["peer_tgt_rel_max"],
    )
    return beyond_gates(metrics, facts, dtype=case.dtype, gradient="float32")


# --- Precision ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep_mask", [False, True])
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("name", ["online", "fused"])
def test_every_distribution_is_within_the_gates(
    name: str, distribution: Distribution, keep_mask: bool, device: torch.device
) -> None:
    case = Case(tokens=130, vocabulary=ODD, distribution=distribution, keep_mask=keep_mask or distribution == "masked")
    metrics = _metrics(name, case, device)
    assert _beyond_gates(metrics, case) == ""
    counts = ("nonfinite_unexpected", "grad_coverage_miss_lp", "grad_leak_lp", "grad_leak_ent", "lp_pos_count")
    assert {count: metrics[count] for count in counts} == dict.fromkeys(counts, 0.0)
    if name == "online":
        rounding = 1e-4 if distribution == "confident" else 2e-6  # 1 - p is small beside what rounds
        assert max(metrics["g_rel_l2_lp"], metrics["g_rel_l2_ent"]) <= rounding


@pytest.mark.parametrize("keep_mask", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [1, 2, 1000, 4095, 4096, 4097, 50257, LARGE])
def test_online_is_right_at_every_vocabulary_and_dtype(
    vocabulary: int, dtype: Any, keep_mask: bool, device: torch.device
) -> None:
    case = Case(tokens=67, vocabulary=vocabulary, dtype=dtype, keep_mask=keep_mask, temperature=0.7)
    metrics = _metrics("online", case, device)
    if vocabulary >= 1000:  # of two ids one can have all the probability that float32 has
        assert _beyond_gates(metrics, case) == ""
    assert metrics["nonfinite_unexpected"] == 0
    # A half-precision gradient is compared with the oracle rounded once: what differs is the rounding of ties.
    assert metrics["g_rel_l2_lp"] <= {"float32": 2e-6, "bfloat16": 2**-8, "float16": 2**-11}[dtype]


@pytest.mark.parametrize("mode", ["off", "value", "gradient"])
@pytest.mark.parametrize("name", ["online", "fused", "legacy"])
def test_every_entropy_mode_gives_the_same_log_prob(name: str, mode: Any, device: torch.device) -> None:
    case = Case(tokens=130, vocabulary=ODD, entropy=mode)
    _, result = _worst(name, case, device)
    oracle = _of_drawn_rows(case).oracle
    assert torch.allclose(result.log_prob.double(), oracle.log_prob, rtol=0, atol=2e-5)
    assert (result.entropy is None) == (mode == "off")
    assert (result.g_entropy is None) == (mode != "gradient")


def test_legacy_rounds_its_log_prob_gradient_to_bfloat16_on_cuda_and_fused_does_not(device: torch.device) -> None:
    case = Case(tokens=64, vocabulary=ODD, distribution="flat", entropy="off")
    shares = {name: _metrics(name, case, device)["g_bf16_grid"] for name in ("legacy", "fused", "online")}
    assert shares["legacy"] == 1.0
    assert max(shares["fused"], shares["online"]) <= 1e-2
    _, legacy = _worst("legacy", case, device)
    assert legacy.g_log_prob is not None
    assert bf16_grid_share(legacy.g_log_prob) == 1.0


@pytest.mark.parametrize("name", ["online", "fused"])
def test_equal_calls_give_equal_bits(name: str, device: torch.device) -> None:
    case = Case(tokens=130, vocabulary=ODD, keep_mask=True)
    inputs = place(case, device).whole
    first, *others = (branches(Subject(name, kernel(name).run), inputs, Options()) for _ in range(5))
    for other in others:
        assert all(torch.equal(getattr(first, part), getattr(other, part)) for part in Branches.__slots__)


@pytest.mark.parametrize("chunk_size", [1, 7, 130, 500])
def test_no_chunk_size_changes_what_online_gives(chunk_size: int, device: torch.device) -> None:
    inputs = place(Case(tokens=130, vocabulary=1000), device).whole
    subject = Subject("online", kernel("online").run)
    whole, chunked = (branches(subject, inputs, Options(chunk_size=size)) for size in (None, chunk_size))
    assert all(torch.equal(getattr(whole, part), getattr(chunked, part)) for part in Branches.__slots__)


# --- Layouts --------------------------------------------------------------------------------------------------------


def _step(logits: torch.Tensor, inputs: Inputs, **options: Any) -> tuple[torch.Tensor, ...]:
    """Log-prob, entropy and the gradient of both of `online`."""
    leaf = logits.detach().requires_grad_()
    log_prob, entropy = kernel("online").run(leaf, inputs.targets, keep_mask=inputs.keep_mask, **options)
    assert entropy is not None
    upstreams = (inputs.upstream_log_prob, inputs.upstream_entropy)
    (gradient,) = torch.autograd.grad((log_prob, entropy), leaf, upstreams)
    return log_prob.detach(), entropy.detach(), gradient


@pytest.mark.parametrize("dtype", DTYPES)
def test_strides_of_any_kind_change_nothing(dtype: Any, device: torch.device) -> None:
    inputs = place(Case(tokens=37, vocabulary=4099, dtype=dtype, keep_mask=True), device).whole
    wide = torch.full((37, 4099 + 5), torch.nan, dtype=inputs.logits.dtype, device=device)
    wide[:, 3:-2] = inputs.logits
    every_other = torch.full((74, 4099), torch.nan, dtype=inputs.logits.dtype, device=device)
    every_other[::2] = inputs.logits
    wanted = _step(inputs.logits, inputs)
    for laid_out in (wide[:, 3:-2], every_other[::2], inputs.logits.t().contiguous().t()):
        for got, right in zip(_step(laid_out, inputs), wanted, strict=True):
            torch.testing.assert_close(got, right, rtol=2**-7 if got.dtype != torch.float32 else 1e-5, atol=2e-6)


def test_a_gradient_in_the_logits_place_is_the_same(device: torch.device) -> None:
    inputs = place(Case(tokens=67, vocabulary=ODD, keep_mask=True), device).whole
    wanted = _step(inputs.logits, inputs)[2]
    logits = inputs.logits.clone()
    gradient = _step(logits, inputs, overwrite_logits=True)[2]
    assert gradient.data_ptr() == logits.data_ptr()
    assert torch.equal(gradient, wanted)


def test_no_token_and_a_dead_row_of_nan_are_fine(device: torch.device) -> None:
    none = on_device(make_inputs(tokens=0, vocabulary=77), device)
    assert [tuple(each.shape) for each in _step(none.logits, none)] == [(0,), (0,), (0, 77)]
    inputs = on_device(make_inputs(tokens=9, vocabulary=77), device)
    assert inputs.upstream_log_prob[0] == inputs.upstream_entropy[0] == 0
    inputs.logits[0] = torch.nan
    gradient = _step(inputs.logits, inputs)[2]
    assert bool((gradient[0] == 0).all())
    assert bool(gradient[1:].isfinite().all())


def test_another_current_stream_is_used(device: torch.device) -> None:
    inputs = place(Case(tokens=67, vocabulary=ODD), device).whole
    wanted = _step(inputs.logits, inputs)
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        got = _step(inputs.logits, inputs)
    torch.cuda.synchronize(device)
    assert all(torch.equal(one, other) for one, other in zip(got, wanted, strict=True))


# --- Beyond 32 bits -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep_mask", [False, True])
@pytest.mark.parametrize(("tokens", "elements"), [(16384, 1 << 31), (32768, 1 << 32)])
def test_rows_beyond_32_bit_offsets_are_right(
    tokens: int, elements: int, keep_mask: bool, device: torch.device, needs_bytes: Callable[[int], None]
) -> None:
    assert tokens * LARGE > elements
    needs_bytes((9 + 2 * keep_mask) * tokens * LARGE)  # bfloat16 inputs, their copy, both gradients; masks, and room
    case = Case(tokens=tokens, vocabulary=LARGE, dtype="bfloat16", keep_mask=keep_mask)
    placed, result = _worst("online", case, device)
    oracle = _of_drawn_rows(case).oracle
    assert torch.allclose(result.log_prob.double(), oracle.log_prob, rtol=0, atol=5e-5)
    assert result.entropy is not None
    assert torch.allclose(result.entropy.double(), oracle.entropy, rtol=0, atol=5e-5)
    for gradient, truth in ((result.g_log_prob, oracle.g_log_prob), (result.g_entropy, oracle.g_entropy)):
        assert gradient is not None
        assert float((gradient.double() - truth).norm() / truth.norm()) <= 2**-8
    assert len(placed.drawn.targets) == ROWS


def _with_edit(edit: tuple[str, str], directory: Path) -> Any:
    """A copy of the module of Triton kernels with an exact edit, in a file, where Triton finds its source."""
    source = edited(Path(str(find_spec("runners.kernels.online_triton").origin)).read_text(encoding="utf-8"), [edit])
    path = directory / "online_triton_edited.py"
    path.write_text(source, encoding="utf-8")
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_32_bit_row_offset_shows_in_the_rows_beyond(
    device: torch.device, needs_bytes: Callable[[int], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault 12 of the seeded ones. The logits lie 2^31 elements into a buffer, so that an offset that has wrapped
    around reads zeros of ours."""
    tokens, first_beyond = 16384, -(-(1 << 31) // LARGE)
    needs_bytes(3 * ((1 << 31) + tokens * LARGE))
    buffer = torch.zeros((1 << 31) + tokens * LARGE, dtype=torch.bfloat16, device=device)
    logits = buffer[1 << 31 :].view(tokens, LARGE)
    logits[:, 7] = 20.0
    targets = torch.full((tokens,), 7, device=device)
    with torch.no_grad():
        right, _ = online.run(logits, targets, with_entropy=False)
        faulty = _with_edit(("row = tl.program_id(0).to(tl.int64)", "row = tl.program_id(0)"), tmp_path)
        monkeypatch.setattr(online, "_tiles", lambda _logits: faulty)
        wrong, _ = online.run(logits, targets, with_entropy=False)
    expected = 20 - math.log(math.exp(20) + LARGE - 1)
    assert torch.allclose(right.double(), torch.full_like(right, expected).double(), rtol=0, atol=1e-5)
    assert torch.equal(wrong[:first_beyond], right[:first_beyond])
    assert bool(((wrong[first_beyond + 1 :] - right[first_beyond + 1 :]).abs() > 1).all())


# --- Bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", [-1, -100, 40, 1 << 40])
@pytest.mark.parametrize("name", ["online", "fused", "legacy", "eager"])
def test_a_target_out_of_range_is_an_error_that_leaves_the_device_usable(
    name: str, target: int, device: torch.device
) -> None:
    logits = torch.zeros(3, 40, device=device, requires_grad=True)
    bad, good = (torch.tensor([0, value, 2], device=device) for value in (target, 1))
    with pytest.raises(ValueError, match=r"targets holds ids from .* they must be in 0 \.\. 39"):
        kernel(name).run(logits, bad)
    torch.cuda.synchronize(device)  # a device assert would come to light here
    log_prob, _ = kernel(name).run(logits, good)
    assert log_prob.tolist() == pytest.approx([-math.log(40)] * 3)


def test_tensors_on_different_devices_are_an_error(device: torch.device) -> None:
    logits = torch.zeros(3, 40, device=device)
    with pytest.raises(ValueError, match="targets is on cpu: it must be on cuda"):
        kernel("online").run(logits, torch.zeros(3, dtype=torch.int64))
    mask = torch.ones(3, 40, dtype=torch.bool)
    with pytest.raises(ValueError, match="keep_mask is on cpu: it must be on cuda"):
        kernel("online").run(logits, torch.zeros(3, dtype=torch.int64, device=device), keep_mask=mask)


# --- A group --------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not dist.is_nccl_available(), reason="needs a CUDA device and NCCL")
def test_a_group_of_one_gives_what_no_group_gives(device: torch.device) -> None:
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    try:
        inputs = place(Case(tokens=67, vocabulary=1000, keep_mask=True), device).whole
        alone, grouped = _step(inputs.logits, inputs), _step(inputs.logits, inputs, group=dist.group.WORLD)
        assert all(torch.equal(one, other) for one, other in zip(alone, grouped, strict=True))
    finally:
        dist.destroy_process_group()
