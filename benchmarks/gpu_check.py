"""Everything that needs a GPU, in one run without network, as one JSON document.

    .venv/bin/python benchmarks/gpu_check.py --out FILE.json     on a machine with one CUDA device: under six minutes
    .venv/bin/python benchmarks/gpu_check.py --dry --out FILE    on a CPU: the same parts on little, to prove the way

The parts are the CUDA tests, the suite `smoke` on built-in kernels, the kernel benchmark and the self-test. Each runs
in a process of its own under its own time limit, and the document is written anew after each, so that one that hangs,
dies or cannot be imported costs nothing but itself. Exits 0 if every part ended as it should, else 1.
"""

import argparse
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SCHEMA = 1
TOTAL_SECONDS = 350.0
SMOKE_KERNELS = ("online", "fused", "legacy")
BENCHMARK = "benchmark"
# What it is not worth the time to measure, and what is measured last for what it compiles.
_NOT_BENCHMARKED = frozenset({"peer", "reference", "legacy_bf16"})
_SLOW_TO_START = "compiled"
_PACKAGES = ("ulpwatch", "torch", "triton", "numpy", "pydantic", "pytest", "megatron-core", "liger-kernel")
_TAIL_CHARACTERS = 6000
_DRY_CASES = 1
_DEATH_SECONDS = 10.0

Figures = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the check. `figures` reads the numbers off what its process printed."""

    name: str
    command: tuple[str, ...]
    seconds: float
    figures: Callable[[str], Figures]
    missing: str | None = None


@dataclass(slots=True)
class Told:
    """How a part ended: ok, failed, timeout or skipped. `tail` is the end of what it printed, where it is not ok."""

    outcome: str
    seconds: float = 0.0
    reason: str = ""
    command: str = ""
    figures: Figures = field(default_factory=dict)
    tail: str = ""


# --- The run ----------------------------------------------------------------------------------------------------------


def main() -> None:
    """Run all parts, or, as one of our own processes, measure the suite."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu-check.json"))
    parser.add_argument("--dry", action="store_true", help="on a CPU, little of each part")
    parser.add_argument("--only", action="append", choices=("tests", "smoke", "benchmark", "selftest"))
    parser.add_argument("--measure-suite", metavar="NAME", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure_suite:
        measure_suite(arguments.measure_suite, dry=arguments.dry)
        return
    known = machine(dry=arguments.dry)
    if not arguments.dry and known["device"].get("kind") != "cuda":
        raise SystemExit(f"no CUDA device: {known['device'].get('missing')}; --dry proves the way on a CPU")
    chosen = [part for part in parts(dry=arguments.dry) if not arguments.only or part.name in arguments.only]
    document = run(chosen, known, arguments.out)
    for name, told in document["parts"].items():
        print(f"{name:<10}{told['outcome']:<9}{told['seconds']:6.1f} s  {told['reason']}")
    print(f"written to {arguments.out}")
    raise SystemExit(0 if document["outcome"] == "ok" else 1)


def run(chosen: Sequence[Part], known: Mapping[str, Any], out: Path, total_seconds: float = TOTAL_SECONDS) -> Figures:
    """Run the parts one after another, each within its limit and within what is left of all; write after each."""
    began = time.monotonic()
    document: Figures = {
        "schema": SCHEMA,
        "outcome": "unfinished",
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        **known,
        "parts": {},
    }
    _write(document, out)
    for part in chosen:
        left = total_seconds - (time.monotonic() - began)
        document["parts"][part.name] = asdict(_ended(part, min(part.seconds, left)))
        document["seconds"] = round(time.monotonic() - began, 1)
        _write(document, out)
    outcomes = {told["outcome"] for told in document["parts"].values()}
    document["outcome"] = "ok" if outcomes <= {"ok"} else "failed"
    _write(document, out)
    return document


def _ended(part: Part, limit: float) -> Told:
    """Run one part; whatever goes wrong with it is told, not raised."""
    command = " ".join(part.command)
    if part.missing is not None:
        return Told("skipped", reason=part.missing, command=command)
    if limit <= 0:
        return Told("skipped", reason="the time of the whole check was used up", command=command)
    began = time.monotonic()
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            part.command,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "KINETO_LOG_LEVEL": "99"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):  # a process that hangs in its driver does not even die
                process.wait(_DEATH_SECONDS)
        output.seek(0)
        printed = output.read().decode(errors="replace")
    told = Told("ok", round(time.monotonic() - began, 1), command=command)
    if status is None:
        told.outcome, told.reason = "timeout", f"ended after {limit:.0f} s; the figures are those until then"
    elif status:
        told.outcome, told.reason = "failed", f"exit status {status}"
    try:
        told.figures = part.figures(printed)
    except Exception as error:  # noqa: BLE001 -- output that cannot be read is this part's failure and no other's
        told.outcome, told.reason = "failed", f"{told.reason}; its output cannot be read: {error!r}".lstrip("; ")
    if told.outcome != "ok":
        told.tail = printed[-_TAIL_CHARACTERS:]
    return told


def _write(document: Figures, out: Path) -> None:
    """Replace the file whole, so that a reader never finds half of it."""
    beside = out.with_name(out.name + ".part")
    beside.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    beside.replace(out)


# --- The parts --------------------------------------------------------------------------------------------------------


def parts(*, dry: bool) -> list[Part]:
    """The parts in the order of their worth; together their limits are those of the whole."""
    python = sys.executable
    # Another version of torch may warn of what is none of ours.
    tests = (python, "-m", "pytest", "tests/gpu", "-v", "--tb=short", "-p", "no:cacheprovider", "-W", "default")
    own = (python, "benchmarks/gpu_check.py", "--measure-suite")
    smoke = (*own, "smoke")
    benchmark = (python, "benchmarks/kernels.py")
    large = ("--device", "cuda", "--tokens", "8192", "--vocabulary", "151936", "--dtype", "bfloat16")
    selftest = (python, "-m", "ulpwatch", "selftest")
    if dry:
        smoke = (*smoke, "--dry")
        large = ("--tokens", "4", "--vocabulary", "1000", "--repetitions", "2")
        selftest = (*selftest, "--fault", "1")
    table = Part("benchmark", (*benchmark, *large), 40, lambda printed: {"table": printed.splitlines()})
    if not dry and "--device" not in (ROOT / "benchmarks" / "kernels.py").read_text(encoding="utf-8"):
        table = Part("benchmark", (*own, BENCHMARK), 40, figures_of_suite)
    return [
        Part("tests", tests, 130, figures_of_tests),
        Part("smoke", smoke, 100, figures_of_suite),
        table,
        Part("selftest", selftest, 80, lambda printed: {"report": printed.splitlines()[-60:]}),
    ]


def figures_of_tests(printed: str) -> Figures:
    """How many tests ended how, and which failed, off pytest's lines as they came."""
    ended = re.findall(r"^(tests/\S+?::.+?) (PASSED|FAILED|ERROR|SKIPPED)\b", printed, re.MULTILINE)
    outcomes = [outcome for _, outcome in ended]
    skipped = re.findall(r"^NOT TESTED HERE: (.*)$", printed, re.MULTILINE)
    return {
        **{outcome.lower(): outcomes.count(outcome) for outcome in ("PASSED", "FAILED", "ERROR", "SKIPPED")},
        "failures": sorted({name for name, outcome in ended if outcome in ("FAILED", "ERROR")}),
        "not_tested": skipped,
    }


def figures_of_suite(printed: str) -> Figures:
    """The lines of `measure_suite`: the instruments' doubts and a measurement each."""
    lines = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    measurements = [line for line in lines if "case" in line]
    heads = [line for line in lines if "case" not in line]
    outcomes = [line["outcome"] for line in measurements]
    if not measurements:
        raise ValueError("no case was measured")
    return {
        **{name: value for head in heads for name, value in head.items()},
        "outcomes": {outcome: outcomes.count(outcome) for outcome in sorted(set(outcomes))},
        "measurements": measurements,
    }


def measure_suite(name: str, *, dry: bool) -> None:
    """Measure a suite's cases on the built-in kernels and print a line of JSON for each, the first kernel's first."""
    import torch  # noqa: PLC0415 -- the check itself must run where an import fails

    from runners.instruments.cuda_measure import Instruments, measure_case_on_device  # noqa: PLC0415
    from runners.instruments.stopping import StoppingRule  # noqa: PLC0415
    from runners.instruments.subject import Subject  # noqa: PLC0415
    from runners.kernels.registry import kernel  # noqa: PLC0415

    cases, words = _cases(name)
    kernels = _benchmarked() if name == BENCHMARK else SMOKE_KERNELS
    ordered = sorted(cases, key=lambda case: (case.vocabulary, case.dtype, case.keep_mask, case.temperature))
    if dry:
        from runners.instruments.memory import measure_memory  # noqa: PLC0415

        device, instruments = "cpu", Instruments(HostTimer(), StoppingRule(least=3, most=3), measure_memory)
        ordered = [case.model_copy(update={"tokens": 70, "vocabulary": 512}) for case in ordered[:_DRY_CASES]]
    else:
        from runners.instruments.cuda_device import CudaTimer  # noqa: PLC0415

        device = f"cuda:{torch.cuda.current_device()}"
        timer = CudaTimer.of(torch.device(device))
        instruments = Instruments(timer, StoppingRule(least=20, seconds=0.3))
        words |= {"doubts": timer.doubts, "memory_bytes_per_second": timer.memory_bytes_per_second}
    print(json.dumps({**words, "planned": len(ordered) * len(kernels)}), flush=True)
    for kernel_name in kernels:
        subject = Subject(kernel_name, kernel(kernel_name).run, device=device)
        for case in ordered:
            measured = measure_case_on_device(subject, case, instruments)
            print(json.dumps(measured.model_dump(mode="json", exclude={"case"}) | {"case": case.id}), flush=True)


def _cases(name: str) -> tuple[list[Any], Figures]:
    """The cases of a suite or of the benchmark. KeyError for an unknown suite."""
    from runners.suites import suite  # noqa: PLC0415
    from service.wire import Case  # noqa: PLC0415

    if name == BENCHMARK:
        return [Case(tokens=8192, vocabulary=151936, dtype=dtype) for dtype in ("bfloat16", "float32")], {"suite": name}
    return list(suite(name)), {"suite": name}


def _benchmarked() -> list[str]:
    """The kernels that can run here."""
    from runners.kernels.registry import KERNELS  # noqa: PLC0415

    names = [known.name for known in KERNELS if known.missing is None and known.name not in _NOT_BENCHMARKED]
    return sorted(names, key=lambda name: (name == _SLOW_TO_START, name != SMOKE_KERNELS[0]))


class HostTimer:
    """The host's clock in a device's place, for a dry run: nothing is evicted, nothing throttled."""

    cache_bytes = 0
    memory_bytes_per_second: float | None = None

    def evict(self) -> None: ...

    def mark(self) -> float:
        return time.perf_counter()

    def wait(self, mark: float) -> None: ...

    def wait_for_all(self) -> None: ...

    def seconds_between(self, one: float, other: float) -> float:
        return other - one

    def now(self) -> float:
        return time.perf_counter()

    def is_throttled(self) -> bool | None:
        return None


# --- The machine ------------------------------------------------------------------------------------------------------


def machine(*, dry: bool) -> Figures:
    """Device, driver, versions and the commit that is checked."""
    return {
        "dry": dry,
        "device": _device(),
        "versions": {"python": platform.python_version(), **dict(_versions())},
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "commit": _commit(),
    }


def _device() -> Figures:
    try:
        import torch  # noqa: PLC0415

        from runners.instruments.cuda_device import device_facts  # noqa: PLC0415
        from runners.instruments.fingerprint import cuda_environment  # noqa: PLC0415

        if not torch.cuda.is_available():
            return {"kind": "cpu", "missing": f"torch {torch.__version__} finds none"}
        device = torch.device("cuda", torch.cuda.current_device())
        environment = cuda_environment(device).model_dump(mode="json", exclude={"volatile"})
        return {"kind": "cuda", **device_facts(device), "environment": environment}
    except Exception as error:  # noqa: BLE001 -- what is missing is told in the document
        return {"kind": "unknown", "missing": repr(error)}


def _versions() -> Iterator[tuple[str, str]]:
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            yield package, version(package)


def _commit() -> str | None:
    with suppress(OSError, subprocess.CalledProcessError):
        return subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()
    return None


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
