"""The measuring host, as facts: what identifies a series of each metric class, and what is merely good to know."""

import os
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from pydantic import JsonValue

from runners.instruments.accuracy import ORACLE
from runners.instruments.cuda_device import device_facts
from runners.instruments.cuda_timing import CUDA_TIMING_CONTRACT
from runners.instruments.timing import TIMING_CONTRACT
from service.wire import Environment

# Changes when an exact or numeric metric would come out otherwise on equal code. History: 1, the first; 2, memory and
# work on inputs never seen before.
INSTRUMENTS = 2
# Distributions whose version decides what a kernel computes.
_KERNEL_PACKAGES = (
    "apex", "cut-cross-entropy", "flash-attn", "liger-kernel", "megatron-core", "quack-kernels", "transformer-engine",
    "triton",
)  # fmt: skip
_CPU_INFO = Path("/proc/cpuinfo")


def environment(device: str = "cpu") -> Environment:
    """This process's environment, with the number of threads that torch has now. Raises ValueError but for "cpu"."""
    if device != "cpu":
        raise ValueError(f"device {device!r} has no instruments yet: measure on 'cpu'")
    cpu_info = _first_processor()
    model = cpu_info.get("model name") or platform.processor() or platform.machine()
    exact: dict[str, JsonValue] = {
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "packages": _kernel_packages(),
        "instruments": INSTRUMENTS,
    }
    flags: dict[str, JsonValue] = {
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "mkldnn": bool(torch.backends.mkldnn.enabled),
    }
    return Environment(
        device_class="cpu",
        device=model,
        exact=exact,
        numeric=exact | {"oracle": ORACLE, "flags": flags},
        timing={
            "device": model,
            "driver": None,
            "cuda": torch.version.cuda,
            "torch": torch.__version__,
            "packages": _kernel_packages(),
            "threads": torch.get_num_threads(),
            "timing_contract": TIMING_CONTRACT,
        },
        volatile=_volatile(cpu_info),
    )


def cuda_environment(device: torch.device) -> Environment:
    """The environment of what runners.instruments.cuda_measure measures on a CUDA device."""
    facts = device_facts(device)
    model = str(facts["device"])
    exact: dict[str, JsonValue] = {
        "device": model,
        "capability": facts["capability"],
        "torch": torch.__version__,
        "packages": _kernel_packages(),
        "instruments": INSTRUMENTS,
    }
    flags: dict[str, JsonValue] = {
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
    }
    of_the_device = ("device", "driver", "cuda", "multiprocessors", "memory_bytes", "cache_bytes")
    return Environment(
        device_class="cuda",
        device=model,
        exact=exact,
        numeric=exact | {"oracle": ORACLE, "flags": flags},
        timing={name: facts[name] for name in of_the_device}
        | {
            "torch": torch.__version__,
            "packages": _kernel_packages(),
            "threads": torch.get_num_threads(),
            "timing_contract": CUDA_TIMING_CONTRACT,
        },
        volatile=_volatile({}),
    )


def _kernel_packages() -> dict[str, JsonValue]:
    """Version by distribution, of the installed ones."""
    found: dict[str, JsonValue] = {}
    for name in _KERNEL_PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _volatile(cpu_info: Mapping[str, str]) -> dict[str, JsonValue]:
    """Facts of the moment: load of the last minute, clock rate where the host tells it, host name."""
    facts: dict[str, JsonValue] = {"hostname": platform.node(), "python": platform.python_version()}
    if hasattr(os, "getloadavg"):
        facts["load_average"] = os.getloadavg()[0]
    if "cpu MHz" in cpu_info:
        facts["megahertz"] = float(cpu_info["cpu MHz"])
    return facts


def _first_processor() -> dict[str, str]:
    """The first processor's entry of /proc/cpuinfo, empty where there is none."""
    if not _CPU_INFO.exists():
        return {}
    lines = _CPU_INFO.read_text(encoding="utf-8").split("\n\n", 1)[0].splitlines()
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
