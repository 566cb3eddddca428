"""The contract checks of METHOD section 6: each a small function that gives the reason of a failure, or None.

They run on small cases only and know no oracle: a kernel is held against its own result on related inputs. A check
that needs an argument which the kernel does not take is left out, never passed.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch

from runners.channel import printable
from runners.instruments.accuracy import entropy_gate, log_prob_gate
from runners.instruments.subject import (
    Branches,
    Options,
    ResultShapeError,
    Subject,
    branches,
    forward,
    fresh,
    step_gradient,
)
from runners.kernels.inputs import Inputs
from service.wire import Case, EntropyMode

# Checks call the kernel dozens of times; their faults do not depend on the size.
LARGEST_ELEMENTS = 1 << 19
# One call a row: enough rows for every kind of last chunk.
_CHUNKED_ROWS = 16
# How long one thread waits for the other between forward and backward.
_MEETING_SECONDS = 30
_ALL_MODES: tuple[EntropyMode, ...] = ("off", "value", "gradient")


@dataclass(frozen=True, slots=True)
class Probe:
    """A kernel on a case: `result` is what it gave on `inputs`."""

    subject: Subject
    inputs: Inputs
    how: Options
    result: Branches


@dataclass(frozen=True, slots=True)
class _Check:
    """`takes` and `modes` say where the check means something, `rows` that it needs at least one token."""

    name: str
    find_fault: Callable[[Probe], str | None]
    takes: frozenset[str] = frozenset()
    modes: tuple[EntropyMode, ...] = _ALL_MODES
    rows: bool = True


def applies(case: Case) -> bool:
    """Whether checks run on this case: N x V of at most 2^19."""
    return case.tokens * case.vocabulary <= LARGEST_ELEMENTS


def run_checks(probe: Probe) -> dict[str, str | None]:
    """By check, None for a pass or the reason of the failure; an exception inside a check is a failure."""
    return {check.name: _reason(check, probe) for check in _CHECKS if _means_something(check, probe)}


def _means_something(check: _Check, probe: Probe) -> bool:
    has_rows = probe.inputs.logits.shape[0] > 0
    return check.takes <= probe.subject.takes and probe.how.entropy in check.modes and (has_rows or not check.rows)


def _reason(check: _Check, probe: Probe) -> str | None:
    try:
        return check.find_fault(probe)
    except ResultShapeError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 -- a kernel under measurement may raise anything
        return f"raised {describe(error)}"


def describe(error: BaseException) -> str:
    """An exception in one line: its type and the first line of its message."""
    lines = printable(str(error)).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:500]}" if lines else type(error).__name__


def _entropy_presence(probe: Probe) -> str | None:
    entropy = forward(probe.subject, fresh(probe.inputs), probe.how).entropy
    wanted = probe.how.entropy != "off"
    if (entropy is not None) == wanted:
        return None
    return "entropy was asked for and is None" if wanted else "entropy was not asked for and was returned"


def _entropy_requires_grad(probe: Probe) -> str | None:
    entropy = forward(probe.subject, fresh(probe.inputs), probe.how).entropy
    if entropy is None:
        return "entropy is None"
    if probe.how.entropy == "gradient":
        return None if entropy.requires_grad else "entropy's gradient was asked for and entropy does not require grad"
    return "entropy was asked for as a value and requires grad" if entropy.requires_grad else None


def _gradient_defined(probe: Probe) -> str | None:
    result = branches(probe.subject, probe.inputs, probe.how)
    if result.g_log_prob is None:
        return "a loss on log_prob alone leaves the logits without a gradient"
    if probe.how.entropy == "gradient" and result.g_entropy is None:
        return "a loss on entropy alone leaves the logits without a gradient"
    return None


def _inputs_unchanged(probe: Probe) -> str | None:
    mine = fresh(probe.inputs)
    step_gradient(forward(probe.subject, mine, probe.how), mine, probe.how)
    for name in ("logits", "targets", "keep_mask"):
        before, after = getattr(probe.inputs, name), getattr(mine, name)
        if before is not None and not _same_bits(before, after):
            return f"{name} was changed by forward and backward"
    return None


def _second_backward(probe: Probe) -> str | None:
    mine = fresh(probe.inputs)
    log_prob = forward(probe.subject, mine, probe.how).log_prob
    arguments = (log_prob, mine.logits, mine.upstream_log_prob)
    first = _kept(torch.autograd.grad(*arguments, retain_graph=True, allow_unused=True)[0])
    try:
        second = torch.autograd.grad(*arguments, allow_unused=True)[0]
    except Exception:  # noqa: BLE001 -- any loud error will do
        return None
    return None if _same_bits(first, second) else "a second backward differs from the first without an error"


def _repeat_bitwise(probe: Probe) -> str | None:
    again = branches(probe.subject, probe.inputs, probe.how)
    for name in Branches.__slots__:
        if not _same_bits(getattr(probe.result, name), getattr(again, name)):
            return f"{_word(name)} differs from one call to the next on equal inputs"
    return _reused_buffer(probe)


def _reused_buffer(probe: Probe) -> str | None:
    """New logits in the memory of earlier ones give what they give in memory that the kernel has not seen."""
    other = replace(probe.inputs, logits=probe.inputs.logits.roll((1, 1), (0, 1)))
    mine = fresh(probe.inputs)
    forward(probe.subject, mine, probe.how)
    with torch.no_grad():
        mine.logits.copy_(other.logits)
    reused = forward(probe.subject, mine, probe.how).log_prob
    elsewhere = forward(probe.subject, _at_a_new_address(other), probe.how).log_prob
    return None if _same_bits(elsewhere, reused) else "log_prob of new logits in reused memory is stale"


def _chunk_invariant(probe: Probe) -> str | None:
    few = replace(probe, inputs=_rows(probe.inputs, _CHUNKED_ROWS))
    tokens = few.inputs.logits.shape[0]
    whole = branches(few.subject, few.inputs, replace(few.how, chunk_size=None))
    for size in sorted({1, 2, max(1, tokens - 1), tokens, tokens + 3}):
        chunked = branches(few.subject, few.inputs, replace(few.how, chunk_size=size))
        if fault := _difference(few, whole, chunked):
            return f"chunk_size={size}: {fault}"
    return None


def _mask_target_kept(probe: Probe) -> str | None:
    absent = _target_absent_mask(probe.inputs)
    present = absent.scatter(1, probe.inputs.targets[:, None], True)
    without = branches(probe.subject, replace(probe.inputs, keep_mask=absent), probe.how)
    with_target = branches(probe.subject, replace(probe.inputs, keep_mask=present), probe.how)
    fault = _difference(probe, with_target, without)
    return fault and f"target masked out: {fault}"


def _mask_zero_gradient(probe: Probe) -> str | None:
    mask = _target_absent_mask(probe.inputs)
    g_log_prob = branches(probe.subject, replace(probe.inputs, keep_mask=mask), probe.how).g_log_prob
    if g_log_prob is None:
        return "the masked log-prob has no gradient"
    dropped = ~mask.scatter(1, probe.inputs.targets[:, None], True)
    count = int((g_log_prob[dropped] != 0).sum())
    return f"{count} masked entries have a non-zero log-prob gradient" if count else None


def _mask_entropy_unmasked(probe: Probe) -> str | None:
    unmasked = branches(probe.subject, replace(probe.inputs, keep_mask=None), probe.how)
    masked = branches(probe.subject, replace(probe.inputs, keep_mask=_target_absent_mask(probe.inputs)), probe.how)
    entropy_only = replace(masked, log_prob=unmasked.log_prob, g_log_prob=unmasked.g_log_prob)
    fault = _difference(probe, unmasked, entropy_only)
    return fault and f"with a keep-mask: {fault}"


def _empty_batch(probe: Probe) -> str | None:
    none = branches(probe.subject, _rows(probe.inputs, 0), probe.how)
    if none.g_log_prob is None:
        return "log_prob is not connected to the logits"
    if probe.how.entropy == "gradient" and none.g_entropy is None:
        return "entropy is not connected to the logits"
    return None


def _noncontiguous_logits(probe: Probe) -> str | None:
    for layout, copy in (("transposed", _transposed), ("sliced", _sliced)):
        strided = branches(probe.subject, probe.inputs, probe.how, copy)
        if fault := _difference(probe, probe.result, strided):
            return f"{layout} logits: {fault}"
    return None


def _half_precision_logits(probe: Probe) -> str | None:
    for dtype in (torch.bfloat16, torch.float16):
        rounded = replace(probe.inputs, logits=probe.inputs.logits.to(dtype))
        upcast = replace(probe.inputs, logits=rounded.logits.float())
        half = branches(probe.subject, rounded, probe.how)
        full = branches(probe.subject, upcast, probe.how)
        if fault := _difference(probe, full, half, unit=float(torch.finfo(dtype).eps)):
            return f"{dtype} logits: {fault}"
    return None


def _target_range(probe: Probe) -> str | None:
    vocabulary = probe.inputs.logits.shape[1]
    for target in (-1, -100, vocabulary, vocabulary + 5):
        result = _with_first_target(probe, target)
        if result is None:
            continue
        is_ignored = float(result.log_prob[0]) == 0 and (result.g_log_prob is None or not result.g_log_prob[0].any())
        if not is_ignored:
            return f"target {target} of a vocabulary of {vocabulary} gives log_prob {float(result.log_prob[0]):.6g}"
    return None


def _with_first_target(probe: Probe, target: int) -> Branches | None:
    """The log-prob branch with another first target, None if that is a loud error."""
    targets = probe.inputs.targets.clone()
    targets[0] = target
    upstream = torch.ones_like(probe.inputs.upstream_log_prob)
    inputs = replace(probe.inputs, targets=targets, upstream_log_prob=upstream)
    try:
        return branches(probe.subject, inputs, replace(probe.how, entropy="off"))
    except Exception:  # noqa: BLE001 -- any loud error will do
        return None


def _result_dtype(probe: Probe) -> str | None:
    mine = fresh(probe.inputs)
    outputs = forward(probe.subject, mine, probe.how)
    for name, output in (("log_prob", outputs.log_prob), ("entropy", outputs.entropy)):
        if output is not None and output.dtype != torch.float32:
            return f"{name} is {output.dtype}, not torch.float32"
    got = step_gradient(outputs, mine, probe.how)
    if got is not None and got.dtype != mine.logits.dtype:
        return f"the gradient is {got.dtype}, not {mine.logits.dtype}"
    return None


def _zero_upstream(probe: Probe) -> str | None:
    inputs = fresh(probe.inputs)
    logits = inputs.logits.detach()
    logits[0] = torch.nan
    inputs.upstream_log_prob[0] = inputs.upstream_entropy[0] = 0.0
    result = branches(probe.subject, replace(inputs, logits=logits), probe.how)
    for name, got in (("log_prob", result.g_log_prob), ("entropy", result.g_entropy)):
        if got is not None and not bool((got[0] == 0).all()):
            return f"a row of NaN logits without an upstream gradient has a non-zero {name} gradient"
    return None


def _result_shape(probe: Probe) -> str | None:
    forward(probe.subject, fresh(probe.inputs), probe.how)  # raises where they have not
    return None


def _no_grad(probe: Probe) -> str | None:
    """Serving and reference log-probs are made this way."""
    for mode in (torch.no_grad, torch.inference_mode):
        mine = fresh(probe.inputs)
        with mode():
            outputs = forward(probe.subject, mine, probe.how)
        if outputs.log_prob.requires_grad or (outputs.entropy is not None and outputs.entropy.requires_grad):
            return f"{mode.__name__}: an output requires grad"
        if fault := _difference(
            probe, _values_of(probe.result), Branches(outputs.log_prob, outputs.entropy, None, None)
        ):
            return f"{mode.__name__}: {fault}"
    return None


def _values_of(result: Branches) -> Branches:
    return replace(result, g_log_prob=None, g_entropy=None)


def _autocast(probe: Probe) -> str | None:
    """A trainer calls its loss inside the autocast of its model."""
    with torch.autocast(probe.inputs.logits.device.type, dtype=torch.bfloat16):
        inside = branches(probe.subject, probe.inputs, probe.how)
    fault = _difference(probe, probe.result, inside)
    return fault and f"under bfloat16 autocast: {fault}"


def _thread_safe(probe: Probe) -> str | None:
    """Two steps in two threads, each on inputs of its own, both forwards before either backward."""
    both = (probe.inputs, _turned(probe.inputs))
    alone = [_step(probe, inputs, lambda: None) for inputs in both]
    meeting = threading.Barrier(len(both), timeout=_MEETING_SECONDS)
    with ThreadPoolExecutor(len(both)) as pool:
        steps = [pool.submit(_step, probe, inputs, meeting.wait) for inputs in both]
        together = [step.result() for step in steps]
    for inputs, one, other in zip(both, alone, together, strict=True):
        if fault := _difference(replace(probe, inputs=inputs), one, other):
            return f"beside another thread: {fault}"
    return None


def _turned(inputs: Inputs) -> Inputs:
    """The same rows in another order."""
    return Inputs(
        logits=inputs.logits.flip(0),
        targets=inputs.targets.flip(0),
        keep_mask=None if inputs.keep_mask is None else inputs.keep_mask.flip(0),
        upstream_log_prob=inputs.upstream_log_prob.flip(0),
        upstream_entropy=inputs.upstream_entropy.flip(0),
    )


def _step(probe: Probe, inputs: Inputs, between: Callable[[], object]) -> Branches:
    """Outputs and the step's gradient, with something between forward and backward."""
    mine = fresh(inputs)
    outputs = forward(probe.subject, mine, probe.how)
    log_prob, entropy = outputs.log_prob.detach().clone(), outputs.entropy
    entropy = None if entropy is None else entropy.detach().clone()
    between()
    return Branches(log_prob, entropy, step_gradient(outputs, mine, probe.how), None)


_MASK = frozenset({"keep_mask"})
_WITH_ENTROPY: tuple[EntropyMode, ...] = ("value", "gradient")
_CHECKS = (
    _Check("entropy_presence", _entropy_presence, takes=frozenset({"with_entropy"}), rows=False),
    _Check("entropy_requires_grad", _entropy_requires_grad, modes=("gradient",), rows=False),
    _Check(
        "entropy_requires_grad",
        _entropy_requires_grad,
        takes=frozenset({"with_entropy_grad"}),
        modes=("value",),
        rows=False,
    ),
    _Check("gradient_defined", _gradient_defined, rows=False),
    _Check("inputs_unchanged", _inputs_unchanged),
    _Check("second_backward", _second_backward),
    _Check("repeat_bitwise", _repeat_bitwise),
    _Check("chunk_invariant", _chunk_invariant, takes=frozenset({"chunk_size"})),
    _Check("mask_target_kept", _mask_target_kept, takes=_MASK),
    _Check("mask_zero_gradient", _mask_zero_gradient, takes=_MASK),
    _Check("mask_entropy_unmasked", _mask_entropy_unmasked, takes=_MASK, modes=_WITH_ENTROPY),
    _Check("empty_batch", _empty_batch, rows=False),
    _Check("noncontiguous_logits", _noncontiguous_logits),
    _Check("half_precision_logits", _half_precision_logits),
    _Check("target_range", _target_range),
    _Check("result_dtype", _result_dtype, rows=False),
    _Check("zero_upstream", _zero_upstream),
    _Check("result_shape", _result_shape, rows=False),
    _Check("no_grad", _no_grad),
    _Check("autocast", _autocast),
    _Check("thread_safe", _thread_safe),
)


def _difference(probe: Probe, one: Branches, other: Branches, unit: float = 0.0) -> str | None:
    """The fault if two results differ by more than reordering explains, or rounding to a dtype of epsilon `unit`."""
    inputs, how = probe.inputs, probe.how
    logits = inputs.logits.float() / how.temperature
    scale = float(logits[logits.isfinite()].abs().max()) if bool(logits.isfinite().any()) else 0.0
    rounding = 4 * max(unit, _unit(inputs.logits.dtype))
    output_rounding = 4 * unit * max(1.0, scale)
    entropy_slack = entropy_gate(scale)
    outputs = (
        ("log_prob", one.log_prob, other.log_prob, log_prob_gate(scale, logits.shape[1]) + output_rounding),
        ("entropy", one.entropy, other.entropy, entropy_slack + output_rounding),
    )
    for name, a, b, slack in outputs:
        if fault := _output_difference(name, a, b, slack):
            return fault
    gradients = (
        ("log_prob", one.g_log_prob, other.g_log_prob, inputs.upstream_log_prob),
        ("entropy", one.g_entropy, other.g_entropy, inputs.upstream_entropy),
    )
    for name, a, b, upstream in gradients:
        slack_by_row = upstream.abs() / how.temperature * (entropy_slack if name == "entropy" else 1e-6)
        if fault := _gradient_difference(name, a, b, slack_by_row, relative=max(rounding, 1e-5)):
            return fault
    return None


def _output_difference(name: str, a: torch.Tensor | None, b: torch.Tensor | None, slack: float) -> str | None:
    if a is None or b is None:
        return None if a is b else f"{name} is None in one of two calls"
    if a.shape != b.shape:
        return f"{name} has shape {tuple(b.shape)}, not {tuple(a.shape)}"
    change = torch.where(a == b, 0.0, (a.double() - b.double()).abs())
    worst = float(change.max()) if change.numel() else 0.0
    return None if worst <= slack else f"{name} differs by {worst:.3g} nats, limit {slack:.3g}"


def _gradient_difference(
    name: str, a: torch.Tensor | None, b: torch.Tensor | None, slack_by_row: torch.Tensor, relative: float
) -> str | None:
    if a is None or b is None:
        return None if a is b else f"{name}'s gradient is undefined in one of two calls"
    change = (a.double() - b.double()).norm(dim=1)
    limit = relative * a.double().norm(dim=1) + slack_by_row
    bad = ~(change <= limit)
    if not bool(bad.any()):
        return None
    row = int(bad.nonzero()[0, 0])
    return f"{name}'s gradient differs by {float(change[row]):.3g} in row {row}, limit {float(limit[row]):.3g}"


def _unit(dtype: torch.dtype) -> float:
    """The rounding of a half-precision gradient; that of float32 lies within the other limits."""
    return 0.0 if dtype == torch.float32 else float(torch.finfo(dtype).eps)


def _target_absent_mask(inputs: Inputs) -> torch.Tensor:
    """A random half of the vocabulary, never the target."""
    chance = torch.rand(inputs.logits.shape, generator=torch.Generator().manual_seed(1))
    return (chance < 0.5).scatter(1, inputs.targets[:, None], False)


def _rows(inputs: Inputs, count: int) -> Inputs:
    """The first `count` rows, all where there are fewer."""
    return Inputs(
        logits=inputs.logits[:count],
        targets=inputs.targets[:count],
        keep_mask=None if inputs.keep_mask is None else inputs.keep_mask[:count],
        upstream_log_prob=inputs.upstream_log_prob[:count],
        upstream_entropy=inputs.upstream_entropy[:count],
    )


def _at_a_new_address(inputs: Inputs) -> Inputs:
    """A copy whose logits start inside an allocation, where those of an earlier call never did."""
    buffer = torch.empty(inputs.logits.numel() + 16, dtype=inputs.logits.dtype)
    logits = buffer[16:].view(inputs.logits.shape).copy_(inputs.logits)
    return replace(fresh(inputs), logits=logits.requires_grad_())


def _transposed(inputs: Inputs) -> Inputs:
    """A copy whose logits are stored by column."""
    return fresh(replace(inputs, logits=inputs.logits.t().contiguous().t()))


def _sliced(inputs: Inputs) -> Inputs:
    """A copy whose logits are columns of a wider buffer."""
    tokens, vocabulary = inputs.logits.shape
    wide = torch.full((tokens, vocabulary + 2), torch.nan, dtype=inputs.logits.dtype)
    wide[:, 1:-1] = inputs.logits
    return replace(fresh(inputs), logits=wide[:, 1:-1].requires_grad_())


def _same_bits(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(*(tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (a, b)))


def _kept(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """A copy that a later backward cannot overwrite."""
    return None if tensor is None else tensor.clone()


def _word(name: str) -> str:
    return {"g_log_prob": "log_prob's gradient", "g_entropy": "entropy's gradient"}.get(name, name)
