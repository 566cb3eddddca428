"""The Triton kernels of `online` without a GPU: their results in Triton's interpreter, and that they compile."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from runners.kernels.reference import reference

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed: pip install -e '.[triton]'", allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from runners.kernels import online_triton

PROGRAM = Path(__file__).parent / "online_interpreter.py"
ROOT = Path(__file__).parents[3]
Results = dict[Any, dict[str, Any]]


def _load_program() -> ModuleType:
    spec = importlib.util.spec_from_file_location("online_interpreter", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


program: Any = _load_program()


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """The results of every combination."""
    path = tmp_path_factory.mktemp("interpreter") / "results.pt"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, str(PROGRAM), str(path)], env=environment, check=True, timeout=240)
    results: Results = torch.load(path)
    return results


def _expected(combination: Any) -> tuple[Any, torch.Tensor]:
    """The oracle and the gradient of what the combination differentiates."""
    inputs = program.combination_inputs(combination)
    oracle = reference(
        inputs.logits,
        inputs.targets,
        upstream_log_prob=inputs.upstream_log_prob,
        upstream_entropy=inputs.upstream_entropy,
        keep_mask=inputs.keep_mask,
        temperature=combination.temperature,
    )
    with_entropy = combination.mode == "gradient"
    return oracle, oracle.g_log_prob + oracle.g_entropy if with_entropy else oracle.g_log_prob


@pytest.mark.parametrize("combination", program.COMBINATIONS, ids=lambda each: "-".join(map(str, each)))
def test_the_interpreted_kernels_give_what_the_oracle_gives(combination: Any, interpreted: Results) -> None:
    results = interpreted[combination]
    oracle, gradient = _expected(combination)
    # Half precision keeps 8 bits of the gradient, or 11; the interpreter cuts bfloat16 off where a GPU rounds it.
    rounding = {"float32": 2e-6, "bfloat16": 2**-8, "float16": 2**-11}[combination.dtype]
    if combination.distribution == "confident":  # 1 - p is small beside what rounds
        rounding = 1e-4
    assert torch.allclose(results["log_prob"].double(), oracle.log_prob, rtol=0, atol=5e-6, equal_nan=True)
    assert (results["entropy"] is None) == (combination.mode == "off")
    if combination.mode != "off":
        assert torch.allclose(results["entropy"].double(), oracle.entropy, rtol=0, atol=4e-6, equal_nan=True)
    error = (results["gradient"].double() - gradient).norm()
    assert error <= rounding * gradient.norm().clamp_min(2**-24)
    if combination.layout == "dead row of NaN":
        assert (results["gradient"][0] == 0).all()
    if combination.distribution == "neg_inf":
        logits = program.combination_inputs(combination).logits
        assert (results["gradient"][torch.isneginf(logits)] == 0).all()


# --- Ahead of time --------------------------------------------------------------------------------------------------

# A type for each kind of argument; every other one is a pointer to float32.
_TYPES = {"keep_mask": "*u8", "dead": "*u8", "target_column": "*i64", "temperature": "fp32"}
_SIZES = ("tokens", "width", "span", "blocks")
_ALL = ("has_whole", "has_weighted", "has_slope", "has_kept", "has_offset", "is_scaled")
# What a call may ask for: the lean case and the one with all there is.
FLAGS = [("has_whole",), ("has_whole", "has_weighted", "has_slope"), _ALL]


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Compiles a kernel for an H100 or H200: `compiled(kernel, dtype, flags, aligned=...)`."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    def compile_(kernel: str, dtype: str, flags: tuple[str, ...], *, aligned: bool) -> Any:
        function = getattr(online_triton, kernel)
        constants: dict[str, Any] = {name: name in flags for name in _ALL if name in function.arg_names}
        constants["block"] = online_triton.BLOCK
        if aligned:  # the launcher makes a stride of 1 a constant
            constants |= {name: 1 for name in function.arg_names if name.endswith("column_stride")}
        types = _TYPES | dict.fromkeys(_SIZES, "i32") | {"logits": f"*{dtype}", "gradient": f"*{dtype}"}
        types |= {name: "i64" for name in function.arg_names if name.endswith("stride")}
        signature = {
            name: "constexpr" if name in constants else types.get(name, "*fp32") for name in function.arg_names
        }
        divisible = [
            place
            for place, name in enumerate(function.arg_names)
            if aligned and (name in ("logits", "gradient", "keep_mask", *_SIZES) or name.endswith("row_stride"))
        ]
        source = ASTSource(
            function,
            signature,
            constexprs={(function.arg_names.index(name),): value for name, value in constants.items()},
            attrs={(place,): [["tt.divisibility", 16]] for place in divisible},
        )
        return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": online_triton.WARPS})

    return compile_


@pytest.mark.parametrize("flags", FLAGS, ids="-".join)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("kernel", ["_sums_kernel", "_gradient_kernel"])
def test_the_kernels_compile_for_sm_90(
    kernel: str, dtype: str, flags: tuple[str, ...], compiled: Callable[..., Any]
) -> None:
    ptx = compiled(kernel, dtype, flags, aligned=True).asm["ptx"]
    assert ".target sm_90" in ptx
    assert ("cp.async" if kernel == "_sums_kernel" else "ld.global.v4") in ptx  # 16 bytes at a time


@pytest.mark.parametrize("kernel", ["_sums_kernel", "_gradient_kernel"])
def test_the_kernels_compile_for_odd_sizes_and_strides(kernel: str, compiled: Callable[..., Any]) -> None:
    assert compiled(kernel, "bf16", _ALL, aligned=False).asm["cubin"]
