"""Target files, and which cases fit a kernel."""

import subprocess
import sys
from pathlib import Path

import pytest

from runners.suites import suite
from runners.targets import BUILT_IN, TargetError, fitting_cases, load_target, missing_requirements, needed_arguments
from service.wire import Case, TargetKernel

ROOT = Path(__file__).parent.parent.parent
FILE = """
name = "tiny"
repository = "."
paths = ["loss.py"]
[[kernels]]
name = "fused"
entry = "loss:f"
arguments = {logits = "x", targets = "y"}
returns = ["log_prob", "entropy"]
"""


def kernel(*arguments: str, returns: tuple[str, ...] = ("log_prob", "entropy")) -> TargetKernel:
    mapped = {name: name for name in ("logits", "targets", *arguments)}
    return TargetKernel(name="fused", entry="loss:f", arguments=mapped, returns=list(returns))


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ('name = "tiny"', "name = tiny", "is not TOML"),
        ('name = "tiny"', "", r"name: Field required"),
        ('name = "tiny"', 'name = "ti ny"', r"name: String should match"),
        (
            'entry = "loss:f"',
            'entry = "loss"',
            r"kernels\[0\]: entry 'loss' is not of the form package.module:function",
        ),
        ('targets = "y"', 'labels = "y"', r"kernels\[0\].arguments: unknown case argument 'labels'; known are"),
        ('"entropy"]', '"entropie"]', r"kernels\[0\]: returns: 'entropie' is not one of"),
        ('["loss.py"]', '["../loss.py"]', r"paths\[0\]: path '../loss.py' must lie inside the repository"),
        ('repository = "."', 'repository = "."\nbranches = 1', "branches: Extra inputs are not permitted"),
        (
            'name = "fused"',
            'name = "fused"\ncontrol = "legcy"',
            r"kernels\[0\]\.control: there is no built-in kernel 'legcy'; known are .*legacy,",
        ),
        (
            '["loss.py"]',
            '["a", "kernels/*.py"]',
            r"paths\[1\]: 'kernels/\*\.py' is a pattern, and paths are taken literally",
        ),
        ('["loss.py"]', '[":(glob)kernels"]', r"paths\[0\]: ':\(glob\)kernels' is a pattern"),
        ("[[kernels]]", '[python]\nenv = {"A=B" = "1"}\n[[kernels]]', r"python\.env\.A=B\..*: String should match"),
        (
            "[[kernels]]",
            '[python]\nenv = {A = "\\u0000"}\n[[kernels]]',
            r"python\.env\.A: the character U\+0000 cannot be stored",
        ),
        ("[[kernels]]", '[python]\nrequires = ["==3"]\n[[kernels]]', r"python\.requires: '==3' is not a distribution"),
    ],
)
def test_a_wrong_target_file_is_refused_with_file_key_and_rule(
    tmp_path: Path, old: str, new: str, complaint: str
) -> None:
    path = tmp_path / "tiny.toml"
    path.write_text(FILE.replace(old, new))
    with pytest.raises(TargetError, match=complaint) as caught:
        load_target(path)
    assert str(path) in str(caught.value)


def test_a_target_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match=r"absent\.toml: cannot be read: No such file"):
        load_target(tmp_path / "absent.toml")


def test_the_ready_target_for_slime_calls_its_function_at_every_commit() -> None:
    target = load_target(ROOT / "targets" / "slime.toml")
    (fused,) = target.kernels
    assert fused.entry == "slime.utils.ppo_utils:calculate_log_probs_and_entropy"
    assert fused.arguments["keep_mask"] == "log_prob_keep_mask"
    assert fused.returns == ["log_prob[:, 0]", "entropy"]
    assert fused.absent == {"chunk_size": -1}
    assert set(fused.since) == {"chunk_size", "keep_mask", "with_entropy_grad"}
    assert fused.control == "legacy"
    assert (target.python.process_group, target.python.megatron) == (True, True)


def test_a_case_fits_a_kernel_that_takes_what_it_needs() -> None:
    cases = suite("quick")
    everything = kernel("keep_mask", "chunk_size", "temperature", "with_entropy", "with_entropy_grad")
    assert fitting_cases(everything, cases) == list(cases)
    plain = fitting_cases(kernel("with_entropy"), cases)
    assert plain
    assert not any(needed_arguments(case) for case in plain)
    assert {case.entropy for case in plain} == {"off", "value", "gradient"}


def test_a_case_without_entropy_needs_a_switch_or_a_kernel_that_returns_none() -> None:
    off, gradient = Case(tokens=1, vocabulary=8, entropy="off"), Case(tokens=1, vocabulary=8)
    assert fitting_cases(kernel(), [off, gradient]) == [gradient]
    assert fitting_cases(kernel(returns=("log_prob",)), [off, gradient]) == [off]


def test_a_masked_distribution_needs_the_mask() -> None:
    masked = Case(tokens=1, vocabulary=8, distribution="masked")
    assert fitting_cases(kernel("with_entropy"), [masked]) == []
    assert fitting_cases(kernel("with_entropy", "keep_mask"), [masked]) == [masked]


def test_a_split_vocabulary_needs_a_group_and_a_whole_number_of_columns() -> None:
    split, uneven = (Case(tokens=1, vocabulary=vocabulary, tensor_parallel=2) for vocabulary in (8, 9))
    assert fitting_cases(kernel("with_entropy"), [split, uneven]) == []
    assert fitting_cases(kernel("with_entropy", "group"), [split, uneven]) == [split]


def test_a_missing_requirement_is_named_with_its_remedy() -> None:
    (sentence,) = missing_requirements(["pydantic", "no-such-distribution==1.2 --no-deps"])
    assert "requires no-such-distribution, which is not installed" in sentence
    assert "baselines extra" in sentence


def test_a_requirement_of_another_version_is_missing() -> None:
    (sentence,) = missing_requirements(["pydantic==0.0.1"])
    assert "requires pydantic 0.0.1, but" in sentence


def test_the_built_in_kernels_are_those_of_the_registry() -> None:
    from runners.kernels.registry import KERNELS  # noqa: PLC0415 - it imports torch

    assert sorted(BUILT_IN) == sorted(kernel.name for kernel in KERNELS)


def test_the_job_side_never_imports_torch_or_numpy() -> None:
    code = "import sys, runners.job, runners.targets; print(sorted({'torch', 'numpy', 'fastapi'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"
