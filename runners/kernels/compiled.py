"""The kernel `compiled`: the rows of `eager` under torch.compile, which compiles each combination of options once.

Compiling takes 10 to 40 seconds, and on a CPU a C++ compiler; sizes are dynamic, so that another one compiles nothing.
Where operations are counted it runs as `eager`.
"""

import os
import shutil
import warnings
from functools import cache, partial
from typing import Any, Literal

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from runners.kernels import plain
from runners.kernels.contract import Kernel

# Combinations of dtype, keep-mask, temperature, entropy mode and autograd: each is a compilation of the same code.
_LIMITS = {"recompile_limit": 128, "accumulated_recompile_limit": 128}


def rows(
    x: torch.Tensor,
    targets: torch.Tensor,
    dropped: torch.Tensor | None,
    temperature: float | None,
    entropy: Literal["off", "value", "gradient"],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See plain.Rows. Raises RuntimeError that says why it could not be compiled."""
    if x.shape[0] == 0 or is_watched():  # nothing to gain from a compilation, or none to be had
        return plain.EAGER_ROWS(x, targets, dropped, temperature, entropy)
    run, failures = _compiled()
    # A Python float would be an input of the compiled code, 64 bits wide. On the CPU it may meet tensors of any device.
    divisor = None if temperature is None else torch.tensor(temperature, dtype=torch.float32)
    try:
        with warnings.catch_warnings(), torch._dynamo.config.patch(_LIMITS):
            warnings.simplefilter("ignore")  # the compiler uses what torch itself has deprecated
            result: tuple[torch.Tensor, torch.Tensor | None] = run(x, targets, dropped, divisor, entropy)
    except failures as error:
        reason = " ".join(str(error).split("\n\n")[0].split())
        raise RuntimeError(f"compiled: torch.compile failed on this machine, use eager: {reason}") from error
    return result


@cache
def _compiled() -> tuple[Any, tuple[type[Exception], ...]]:
    """The rows of `eager` to be compiled, and what a compiler raises; it is imported when it is first needed."""
    from torch._dynamo.exc import TorchDynamoException  # noqa: PLC0415 -- a second, for this kernel alone
    from torch._inductor.exc import InductorError  # noqa: PLC0415

    return torch.compile(plain.EAGER_ROWS, dynamic=True, fullgraph=True), (TorchDynamoException, InductorError)


def is_watched() -> bool:
    """Whether a dispatch mode, as one that counts operations, sees every operation: then torch compiles nothing."""
    return _get_current_dispatch_mode() is not None


def missing_compiler(name: str) -> str | None:
    """What to install for the kernel of this name, which is compiled, None where nothing is missing."""
    if os.environ.get("CXX") or any(map(shutil.which, ("g++", "clang++"))) or torch.cuda.is_available():
        return None
    return f"{name} needs a C++ compiler for torch.compile on a CPU, and there is none: install g++, or set CXX"


KERNEL = Kernel(
    "compiled",
    partial(plain.run, name="compiled", rows_of=rows),
    plain.EAGER.contract,
    missing=missing_compiler("compiled"),
)
