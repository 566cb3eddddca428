"""A clean kernel and the means to spoil it, shared by the tests of the instruments."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from runners.instruments.subject import Subject
from runners.kernels.inputs import Inputs, make_inputs
from runners.kernels.registry import kernel

os.environ.setdefault("KINETO_LOG_LEVEL", "99")
Gradient = torch.Tensor | None
Outputs = tuple[torch.Tensor, torch.Tensor | None]


class _Tap(torch.autograd.Function):
    """Identity whose backward hands the gradient through a function of the test's."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, change: Callable[[torch.Tensor], Gradient]) -> torch.Tensor:
        ctx.change = change
        return logits.view_as(logits)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Gradient, None]:
        return ctx.change(gradient), None


@pytest.fixture(scope="session")
def clean() -> Subject:
    """The fused kernel."""
    return Subject("fused", kernel("fused").run)


@pytest.fixture(scope="session")
def tampered(clean: Subject) -> Callable[..., Subject]:
    """Make a subject of the clean kernel with its gradient, outputs or keyword arguments changed."""

    def make(
        *,
        gradient: Callable[[torch.Tensor], Gradient] | None = None,
        outputs: Callable[[Outputs], Outputs] | None = None,
        **overrides: Any,
    ) -> Subject:
        def run(logits: torch.Tensor, targets: torch.Tensor, **keywords: Any) -> Outputs:
            seen = logits if gradient is None else _Tap.apply(logits, gradient)
            result = clean.run(seen, targets, **(keywords | overrides))
            return result if outputs is None else outputs(result)

        return Subject("tampered", run)

    return make


@pytest.fixture
def inputs() -> Inputs:
    """8 tokens of a flat vocabulary of 64."""
    return make_inputs(tokens=8, vocabulary=64, distribution="flat")


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    """Small tensors gain nothing from threads, and a busy machine loses much."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
