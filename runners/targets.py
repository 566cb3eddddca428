"""Target files: what a repository's kernels are and which cases fit them. Calls no kernel and imports no torch."""

import re
import tomllib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from pydantic import ValidationError

from service.wire import Case, Target, TargetKernel

# The built-in kernels by name: reading them off runners.kernels.registry would import torch.
BUILT_IN = (
    "fused", "legacy", "legacy_bf16", "online", "megatron_fused", "megatron_unfused", "liger", "cut_cross_entropy",
    "eager", "compiled", "peer", "reference",
)  # fmt: skip
_REQUIREMENT = re.compile(r"^\s*([A-Za-z0-9][A-Za-z0-9._-]*)\s*(?:==\s*([^\s;,]+))?")


class TargetError(ValueError):
    """A target file that does not say what it must. The message names file, key and rule."""


def load_target(path: str | Path) -> Target:
    """Read a target file. Raises TargetError that names the file, each wrong key and the rule it breaks."""
    path = Path(path)
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TargetError(f"{path}: cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise TargetError(f"{path}: is not TOML: {error}") from error
    try:
        target = Target.model_validate(content)
    except ValidationError as error:
        raise TargetError("\n".join(f"{path}: {line}" for line in _complaints(error))) from error
    if faults := faults_of(target):
        raise TargetError("\n".join(f"{path}: {line}" for line in faults))
    return target


def faults_of(target: Target) -> list[str]:
    """What a runner cannot do that a target asks for, each as key and rule; the wire does not know what runners can."""
    from runners.suites import SUITES  # noqa: PLC0415 - measured processes import this module, and need no suites

    faults = [
        f"kernels[{number}].control: there is no built-in kernel {kernel.control!r}; known are {', '.join(BUILT_IN)}"
        for number, kernel in enumerate(target.kernels)
        if kernel.control is not None and kernel.control not in BUILT_IN
    ]
    faults += [
        f"paths[{number}]: {path!r} is a pattern, and paths are taken literally: name the file, or the directory"
        " that stands for all below it"
        for number, path in enumerate(target.paths)
        if set(path) & set("*?[") or path.startswith(":")
    ]
    if target.suite not in SUITES:
        faults.append(f"suite: there is no suite {target.suite!r}; known are {', '.join(sorted(SUITES))}")
    faults += [f"python.requires: {fault}" for fault in map(_requirement_fault, target.python.requires) if fault]
    return faults


def _complaints(error: ValidationError) -> Iterable[str]:
    for wrong in error.errors():
        key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in wrong["loc"]).lstrip(".")
        yield f"{key or 'the file'}: {wrong['msg'].removeprefix('Value error, ')}"


def needed_arguments(case: Case) -> frozenset[str]:
    """The arguments of ours that a kernel must take for this case to mean what it says."""
    needed = {
        "keep_mask": case.keep_mask or case.distribution == "masked",
        "chunk_size": case.chunk_size is not None,
        "temperature": case.temperature != 1.0,
        "group": case.tensor_parallel != 1,
    }
    return frozenset(name for name, is_needed in needed.items() if is_needed)


def fitting_cases(kernel: TargetKernel, cases: Iterable[Case]) -> list[Case]:
    """The cases that can be asked of a kernel: it takes what they need, and returns an entropy exactly where they
    want one, and the vocabulary divides by the ranks.
    """
    returns_entropy = any("entropy" in item for item in kernel.returns)

    def fits(case: Case) -> bool:
        if case.vocabulary % case.tensor_parallel or not needed_arguments(case) <= set(kernel.arguments):
            return False
        if case.entropy == "off":
            return "with_entropy" in kernel.arguments or not returns_entropy
        return returns_entropy

    return [case for case in cases if fits(case)]


def missing_requirements(requires: Iterable[str]) -> list[str]:
    """Those of a target's `requires` that this interpreter does not have, each as a sentence that says what to do."""
    return [sentence for requirement in requires if (sentence := _missing(requirement))]


def _requirement_fault(requirement: str) -> str | None:
    if _REQUIREMENT.match(requirement):
        return None
    return f"{requirement!r} is not a distribution's name with an optional ==version"


def _missing(requirement: str) -> str | None:
    match = _REQUIREMENT.match(requirement)
    assert match is not None, "faults_of comes first"
    name, wanted = match.groups()
    remedy = f"install {requirement.strip()!r}, or the baselines extra of ulpwatch, which brings megatron-core"
    try:
        found = metadata.version(name)
    except metadata.PackageNotFoundError:
        return f"the target requires {name}, which is not installed: {remedy}"
    if wanted is not None and found != wanted:
        return f"the target requires {name} {wanted}, but {found} is installed: {remedy}"
    return None
