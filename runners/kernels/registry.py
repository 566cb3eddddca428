"""The table of contents of the kernels: every one by name, with its contract. Nothing registers itself."""

from runners.kernels import compiled, cut_cross_entropy, fused, legacy, liger, megatron, online, plain
from runners.kernels.contract import Kernel

KERNELS: tuple[Kernel, ...] = (
    fused.KERNEL,
    legacy.KERNEL,
    legacy.KERNEL_BF16,
    online.KERNEL,
    megatron.FUSED.kernel(),
    megatron.UNFUSED.kernel(),
    liger.LIGER.kernel(),
    cut_cross_entropy.CUT_CROSS_ENTROPY.kernel(),
    plain.EAGER,
    compiled.KERNEL,
    plain.PEER,
    plain.REFERENCE,
)


def kernel(name: str) -> Kernel:
    """The kernel of that name, runnable here or not (`Kernel.missing`); KeyError's message names the known ones."""
    for known in KERNELS:
        if known.name == name:
            return known
    raise KeyError(f"unknown kernel {name!r}; known are {', '.join(known.name for known in KERNELS)}")
