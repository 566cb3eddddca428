"""The kernel `compiled`: what `eager` gives, compiled once for every size, and a plain word where it cannot be."""

import shutil
from typing import Any

import pytest
import torch
from torch._dynamo.exc import TorchDynamoException
from torch._dynamo.utils import counters

from runners.instruments.subject import Options, Subject
from runners.instruments.work import measure_work
from runners.kernels import compiled
from runners.kernels.inputs import Inputs, make_inputs
from runners.kernels.registry import kernel

pytestmark = pytest.mark.skipif(compiled.KERNEL.missing is not None, reason=str(compiled.KERNEL.missing))
Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def step(name: str, inputs: Inputs, temperature: float = 0.7) -> Results:
    """Outputs and the gradient of both."""
    logits = inputs.logits.detach().clone().requires_grad_()
    log_prob, entropy = kernel(name).run(logits, inputs.targets, keep_mask=inputs.keep_mask, temperature=temperature)
    assert entropy is not None
    upstreams = (inputs.upstream_log_prob, inputs.upstream_entropy)
    (gradient,) = torch.autograd.grad((log_prob, entropy), logits, upstreams)
    return log_prob.detach(), entropy.detach(), gradient


@pytest.mark.timeout(600)
def test_it_gives_what_eager_gives_to_the_same_bits_each_time_and_compiles_once_for_every_size() -> None:
    first = make_inputs(tokens=16, vocabulary=1000, keep_mask=True)
    results = step("compiled", first)
    compilations = counters["stats"]["unique_graphs"]
    for one in (first, make_inputs(tokens=7, vocabulary=333, keep_mask=True)):
        for mine, plain in zip(step("compiled", one), step("eager", one), strict=True):
            torch.testing.assert_close(mine, plain, rtol=1e-5, atol=2e-6)
    step("compiled", first, temperature=0.5)
    assert counters["stats"]["unique_graphs"] == compilations > 0
    for _ in range(4):
        assert all(torch.equal(a, b) for a, b in zip(results, step("compiled", first), strict=True))


def test_its_arguments_are_checked_and_no_tokens_compile_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_compiled", lambda: pytest.fail("compiled"))
    empty = step("compiled", make_inputs(tokens=0, vocabulary=5))
    assert [result.shape for result in empty] == [(0,), (0,), (0, 5)]
    with pytest.raises(ValueError, match="targets holds ids from 9 to 9"):
        kernel("compiled").run(torch.zeros(1, 4), torch.tensor([9]))


def test_a_failed_compilation_is_told_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise TorchDynamoException("backend='inductor' raised:\nno assembler\n\nSet TORCH_LOGS")

    monkeypatch.setattr(compiled, "_compiled", lambda: (fail, (TorchDynamoException,)))
    with pytest.raises(
        RuntimeError, match=r"^compiled: torch.compile failed .*: backend='inductor' raised: no assembler$"
    ):
        kernel("compiled").run(torch.zeros(1, 4), torch.tensor([1]))


def test_a_machine_without_a_compiler_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert compiled.missing_compiler("compiled") == (
        "compiled needs a C++ compiler for torch.compile on a CPU, and there is none: install g++, or set CXX"
    )


def test_it_runs_as_eager_where_operations_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_compiled", lambda: pytest.fail("compiled"))
    inputs = make_inputs(tokens=4, vocabulary=50)
    counted = [measure_work(Subject(name, kernel(name).run), inputs, Options()) for name in ("compiled", "eager")]
    assert counted[0] == counted[1]
