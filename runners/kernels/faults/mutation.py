"""Turns a kernel into a mutant: exact edits of its module's source, run as a module of its own.

So a mutant is the kernel as it is today but for the fault, and an edit that no longer fits says so. The kernel itself
stays as it is.
"""

import inspect
import sys
from collections.abc import Iterable
from dataclasses import replace
from types import ModuleType

from runners.kernels.contract import Kernel
from runners.kernels.faults import Edit


class EditError(ValueError):
    """An edit does not fit the kernel's source. The message quotes it."""


def mutated(kernel: Kernel, edits: Iterable[Edit]) -> Kernel:
    """`kernel` under its own name with the edits made in its module. Raises EditError for one that does not fit."""
    original = sys.modules[kernel.run.__module__]
    source = edited(inspect.getsource(original), edits)
    module = ModuleType(original.__name__, original.__doc__)
    exec(compile(source, f"{original.__file__} (mutated)", "exec"), module.__dict__)  # noqa: S102 -- our own source
    return replace(kernel, run=module.run)


def edited(source: str, edits: Iterable[Edit]) -> str:
    """`source` after the edits, in order. Raises EditError for one whose first half does not occur exactly once."""
    for before, after in edits:
        if (count := source.count(before)) != 1:
            raise EditError(
                f"a fault edits {before!r}, which occurs {count} times in the kernel: edit what is there now"
            )
        source = source.replace(before, after)
    return source
