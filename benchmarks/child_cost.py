"""What a measured child costs before its first case, beside what cannot be avoided, and what the runner itself holds.

    .venv/bin/python benchmarks/child_cost.py [repetitions]

Prints medians of one run: a bare interpreter, one that imports torch, and a child from start to its first case and to
its first sample, each as seconds and as a ratio to the import of torch. The runner's own memory is its largest
resident set.
"""

import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from runners.channel import SubjectPlan
from runners.process import Limits, converse
from service.wire import Case

CASE = Case(tokens=1, vocabulary=1000)


class Clock:
    """Notes when a process said what: a runners.process.Listener."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.first_case = self.first_sample = 0.0
        self.is_measuring = False

    def receive(self, message: dict[str, Any]) -> bool:
        """Take a message; True if it was the last."""
        now = time.perf_counter() - self.started
        if message["kind"] == "begin":
            self.first_case = now
        if message["kind"] == "measurement":
            self.first_sample = now
        return message["kind"] == "done"


def child() -> tuple[float, float]:
    """Seconds from the start of a child to its first case and to its first sample."""
    clock = Clock()
    ending = converse(SubjectPlan(built_in="fused"), [CASE], clock, limits=Limits())
    if ending.outcome != "done":
        raise SystemExit(f"the child did not finish: {ending.story}")
    return clock.first_case, clock.first_sample


def seconds(action: Callable[[], object]) -> float:
    """How long an action takes."""
    before = time.perf_counter()
    action()
    return time.perf_counter() - before


def python(code: str) -> None:
    """Run a line in a new interpreter."""
    subprocess.run([sys.executable, "-c", code], check=True)


def main() -> None:
    """Interleave the repetitions, so that what the machine does meanwhile falls on all rows alike."""
    repetitions = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    rows: dict[str, list[float]] = {
        "bare interpreter": [],
        "import torch": [],
        "to first case": [],
        "to first sample": [],
    }
    for _ in range(repetitions):
        rows["bare interpreter"].append(seconds(lambda: python("pass")))
        rows["import torch"].append(seconds(lambda: python("import torch")))
        first_case, first_sample = child()
        rows["to first case"].append(first_case)
        rows["to first sample"].append(first_sample)
    medians = {name: statistics.median(samples) for name, samples in rows.items()}
    print(f"{'':<18}{'median s':>10}{'ratio':>8}   {repetitions} repetitions, ratio to import torch")
    for name, median in medians.items():
        print(f"{name:<18}{median:>10.2f}{median / medians['import torch']:>8.2f}")
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"runner's own largest resident set: {resident:.0f} MiB (limit 1024)")


if __name__ == "__main__":
    main()
