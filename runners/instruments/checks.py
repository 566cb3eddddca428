"""The contract checks of METHOD section 6: each a small function that gives the reason of a failure, or None.

They run on small cases only and know no oracle: a kernel is held against its own result on related inputs. A check
that needs an argument which the kernel does not take is left out, never passed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from runners.instruments.accuracy import entropy_gate, log_prob_gate
from runners.instruments.calls import (
    Answer,
    Call,
    Layout,
    Measured,
    RaisedError,
    Surroundings,
    branches_of,
    describe,
    turned,
)
from runners.instruments.subject import Branches, Options, ResultShapeError
from runners.kernels.inputs import Inputs
from service.wire import Case, EntropyMode

# Checks call the kernel dozens of times; their faults do not depend on the size.
LARGEST_ELEMENTS = 1 << 19
# One call a row: enough rows for every kind of last chunk.
_CHUNKED_ROWS = 16
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ALL_MODES: tuple[EntropyMode, ...] = ("off", "value", "gradient")


@dataclass(frozen=True, slots=True)
class Probe:
    """A kernel on a case: `result` is what it gave on `inputs`."""

    kernel: Measured
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
    return check.takes <= probe.kernel.takes and probe.how.entropy in check.modes and (has_rows or not check.rows)


def _reason(check: _Check, probe: Probe) -> str | None:
    try:
        return check.find_fault(probe)
    except ResultShapeError as error:
        return str(error)
    except RaisedError as error:
        return f"raised {error}"
    except Exception as error:  # noqa: BLE001 -- a kernel under measurement may return anything
        return f"cannot be compared: {describe(error)}"


def _entropy_presence(probe: Probe) -> str | None:
    entropy = probe.kernel.ask(Call("outputs", probe.how), probe.inputs).entropy
    wanted = probe.how.entropy != "off"
    if (entropy is not None) == wanted:
        return None
    return "entropy was asked for and is None" if wanted else "entropy was not asked for and was returned"


def _entropy_requires_grad(probe: Probe) -> str | None:
    got = probe.kernel.ask(Call("outputs", probe.how), probe.inputs)
    if got.entropy is None:
        return "entropy is None"
    if probe.how.entropy == "gradient":
        if "entropy" in got.requires_grad:
            return None
        return "entropy's gradient was asked for and entropy does not require grad"
    return "entropy was asked for as a value and requires grad" if "entropy" in got.requires_grad else None


def _gradient_defined(probe: Probe) -> str | None:
    result = _branches(probe)
    if result.g_log_prob is None:
        return "a loss on log_prob alone leaves the logits without a gradient"
    if probe.how.entropy == "gradient" and result.g_entropy is None:
        return "a loss on entropy alone leaves the logits without a gradient"
    return None


def inputs_changed(before: Inputs, after: Inputs) -> str | None:
    """The fault if a kernel did not leave its inputs as they were."""
    for name in ("logits", "targets", "keep_mask"):
        if not _same_bits(getattr(before, name), getattr(after, name)):
            return f"{name} was changed by forward and backward"
    return None


def thread_fault(answers: Sequence[Answer]) -> str | None:
    """The fault if a kernel computes where the instruments see nothing."""
    count = max(answer.operations_elsewhere for answer in answers)
    return f"{count} operations ran on other threads, where nothing is measured" if count else None


def _second_backward(probe: Probe) -> str | None:
    first, *second = probe.kernel.ask(Call("second_backward", probe.how), probe.inputs).gradients
    if not second or _same_bits(first, second[0]):
        return None
    return "a second backward differs from the first without an error"


def _repeat_bitwise(probe: Probe) -> str | None:
    again = _branches(probe)
    for name in Branches.__slots__:
        if not _same_bits(getattr(probe.result, name), getattr(again, name)):
            return f"{_word(name)} differs from one call to the next on equal inputs"
    return _reused_buffer(probe)


def _reused_buffer(probe: Probe) -> str | None:
    """New logits in the memory of earlier ones give what they give in memory that the kernel has not seen."""
    other = replace(probe.inputs, logits=probe.inputs.logits.roll((1, 1), (0, 1)))
    got = probe.kernel.ask(Call("reused_buffer", probe.how), other)
    return None if _same_bits(got.elsewhere, got.log_prob) else "log_prob of new logits in reused memory is stale"


def _chunk_invariant(probe: Probe) -> str | None:
    few = replace(probe, inputs=_rows(probe.inputs, _CHUNKED_ROWS))
    tokens = few.inputs.logits.shape[0]
    whole = _branches(few, chunk_size=None)
    for size in sorted({1, 2, max(1, tokens - 1), tokens, tokens + 3}):
        chunked = _branches(few, chunk_size=size)
        if fault := _difference(few, whole, chunked):
            return f"chunk_size={size}: {fault}"
    return None


def _mask_target_kept(probe: Probe) -> str | None:
    absent = _target_absent_mask(probe.inputs)
    present = absent.scatter(1, probe.inputs.targets[:, None], True)
    without = _branches(probe, replace(probe.inputs, keep_mask=absent))
    with_target = _branches(probe, replace(probe.inputs, keep_mask=present))
    fault = _difference(probe, with_target, without)
    return fault and f"target masked out: {fault}"


def _mask_zero_gradient(probe: Probe) -> str | None:
    mask = _target_absent_mask(probe.inputs)
    g_log_prob = _branches(probe, replace(probe.inputs, keep_mask=mask)).g_log_prob
    if g_log_prob is None:
        return "the masked log-prob has no gradient"
    dropped = ~mask.scatter(1, probe.inputs.targets[:, None], True)
    count = int((g_log_prob[dropped] != 0).sum())
    return f"{count} masked entries have a non-zero log-prob gradient" if count else None


def _mask_entropy_unmasked(probe: Probe) -> str | None:
    unmasked = _branches(probe, replace(probe.inputs, keep_mask=None))
    masked = _branches(probe, replace(probe.inputs, keep_mask=_target_absent_mask(probe.inputs)))
    entropy_only = replace(masked, log_prob=unmasked.log_prob, g_log_prob=unmasked.g_log_prob)
    fault = _difference(probe, unmasked, entropy_only)
    return fault and f"with a keep-mask: {fault}"


def _empty_batch(probe: Probe) -> str | None:
    none = _branches(probe, _rows(probe.inputs, 0))
    if none.g_log_prob is None:
        return "log_prob is not connected to the logits"
    if probe.how.entropy == "gradient" and none.g_entropy is None:
        return "entropy is not connected to the logits"
    return None


def _noncontiguous_logits(probe: Probe) -> str | None:
    layouts: tuple[Layout, ...] = ("transposed", "sliced")
    for layout in layouts:
        strided = branches_of(probe.kernel, probe.inputs, probe.how, layout=layout)
        if fault := _difference(probe, probe.result, strided):
            return f"{layout} logits: {fault}"
    return None


def _half_precision_logits(probe: Probe) -> str | None:
    for dtype in (torch.bfloat16, torch.float16):
        rounded = replace(probe.inputs, logits=probe.inputs.logits.to(dtype))
        upcast = replace(probe.inputs, logits=rounded.logits.float())
        half = _branches(probe, rounded)
        full = _branches(probe, upcast)
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
        return _branches(probe, inputs, entropy="off")
    except RaisedError:
        return None


def _result_dtype(probe: Probe) -> str | None:
    got = probe.kernel.ask(Call("step", probe.how), probe.inputs)
    for name, output in (("log_prob", got.log_prob), ("entropy", got.entropy)):
        if output is not None and output.dtype != torch.float32:
            return f"{name} is {output.dtype}, not torch.float32"
    (gradient,) = got.gradients
    if gradient is not None and gradient.dtype != probe.inputs.logits.dtype:
        return f"the gradient is {gradient.dtype}, not {probe.inputs.logits.dtype}"
    return None


def _zero_upstream(probe: Probe) -> str | None:
    logits, upstream_log_prob, upstream_entropy = (
        tensor.clone()
        for tensor in (probe.inputs.logits, probe.inputs.upstream_log_prob, probe.inputs.upstream_entropy)
    )
    logits[0] = torch.nan
    upstream_log_prob[0] = upstream_entropy[0] = 0.0
    inputs = replace(
        probe.inputs, logits=logits, upstream_log_prob=upstream_log_prob, upstream_entropy=upstream_entropy
    )
    result = _branches(probe, inputs)
    for name, got in (("log_prob", result.g_log_prob), ("entropy", result.g_entropy)):
        if got is not None and not bool((got[0] == 0).all()):
            return f"a row of NaN logits without an upstream gradient has a non-zero {name} gradient"
    return None


def _result_shape(probe: Probe) -> str | None:
    probe.kernel.ask(Call("outputs", probe.how), probe.inputs)  # raises where they have not
    return None


def _no_grad(probe: Probe) -> str | None:
    """Serving and reference log-probs are made this way."""
    modes: tuple[Surroundings, ...] = ("no_grad", "inference_mode")
    for mode in modes:
        got = probe.kernel.ask(Call("outputs", probe.how, surroundings=mode), probe.inputs)
        if got.requires_grad:
            return f"{mode}: an output requires grad"
        if fault := _difference(probe, _values_of(probe.result), _as_branches(got)):
            return f"{mode}: {fault}"
    return None


def _values_of(result: Branches) -> Branches:
    return replace(result, g_log_prob=None, g_entropy=None)


def _as_branches(got: Answer) -> Branches:
    assert got.log_prob is not None
    return Branches(got.log_prob, got.entropy, None, None)


def _autocast(probe: Probe) -> str | None:
    """A trainer calls its loss inside the autocast of its model."""
    inside = branches_of(probe.kernel, probe.inputs, probe.how, surroundings="autocast")
    fault = _difference(probe, probe.result, inside)
    return fault and f"under bfloat16 autocast: {fault}"


def _thread_safe(probe: Probe) -> str | None:
    """Two steps in two threads, each on inputs of its own."""
    both = (probe.inputs, turned(probe.inputs))
    alone = [probe.kernel.ask(Call("step", probe.how), inputs) for inputs in both]
    together = probe.kernel.ask(Call("two_threads", probe.how), probe.inputs)
    assert together.log_prob is not None
    entropies = (None, None) if together.entropy is None else together.entropy.chunk(2)
    outputs = zip(together.log_prob.chunk(2), entropies, together.gradients, strict=True)
    for inputs, one, (log_prob, entropy, gradient) in zip(both, alone, outputs, strict=True):
        apart = replace(_as_branches(one), g_log_prob=one.gradients[0])
        if fault := _difference(replace(probe, inputs=inputs), apart, Branches(log_prob, entropy, gradient, None)):
            return f"beside another thread: {fault}"
    return None


def _branches(probe: Probe, inputs: Inputs | None = None, **changed: Any) -> Branches:
    """Outputs and gradients on the probe's inputs, or on others, with some options changed."""
    return branches_of(probe.kernel, inputs or probe.inputs, replace(probe.how, **changed))


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


def _same_bits(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    bits = _BITS[a.element_size()]
    return torch.equal(*(tensor.detach().contiguous().reshape(-1).view(bits) for tensor in (a, b)))


def _word(name: str) -> str:
    return {"g_log_prob": "log_prob's gradient", "g_entropy": "entropy's gradient"}.get(name, name)
