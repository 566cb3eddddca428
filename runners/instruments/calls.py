"""What an instrument may ask of a kernel, and how it is answered where the kernel is.

The instruments know a kernel only through `Measured`: a question with inputs, an answer with tensors and figures. So
they can stand in a process that runs nothing of a stranger's. Decides nothing about a value.
"""

import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Literal, Protocol

import torch

from runners.channel import printable
from runners.instruments.memory import memory_pass
from runners.instruments.subject import (
    Branches,
    Options,
    Outputs,
    ResultShapeError,
    Step,
    Subject,
    branches,
    forward,
    fresh,
    step_gradient,
)
from runners.instruments.timing import compilations, first_call_seconds, measure_time
from runners.instruments.work import work_pass
from runners.kernels.inputs import Inputs
from service.catalogue import BY_NAME, MetricClass

# How long one thread waits for the other between forward and backward.
_MEETING_SECONDS = 30

Kind = Literal[
    "first",
    "compilations",
    "outputs",
    "branches",
    "step",
    "two_threads",
    "second_backward",
    "reused_buffer",
    "memory",
    "work",
    "time",
]
Layout = Literal["plain", "transposed", "sliced"]
Surroundings = Literal["plain", "no_grad", "inference_mode", "autocast"]


@dataclass(frozen=True, slots=True)
class Call:
    """One question.

    first            a step on a clock, asked before anything else
    compilations     how many graphs were compiled since the first
    outputs          forward
    branches         log-prob and entropy, and the gradient of each used alone; with the logits in a `layout`
    step             forward and the backward of all that the case differentiates
    two_threads      a step on the inputs and one on them with the rows in reverse, both forwards before either backward
    second_backward  log-prob, and its backward twice through one graph
    reused_buffer    log-prob of the inputs, once at a new address and once in the memory of other logits
    memory, work     a step under that instrument
    time             `repetitions` samples, on inputs drawn by the words `draw`

    Forward and branches are asked within `surroundings`. A kernel that is split over ranks is asked `alone` with the
    whole vocabulary.
    """

    kind: Kind
    how: Options
    layout: Layout = "plain"
    surroundings: Surroundings = "plain"
    alone: bool = False
    repetitions: int = 0
    draw: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of a call. `samples` holds figures by metric.

    `requires_grad` names the outputs that require grad. `gradients`: (log-prob's, entropy's) of branches; the step's;
    those of two_threads, whose outputs follow one another; the first and, unless it raised, the second of
    second_backward. `elsewhere` is the log-prob at the new address, `left` the inputs as a step under the memory
    instrument left them, `operations_elsewhere` how many operations a step under the work instrument ran on threads
    other than the caller's, and `collectives` its collectives in order, each with its bytes.
    """

    log_prob: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    requires_grad: tuple[str, ...] = ()
    gradients: tuple[torch.Tensor | None, ...] = ()
    elsewhere: torch.Tensor | None = None
    left: Inputs | None = None
    samples: dict[str, list[float]] = field(default_factory=dict)
    operations_elsewhere: int = 0
    collectives: list[tuple[str, int]] = field(default_factory=list)


class RaisedError(Exception):
    """The kernel raised. The message is the exception in one line; `import_failure` says what could not be imported."""

    def __init__(self, message: str, *, out_of_memory: bool = False, import_failure: str | None = None) -> None:
        super().__init__(message)
        self.out_of_memory = out_of_memory
        self.import_failure = import_failure


class Measured(Protocol):
    """A kernel as the instruments see it. `doubts` are notes about the process it runs in, by topic."""

    @property
    def name(self) -> str: ...
    @property
    def takes(self) -> frozenset[str]: ...
    @property
    def omitted(self) -> tuple[str, ...]: ...
    @property
    def doubts(self) -> dict[str, str]: ...

    def ask(self, call: Call, inputs: Inputs) -> Answer:
        """The answer to `call` on `inputs`, which stay as they are. Raises RaisedError and ResultShapeError.

        The tensors of an answer to memory and work may hold only until something else is asked.
        """


class Rank(Measured, Protocol):
    """One rank of a kernel that is split. All of them are asked before any is heard."""

    def begin(self, call: Call, inputs: Inputs) -> None:
        """Ask."""

    def finish(self) -> Answer:
        """The answer. Raises RaisedError and ResultShapeError."""


@dataclass(frozen=True, slots=True)
class Local:
    """A subject that is asked in this process."""

    subject: Subject
    doubts: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.subject.name

    @property
    def takes(self) -> frozenset[str]:
        return self.subject.takes

    @property
    def omitted(self) -> tuple[str, ...]:
        return self.subject.omitted

    def ask(self, call: Call, inputs: Inputs) -> Answer:
        return answer(self.subject, call, inputs)


def figures(got: Answer, metric_class: MetricClass) -> dict[str, list[float]]:
    """The samples of an answer. ValueError for any that its instrument does not make: the errors are not the kernel's
    to tell."""
    for name in got.samples:
        if name not in BY_NAME or BY_NAME[name].metric_class is not metric_class:
            raise ValueError(f"the kernel's process reports {name!r}, which is no {metric_class} metric")
    return got.samples


def branches_of(
    kernel: Measured,
    inputs: Inputs,
    how: Options,
    *,
    layout: Layout = "plain",
    surroundings: Surroundings = "plain",
    alone: bool = False,
) -> Branches:
    """Outputs and both gradients of a kernel."""
    return as_branches(kernel.ask(Call("branches", how, layout, surroundings, alone), inputs))


def as_branches(got: Answer) -> Branches:
    """An answer to a call for branches."""
    assert got.log_prob is not None
    g_log_prob, g_entropy = got.gradients
    return Branches(got.log_prob, got.entropy, g_log_prob, g_entropy)


def answer(subject: Subject, call: Call, inputs: Inputs) -> Answer:
    """Ask a subject in this process. Whatever it raises is a RaisedError or a ResultShapeError."""
    try:
        return _ANSWERS[call.kind](subject, call, inputs)
    except ResultShapeError:
        raise
    except Exception as error:
        raise RaisedError(
            describe(error),
            out_of_memory=_is_out_of_memory(error),
            import_failure=last_line(error) if isinstance(error, ImportError) else None,
        ) from error


def describe(error: BaseException) -> str:
    """An exception in one line: its type and the first line of its message."""
    lines = printable(_message(error)).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:500]}" if lines else type(error).__name__


def last_line(error: BaseException) -> str:
    """The last line of an exception's traceback: its type and message."""
    try:
        return traceback.format_exception_only(error)[-1].strip()
    except Exception:  # noqa: BLE001 -- a stranger's exception may fail to tell itself
        return f"{type(error).__name__}: {_message(error)}"


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 -- a stranger's exception may fail to tell itself
        return "(its message cannot be read: its __str__ raises)"


def _is_out_of_memory(error: Exception) -> bool:
    """torch's CPU allocator raises a bare RuntimeError."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in _message(error)


# --- Answers --------------------------------------------------------------------------------------------------------


_compiled_before: dict[str, int] = {}


def _first(subject: Subject, call: Call, inputs: Inputs) -> Answer:
    _compiled_before["case"] = compilations()
    return Answer(samples={"first_call_seconds": [first_call_seconds(subject, inputs, call.how)]})


def _compilations(_subject: Subject, _call: Call, _inputs: Inputs) -> Answer:
    return Answer(samples={"compilations": [float(compilations() - _compiled_before["case"])]})


def _outputs(subject: Subject, call: Call, inputs: Inputs) -> Answer:
    mine = fresh(inputs)
    with _SURROUNDINGS[call.surroundings]():
        return _of_outputs(forward(subject, mine, call.how))


def _branches(subject: Subject, call: Call, inputs: Inputs) -> Answer:
    with _SURROUNDINGS[call.surroundings]():
        got = branches(subject, inputs, call.how, _LAYOUTS[call.layout])
    return Answer(got.log_prob, got.entropy, gradients=(got.g_log_prob, got.g_entropy))


def _step(subject: Subject, call: Call, inputs: Inputs) -> Answer:
    mine = fresh(inputs)
    outputs = forward(subject, mine, call.how)
    return _of_step(Step(mine, outputs, step_gradient(outputs, mine, call.how)))


def _two_threads(subject: Subject, call: Call, inputs: Inputs) -> Answer:
    meeting = threading.Barrier(2, timeout=_MEETING_SECONDS)

    def step(mine: Inputs) -> Answer:
        outputs = forward(subject, mine, call.how)
        kept = _of_outputs(outputs, copy=True)
        meeting.wait()
        return replace(kept, gradients=(step_gradient(outputs, mine, call.how),))

    with ThreadPoolExecutor(2) as pool:
        one, other = (each.result() for each in [pool.submit(step, fresh(mine)) for mine in (inputs, turned(inputs))])
    assert one.log_prob is not None
    assert other.log_prob is not None
    entropies = [each.entropy for each in (one, other) if each.entropy is not None]
    return Answer(
        torch.cat((one.log_prob, other.log_prob)),
        torch.cat(entropies) if len(entropies) == 2 else None,
        gradients=one.gradients + other.gradients,
    )


def turned(inputs: Inputs) -> Inputs:
    """The same rows in reverse order."""
    return Inputs(
        logits=inputs.logits.flip(0),
        targets=inputs.targets.flip(0),
        keep_mask=None if inputs.keep_mask is None else inputs.keep_mask.flip(0),
        upstream_log_prob=inputs.upstream_log_prob.flip(0),
        upstream_entropy=inputs.upstream_entropy.flip(0),
    )


def _second_backward(subject: Subject, call: Call, inputs: Inputs) -> Answer:
    mine = fresh(inputs)
    log_prob = forward(subject, mine, call.how).log_prob
    arguments = (log_prob, mine.logits, mine.upstream_log_prob)
    first = torch.autograd.grad(*arguments, retain_graph=True, allow_unused=True)[0]
    kept = None if first is None else first.clone()  # a second backward may overwrite it
    try:
        second = torch.autograd.grad(*arguments, allow_unused=True)[0]
    except Exception:  # noqa: BLE001 -- any loud error will do
        return Answer(log_prob.detach(), gradients=(kept,))
    return Answer(log_prob.detach(), gradients=(kept, second))


def _reused_buffer(subject: Subject, call: Call, inputs: Inputs) -> Answer:
    mine = fresh(replace(inputs, logits=inputs.logits.roll((-1, -1), (0, 1))))
    forward(subject, mine, call.how)
    with torch.no_grad():
        mine.logits.copy_(inputs.logits)
    reused = forward(subject, mine, call.how).log_prob
    elsewhere = forward(subject, _at_a_new_address(inputs), call.how).log_prob
    return Answer(reused.detach(), elsewhere=elsewhere.detach())


def _memory(subject: Subject, call: Call, inputs: Inputs) -> Answer:
    reading, step = memory_pass(subject, inputs, call.how)
    left = replace(step.inputs, logits=step.inputs.logits.detach())
    return replace(_of_step(step), left=left, samples=_samples(asdict(reading)))


def _work(subject: Subject, call: Call, inputs: Inputs) -> Answer:
    got = work_pass(subject, inputs, call.how)
    return replace(
        _of_step(got.step),
        samples=_samples(asdict(got.reading)),
        operations_elsewhere=got.operations_elsewhere,
        collectives=got.collectives,
    )


def _time(subject: Subject, call: Call, inputs: Inputs) -> Answer:
    return Answer(samples=measure_time(subject, inputs, call.how, repetitions=call.repetitions, draw=call.draw))


_ANSWERS: dict[Kind, Callable[[Subject, Call, Inputs], Answer]] = {
    "first": _first,
    "compilations": _compilations,
    "outputs": _outputs,
    "branches": _branches,
    "step": _step,
    "two_threads": _two_threads,
    "second_backward": _second_backward,
    "reused_buffer": _reused_buffer,
    "memory": _memory,
    "work": _work,
    "time": _time,
}
KINDS = tuple(_ANSWERS)


def _of_outputs(outputs: Outputs, *, copy: bool = False) -> Answer:
    log_prob, entropy = outputs.log_prob.detach(), None if outputs.entropy is None else outputs.entropy.detach()
    if copy:
        log_prob, entropy = log_prob.clone(), None if entropy is None else entropy.clone()
    named = (("log_prob", outputs.log_prob), ("entropy", outputs.entropy))
    return Answer(
        log_prob,
        entropy,
        requires_grad=tuple(name for name, output in named if output is not None and output.requires_grad),
    )


def _of_step(step: Step) -> Answer:
    return replace(_of_outputs(step.outputs), gradients=(step.gradient,))


def _samples(reading: dict[str, int]) -> dict[str, list[float]]:
    return {name: [float(value)] for name, value in reading.items()}


# --- Layouts and surroundings ---------------------------------------------------------------------------------------


def _transposed(inputs: Inputs) -> Inputs:
    """A copy whose logits are stored by column."""
    return fresh(replace(inputs, logits=inputs.logits.t().contiguous().t()))


def _sliced(inputs: Inputs) -> Inputs:
    """A copy whose logits are columns of a wider buffer."""
    tokens, vocabulary = inputs.logits.shape
    wide = torch.full((tokens, vocabulary + 2), torch.nan, dtype=inputs.logits.dtype)
    wide[:, 1:-1] = inputs.logits
    return replace(fresh(inputs), logits=wide[:, 1:-1].requires_grad_())


def _at_a_new_address(inputs: Inputs) -> Inputs:
    """A copy whose logits start inside an allocation, where those of an earlier call never did."""
    buffer = torch.empty(inputs.logits.numel() + 16, dtype=inputs.logits.dtype)
    logits = buffer[16:].view(inputs.logits.shape).copy_(inputs.logits)
    return replace(fresh(inputs), logits=logits.requires_grad_())


_LAYOUTS: dict[Layout, Callable[[Inputs], Inputs]] = {"plain": fresh, "transposed": _transposed, "sliced": _sliced}


_SURROUNDINGS: dict[Surroundings, Callable[[], AbstractContextManager[object]]] = {
    "plain": nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": partial(torch.autocast, "cpu", dtype=torch.bfloat16),
}
