"""What is measured: a callable in our own signature, and how one call of it is made. Measures nothing itself."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

from runners.kernels.contract import Contract, LogProbEntropy
from runners.kernels.inputs import Inputs
from service.wire import Case, EntropyMode

ARGUMENTS = frozenset(
    {"logits", "targets", "keep_mask", "group", "chunk_size", "temperature", "with_entropy", "with_entropy_grad"}
)
Branch = Literal["lp", "ent"]


@dataclass(frozen=True, slots=True)
class Subject:
    """A kernel as the instruments see it.

    `run` has the common signature and is called with those keyword arguments only that `takes` names (of ARGUMENTS).
    `omitted` names the arguments that this commit's function does not have yet: they are recorded in the measurement's
    notes. `contract` is what the kernel declares, None for a kernel that is held to its own past. `group` is handed to
    a kernel that takes one; None means that this process holds the whole vocabulary.
    """

    name: str
    run: LogProbEntropy
    takes: frozenset[str] = ARGUMENTS
    omitted: tuple[str, ...] = ()
    contract: Contract | None = None
    device: str = "cpu"
    group: dist.ProcessGroup | None = None


class ResultShapeError(ValueError):
    """A kernel's outputs are not tensors of the shape that is declared for them. Its message is the fault."""


@dataclass(frozen=True, slots=True)
class Options:
    """How a case wants its kernel called."""

    entropy: EntropyMode = "gradient"
    chunk_size: int | None = None
    temperature: float = 1.0


@dataclass(frozen=True, slots=True)
class Outputs:
    """What one forward returned: log_prob [N] and entropy [N] or None."""

    log_prob: torch.Tensor
    entropy: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Branches:
    """One kernel on one set of inputs: the outputs, and the gradient [N, V] of each output used alone.

    A gradient is None where autograd gave none; `g_entropy` also where the case asks for no entropy gradient.
    """

    log_prob: torch.Tensor
    entropy: torch.Tensor | None
    g_log_prob: torch.Tensor | None
    g_entropy: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Step:
    """One forward and backward: the inputs as they were left, the outputs, and the gradient of all outputs used."""

    inputs: Inputs
    outputs: Outputs
    gradient: torch.Tensor | None


def options(case: Case) -> Options:
    """The options of a case."""
    return Options(case.entropy, case.chunk_size, case.temperature)


def fresh(inputs: Inputs) -> Inputs:
    """A deep copy with logits as an autograd leaf that requires grad, so that a kernel may spoil what it is given.

    Strides are kept where `Tensor.clone` keeps them: a transposed matrix stays transposed.
    """
    return Inputs(
        logits=inputs.logits.detach().clone().requires_grad_(),
        targets=inputs.targets.clone(),
        keep_mask=None if inputs.keep_mask is None else inputs.keep_mask.clone(),
        upstream_log_prob=inputs.upstream_log_prob.clone(),
        upstream_entropy=inputs.upstream_entropy.clone(),
    )


def forward(subject: Subject, inputs: Inputs, how: Options) -> Outputs:
    """One call of the subject, with the keyword arguments that it takes. Raises ResultShapeError."""
    wanted: dict[str, Any] = {
        "keep_mask": inputs.keep_mask,
        "group": subject.group,
        "chunk_size": how.chunk_size,
        "temperature": how.temperature,
        "with_entropy": how.entropy != "off",
        "with_entropy_grad": how.entropy == "gradient",
    }
    keywords = {name: value for name, value in wanted.items() if name in subject.takes}
    outputs = Outputs(*subject.run(inputs.logits, inputs.targets, **keywords))
    tokens = inputs.logits.shape[0]
    for name, output in (("log_prob", outputs.log_prob), ("entropy", outputs.entropy)):
        if output is not None and type(output) is not torch.Tensor:  # a subclass may put its work off
            raise ResultShapeError(f"{name} is a {type(output).__name__}, not a torch.Tensor")
        if output is not None and output.shape != (tokens,):
            raise ResultShapeError(f"{name} has shape {tuple(output.shape)}, not ({tokens},)")
    return outputs


def gradient(output: torch.Tensor | None, upstream: torch.Tensor, logits: torch.Tensor) -> torch.Tensor | None:
    """The logits' gradient of one output used alone, None where autograd gives none. Frees the graph."""
    if output is None or not output.requires_grad:
        return None
    return torch.autograd.grad(output, logits, upstream, allow_unused=True)[0]


def step_gradient(outputs: Outputs, inputs: Inputs, how: Options) -> torch.Tensor | None:
    """The logits' gradient of all that the case differentiates: log-prob, and entropy in entropy mode "gradient"."""
    pairs = [(outputs.log_prob, inputs.upstream_log_prob)]
    if how.entropy == "gradient" and outputs.entropy is not None:
        pairs.append((outputs.entropy, inputs.upstream_entropy))
    pairs = [(output, upstream) for output, upstream in pairs if output.requires_grad]
    if not pairs:
        return None
    tensors, upstreams = zip(*pairs, strict=True)
    return torch.autograd.grad(tensors, inputs.logits, upstreams, allow_unused=True)[0]


def branches(subject: Subject, inputs: Inputs, how: Options, copy: Callable[[Inputs], Inputs] = fresh) -> Branches:
    """Outputs and both gradients, each from a forward of its own on a `copy`, never through a retained graph."""
    log_prob_inputs = copy(inputs)
    outputs = forward(subject, log_prob_inputs, how)
    log_prob = outputs.log_prob.detach().clone()
    entropy = None if outputs.entropy is None else outputs.entropy.detach().clone()
    g_log_prob = gradient(outputs.log_prob, log_prob_inputs.upstream_log_prob, log_prob_inputs.logits)
    del outputs, log_prob_inputs
    g_entropy = None
    if how.entropy == "gradient":
        entropy_inputs = copy(inputs)
        again = forward(subject, entropy_inputs, how)
        g_entropy = gradient(again.entropy, entropy_inputs.upstream_entropy, entropy_inputs.logits)
    return Branches(log_prob, entropy, g_log_prob, g_entropy)


@contextmanager
def collector_off() -> Iterator[None]:
    """Keeps the cycle collector out of a region, so that releases and pauses fall at the same place every time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
