"""Finds a target's function in the files of a commit and gives it our signature. Runs in the measured process only.

What a target says is service.wire.TargetKernel; how its function is measured is runners.instruments' matter.
"""

import inspect
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from runners.instruments.calls import last_line
from runners.instruments.subject import ResultShapeError, Subject
from service.wire import TargetKernel

OUR_PACKAGES = frozenset({"service", "runners", "dashboards", "migrations", "ulpwatch"})
_forgotten: list[ModuleType] = []


class UnmeasurableError(Exception):
    """The entry cannot be imported or called; the message is the reason."""


def bind(
    kernel: TargetKernel,
    files: Path,
    path: Sequence[str],
    omittable: Collection[str],
    device: str,
) -> Subject:
    """Import the entry of `kernel` from the `files` of a commit, with `path` first on sys.path, and map its arguments.

    `omittable` names the arguments that this commit's function may lack. Raises UnmeasurableError if the entry cannot
    be imported, comes from elsewhere, or cannot take what the target maps.
    """
    take_names_from(path)
    function = find_entry(kernel.entry, files)
    omitted = omitted_arguments(kernel, function, omittable)
    passed = {ours: theirs for ours, theirs in kernel.arguments.items() if ours not in omitted}
    run = with_our_signature(function, passed, kernel.absent, kernel.returns)
    return Subject(kernel.name, run, frozenset(passed), tuple(omitted), None, device)


# --- Names ----------------------------------------------------------------------------------------------------------


class _TargetNamesFirst:
    """A finder that looks our top-level names, and what is beneath them, up in the target's directories only.

    Our own directories are not the only way to our packages: an editable installation has a finder for them too.
    """

    def __init__(self, directories: Sequence[str]) -> None:
        self._directories = list(directories)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.partition(".")[0] not in OUR_PACKAGES:
            return None
        spec = PathFinder.find_spec(name, self._directories if path is None else path)
        if spec is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return spec


def take_names_from(path: Sequence[str]) -> None:
    """Let a target's directories come first, and forget our own packages, so that it may have packages of our names.

    Our code stays alive by reference and must not import any of ours afterwards.
    """
    for name in [name for name in sys.modules if name.partition(".")[0] in OUR_PACKAGES]:
        _forgotten.append(sys.modules.pop(name))
    sys.meta_path.insert(0, _TargetNamesFirst(path))
    sys.path[:0] = path


# --- The function ---------------------------------------------------------------------------------------------------


def find_entry(entry: str, files: Path) -> Callable[..., Any]:
    """The function that `entry` (package.module:function) names; UnmeasurableError if it is not in `files`."""
    module_name, _, attributes = entry.partition(":")
    try:
        module = import_module(module_name)
    except (Exception, SystemExit) as error:  # a stranger's module can raise anything
        raise UnmeasurableError(f"{module_name} cannot be imported: {last_line(error)}") from error
    origin = getattr(module, "__file__", None)
    if origin is not None and not Path(origin).resolve().is_relative_to(files.resolve()):
        raise UnmeasurableError(f"{module_name} is not in the commit: an installed module of that name was imported")
    found: Any = module
    for attribute in attributes.split("."):
        if not hasattr(found, attribute):
            raise UnmeasurableError(f"{entry} does not exist: {module_name} has no {attributes!r}")
        found = getattr(found, attribute)
    if not callable(found):
        raise UnmeasurableError(f"{entry} is not callable but a {type(found).__name__}")
    return found  # type: ignore[no-any-return]


def omitted_arguments(kernel: TargetKernel, function: Callable[..., Any], omittable: Collection[str]) -> list[str]:
    """The mapped arguments that the function lacks and may lack; UnmeasurableError where it must not.

    A function that takes anything (**keywords) is held to lack what it does not name only where it may.
    """
    taken = _taken(function)
    if taken is None:
        return []
    if unmapped := sorted(taken.required - set(kernel.arguments.values())):
        raise UnmeasurableError(f"{kernel.entry} needs parameter {unmapped[0]!r}, which the target does not map")
    lacking = [ours for ours, theirs in kernel.arguments.items() if theirs not in taken.named]
    if taken.anything:
        return [ours for ours in lacking if ours in omittable]
    for ours in lacking:
        if ours not in omittable:
            raise UnmeasurableError(
                f"{kernel.entry} takes no parameter {kernel.arguments[ours]!r}, to which the target maps {ours!r}"
            )
    return lacking


@dataclass(frozen=True, slots=True)
class _Taken:
    """The parameters that a function names, those that it needs, and whether it takes any others."""

    named: frozenset[str]
    required: frozenset[str]
    anything: bool


def _taken(function: Callable[..., Any]) -> _Taken | None:
    """What a function takes by keyword; None for one that does not tell, a function of C for example.

    A decorated function takes what its wrapper takes. Where that passes on whatever it is given, the wrapped function's
    parameters are known too; which of them the wrapper fills in is not, and none is held to be needed.
    """
    try:
        parameters = inspect.signature(function, follow_wrapped=False).parameters.values()
    except (TypeError, ValueError):
        return None
    named = {p.name: p.default for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    required = frozenset(name for name, default in named.items() if default is inspect.Parameter.empty)
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        return _Taken(frozenset(named), required, anything=False)
    wrapped = getattr(function, "__wrapped__", None)
    within = None if wrapped is None else _taken(wrapped)
    if within is None:
        return _Taken(frozenset(named), required, anything=True)
    return _Taken(within.named | named.keys(), required, within.anything)


def with_our_signature(
    function: Callable[..., Any],
    passed: dict[str, str],
    absent: dict[str, Any],
    returns: Sequence[str],
) -> Callable[..., tuple[torch.Tensor, torch.Tensor | None]]:
    def run(
        logits: torch.Tensor,
        targets: torch.Tensor,
        *,
        keep_mask: torch.Tensor | None = None,
        group: dist.ProcessGroup | None = None,
        chunk_size: int | None = None,
        temperature: float = 1.0,
        with_entropy: bool = True,
        with_entropy_grad: bool = True,
        overwrite_logits: bool = False,  # noqa: ARG001 - nobody's to give: a target's function keeps its inputs
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        ours = {
            "logits": logits,
            "targets": targets,
            "keep_mask": keep_mask,
            "group": group,
            "chunk_size": chunk_size,
            "temperature": temperature,
            "with_entropy": with_entropy,
            "with_entropy_grad": with_entropy_grad,
        }
        theirs = {
            parameter: absent.get(name) if ours[name] is None else ours[name] for name, parameter in passed.items()
        }
        return unpack(function(**theirs), returns, logits.size(0))

    return run


def unpack(returned: Any, returns: Sequence[str], tokens: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(log_prob [N], entropy [N] or None) out of what a function returned, as a target's `returns` names it.

    Raises ResultShapeError that names the output, what it is and what the target says.
    """
    outputs = tuple(returned) if isinstance(returned, tuple | list) else (returned,)
    if len(outputs) != len(returns):
        raise ResultShapeError(f"the function returned {len(outputs)} outputs, the target's returns has {len(returns)}")
    found: dict[str, torch.Tensor] = {}
    for item, output in zip(returns, outputs, strict=True):
        name = item.lstrip("-").removesuffix("[:, 0]")
        if name != "_" and not (name == "entropy" and output is None):
            found[name] = _vector(item, output, tokens)
    return found["log_prob"], found.get("entropy")


def _vector(item: str, output: Any, tokens: int) -> torch.Tensor:
    """The [N] tensor that one item of `returns` stands for."""
    shape = (tokens, 1) if item.endswith("[:, 0]") else (tokens,)
    if not isinstance(output, torch.Tensor):
        raise ResultShapeError(f"{item!r}: the function returned a {type(output).__name__}, not a tensor")
    if tuple(output.shape) != shape:
        raise ResultShapeError(f"{item!r}: the function returned shape {tuple(output.shape)}, the target says {shape}")
    vector = output.squeeze(1) if len(shape) == 2 else output
    return -vector if item.startswith("-") else vector
