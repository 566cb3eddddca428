"""The instruments on a CUDA device: the ledger to the byte, device time, work that escapes, a whole measurement."""

import statistics
from typing import Any

import pytest
import torch

from runners.instruments.cuda_device import CudaTimer, device_facts
from runners.instruments.cuda_inputs import place
from runners.instruments.cuda_measure import Instruments, measure_case_on_device
from runners.instruments.cuda_memory import CudaMemoryReading, measure_cuda_memory
from runners.instruments.cuda_timing import escape_fault, measure_device_time
from runners.instruments.stopping import StoppingRule
from runners.instruments.subject import Options, Subject
from runners.kernels.faults.mutation import mutated
from runners.kernels.inputs import Inputs
from runners.kernels.registry import kernel
from service.wire import Case

pytestmark = pytest.mark.gpu
N, V = 64, 4096
U = N * V * 4
MIB = 1 << 20
RULE = StoppingRule(least=10, seconds=1.0)


@pytest.fixture(scope="module")
def timer() -> CudaTimer:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return CudaTimer.of(torch.device("cuda", torch.cuda.current_device()))


@pytest.fixture
def inputs(device: torch.device) -> Inputs:
    return place(Case(tokens=N, vocabulary=V), device).whole


def _built_in(name: str) -> Subject:
    return Subject(name, kernel(name).run, device=f"cuda:{torch.cuda.current_device()}")


# --- Memory ---------------------------------------------------------------------------------------------------------


class _KnownPattern(torch.autograd.Function):
    """Forward: 1000 bytes kept, 500 for a while, 4 N the output. Backward: 3 U for a while, U the gradient."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(logits.new_empty(1000, dtype=torch.uint8))
        temporary = logits.new_empty(500, dtype=torch.uint8)
        del temporary
        return logits.new_empty(N)

    @staticmethod
    def backward(_ctx: Any, upstream: torch.Tensor) -> torch.Tensor:
        temporary = upstream.new_empty(3 * U, dtype=torch.uint8)
        gradient = upstream.new_empty(N, V)
        del temporary
        return gradient


def _known_pattern(logits: torch.Tensor, targets: torch.Tensor, **keywords: Any) -> tuple[torch.Tensor, None]:
    return _KnownPattern.apply(logits), None


def test_a_known_allocation_pattern_is_read_to_the_byte(inputs: Inputs) -> None:
    got = measure_cuda_memory(Subject("known", _known_pattern), inputs, Options("off"))
    assert got == CudaMemoryReading(
        forward_peak_bytes=1500,
        step_peak_bytes=1000 + 4 * N + 4 * U,
        saved_bytes=1000,
        largest_allocation_bytes=3 * U,
        allocations=5,
        allocated_peak_bytes=1024 + 512 + 4 * U,
        reserved_peak_bytes=got.reserved_peak_bytes,
        allocation_retries=0,
    )
    assert got.reserved_peak_bytes % (2 * MIB) == 0


def test_readings_repeat(inputs: Inputs) -> None:
    readings = [measure_cuda_memory(_built_in("fused"), inputs, Options()) for _ in range(3)]
    assert readings[1] == readings[2]


def test_what_another_stream_allocates_counts_too(inputs: Inputs, device: torch.device) -> None:
    side = torch.cuda.Stream(device)

    def run(logits: torch.Tensor, targets: torch.Tensor, **keywords: Any) -> Any:
        with torch.cuda.stream(side):
            held = torch.empty(5 * U, dtype=torch.uint8, device=device)
        torch.cuda.current_stream(device).wait_stream(side)
        del held
        return logits.sum(1), None

    assert measure_cuda_memory(Subject("aside", run), inputs, Options("off")).forward_peak_bytes >= 5 * U


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("keep_mask", [False, True])
@pytest.mark.parametrize("mode", ["off", "value", "gradient"])
def test_online_peaks_at_its_gradient_and_keeps_16_bytes_a_row(
    mode: Any, keep_mask: bool, dtype: Any, device: torch.device
) -> None:
    case = Case(tokens=512, vocabulary=151936, dtype=dtype, keep_mask=keep_mask)
    placed, how = place(case, device), Options(mode)
    measure_cuda_memory(_built_in("online"), placed.whole, how)
    got = measure_cuda_memory(_built_in("online"), placed.whole, how)
    assert got.saved_bytes <= 16 * case.tokens
    assert got.step_peak_bytes <= placed.whole.logits.nbytes + max(0.02 * case.logits_unit_bytes, MIB)
    assert got.largest_allocation_bytes == placed.whole.logits.nbytes


def test_running_out_of_memory_is_an_outcome_and_the_next_case_finds_room(
    timer: CudaTimer, device: torch.device
) -> None:
    def greedy(logits: torch.Tensor, targets: torch.Tensor, **keywords: Any) -> Any:
        held = [logits.new_empty(1 << 40, dtype=torch.uint8)]
        return held[0], None

    case = Case(tokens=N, vocabulary=V)
    measurement = measure_case_on_device(Subject("greedy", greedy, device=str(device)), case, Instruments(timer, RULE))
    assert measurement.outcome == "out_of_memory"
    assert measurement.notes["outcome"].startswith("OutOfMemoryError: CUDA out of memory")
    assert measure_case_on_device(_built_in("online"), case, Instruments(timer, RULE)).outcome == "ok"


# --- Time -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def large(device: torch.device) -> Inputs:
    """U of 1.2 GB: a pass over it takes a good part of a millisecond."""
    return place(Case(tokens=2048, vocabulary=151936), device).whole


@pytest.mark.parametrize("name", ["online", "fused", "legacy"])
def test_an_honest_kernel_lets_no_work_escape(name: str, large: Inputs, timer: CudaTimer) -> None:
    assert escape_fault(_built_in(name), large, Options(), timer) is None


@pytest.mark.parametrize("joined", [False, True])
def test_work_on_a_side_stream_escapes_unless_the_current_stream_waits_for_it(
    joined: bool, large: Inputs, timer: CudaTimer, device: torch.device
) -> None:
    side = torch.cuda.Stream(device)

    def run(logits: torch.Tensor, targets: torch.Tensor, **keywords: Any) -> Any:
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            result = kernel("fused").run(logits, targets, **keywords)
        if joined:
            torch.cuda.current_stream(device).wait_stream(side)
        return result

    def backward_here(logits: torch.Tensor, targets: torch.Tensor, **keywords: Any) -> Any:
        with torch.no_grad():
            log_prob, _ = run(logits, targets, **keywords)
        return log_prob + logits[:, 0] * 0, None  # a backward of its own, that does not wait for the side stream

    fault = escape_fault(Subject("aside", backward_here), large, Options("off"), timer)
    assert (fault is None) is joined
    if fault is not None:
        assert "the device works on for" in fault
    torch.cuda.synchronize(device)


def test_the_fault_of_work_on_a_side_stream_is_flagged(large: Inputs, timer: CudaTimer, device: torch.device) -> None:
    """Fault 17 of the seeded ones: autograd has the current stream wait after a backward, but not after a forward."""
    edit = (
        "    log_prob, entropy = _LogProbEntropy.apply(",
        "    side = torch.cuda.Stream(logits.device)\n"
        "    side.wait_stream(torch.cuda.current_stream(logits.device))\n"
        "    with torch.cuda.stream(side):\n"
        "        log_prob, entropy = _LogProbEntropy.apply(",
    )
    mutant = mutated(kernel("fused"), [edit])
    fault = escape_fault(Subject("fused", mutant.run), large, Options(), timer)
    assert fault is not None
    assert fault.startswith("forward: the device works on for")
    torch.cuda.synchronize(device)


def test_times_are_plausible_and_below_the_roofline(large: Inputs, timer: CudaTimer) -> None:
    times = measure_device_time(_built_in("online"), large, Options(), timer, rule=RULE)
    assert times.fault is None
    samples = times.samples
    assert len(samples["step_device_seconds"]) >= RULE.least
    assert max(samples["forward_device_seconds"]) < min(samples["step_device_seconds"])
    assert 1e-5 < min(samples["step_device_seconds"]) < 1.0
    if timer.memory_bytes_per_second is not None:
        assert 0.05 < samples["step_roofline_share"][0] <= 1.02


def test_a_cold_cache_is_slower_than_a_warm_one(device: torch.device, timer: CudaTimer) -> None:
    """Inputs of an eighth of the cache, so that all three sets stay in it unless they are evicted."""

    class Warm(CudaTimer):
        def evict(self) -> None:
            torch.cuda._sleep(200_000)  # as long as an eviction, so that launching the kernel is hidden as well

    tokens = max(1, timer.cache_bytes // 8 // (151936 * 4))
    inputs = place(Case(tokens=tokens, vocabulary=151936, entropy="off"), device).whole
    cold = CudaTimer(device, timer.cache_bytes, None, None, {}, timer._evicting)
    warm = Warm(device, timer.cache_bytes, None, None)
    subject = Subject("reads", lambda logits, targets, **keywords: (logits.sum(1), None))
    medians = [
        statistics.median(
            measure_device_time(subject, inputs, Options("off"), each, rule=RULE).samples["forward_device_seconds"]
        )
        for each in (cold, warm)
    ]
    assert medians[0] > medians[1]


def test_the_clocks_are_watched(timer: CudaTimer) -> None:
    if timer.clocks is None:
        pytest.skip(f"needs a CUDA device whose clocks can be read: {timer.doubts['clocks']}")
    assert timer.is_throttled() in (False, True)
    assert timer.memory_bytes_per_second is not None
    assert 1e10 < timer.memory_bytes_per_second < 1e14


# --- All together ---------------------------------------------------------------------------------------------------


def test_the_device_is_told_by_model_driver_and_versions(device: torch.device) -> None:
    facts = device_facts(device)
    assert facts["device"]
    assert facts["cuda"] == torch.version.cuda
    assert facts["driver"] or facts["driver_unknown"]


@pytest.mark.parametrize("name", ["online", "fused", "legacy"])
def test_a_built_in_kernel_is_measured_whole(name: str, timer: CudaTimer) -> None:
    case = Case(tokens=130, vocabulary=32768, keep_mask=True)
    measurement = measure_case_on_device(_built_in(name), case, Instruments(timer, RULE))
    assert measurement.outcome == "ok"
    assert measurement.values["async_escape"] == [1.0]
    assert set(measurement.values) >= {
        "lp_abs_max", "ent_abs_max", "g_rel_l2_lp", "g_rel_l2_ent", "reserved_peak_bytes", "allocation_retries",
    }  # fmt: skip
    if "timing" not in measurement.notes:
        assert {"forward_device_seconds", "step_device_seconds", "first_call_seconds"} <= set(measurement.values)
    for metric in ("step_peak_bytes", "saved_bytes", "operations", "traffic_bytes"):
        assert len(measurement.values[metric]) == 2
        assert measurement.values[metric][0] == measurement.values[metric][1]


def test_a_kernel_that_works_aside_is_measured_and_flagged(timer: CudaTimer, device: torch.device) -> None:
    side = torch.cuda.Stream(device)

    def run(logits: torch.Tensor, targets: torch.Tensor, **keywords: Any) -> Any:
        log_prob, entropy = kernel("fused").run(logits, targets, **keywords)
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)  # some 10 ms of cycles
        return log_prob, entropy

    case = Case(tokens=N, vocabulary=V)
    measurement = measure_case_on_device(Subject("aside", run, device=str(device)), case, Instruments(timer, RULE))
    assert measurement.values["async_escape"] == [0.0]
    assert measurement.notes["timing"] == "not stored: failed async_escape"
    assert "step_device_seconds" not in measurement.values
