"""`ulpwatch selftest`: the seeded faults measured like the commits of a target, and what was to be seen of each.

The baseline is the kernel as it is; every mutant is a commit of its own on top of it, and so is the same kernel again.
Whoever calls judges in between: nothing here knows a rule.
"""

import hashlib
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import count
from uuid import uuid4

from runners.job import Limits, measure_mutants, units_of
from runners.kernels.faults.table import FAULTS, KERNEL, UNMEASURED, Fault
from runners.suites import suite, suite_digest
from service.catalogue import BY_NAME, METRICS, Rule
from service.wire import Commit, Environment, Measurement, Result, Target, TargetKernel

SUITE, PARALLEL_SUITE = "selftest", "selftest_parallel"
BASELINE = Fault("A", "baseline", (), required=frozenset())
CLEAN = Fault("AA", "clean", (), required=frozenset())
"""No faults: the kernel as it is, which must pass when it follows itself."""
_WANTED_STATE = {BASELINE.name: "no-baseline", CLEAN.name: "pass"}

TARGET = Target(
    name="selftest",
    repository="built-in",
    paths=["."],
    suite=SUITE,
    kernels=[
        TargetKernel(
            name=KERNEL,
            entry=f"built_in:{KERNEL}",
            arguments={"logits": "logits", "targets": "targets", "group": "group"},
            returns=["log_prob", "entropy"],
            contract={"gradient": "float32"},
        )
    ],
)


@dataclass(frozen=True, slots=True)
class Measured:
    """A commit for each of `faults`, the baseline and then its children, and what was measured of them."""

    faults: tuple[Fault, ...]
    commits: list[Commit]
    results: list[Result]


@dataclass(frozen=True, slots=True)
class Finding:
    """What was seen of a fault: the state of its commit and the metrics that regressed there."""

    fault: Fault
    state: str
    seen: frozenset[str]

    @property
    def missed(self) -> frozenset[str]:
        """The required signals that were not seen."""
        return self.fault.required - self.seen

    @property
    def unexpected(self) -> frozenset[str]:
        """What was seen and is neither required nor allowed."""
        return frozenset(name for name in self.seen - self.fault.required if not _is_allowed(name, self.fault))

    @property
    def as_wanted(self) -> bool:
        """A fault is flagged by its signals and no others, the kernel as it is by none."""
        return self.state == _WANTED_STATE.get(self.fault.name, "regress") and not self.missed and not self.unexpected


def _is_allowed(metric: str, fault: Fault) -> bool:
    return bool({metric, str(BY_NAME[metric].family)} & fault.allowed)


def chosen(names: Collection[str]) -> tuple[Fault, ...]:
    """The faults of these names or numbers, all where none is given. KeyError's message names the known ones."""
    known = {key: fault for fault in FAULTS for key in (fault.name, fault.number)}
    if unknown := sorted(set(names) - set(known)):
        raise KeyError(f"unknown fault {unknown[0]!r}; known are {', '.join(fault.name for fault in FAULTS)}")
    return tuple(fault for fault in FAULTS if not names or {fault.name, fault.number} & set(names))


def measure(
    faults: Sequence[Fault],
    *,
    on_progress: Callable[[str], None] = lambda _words: None,
    limits: Limits | None = None,
) -> Measured:
    """Measure the kernel as it is, each fault, and the kernel as it is again. Raises JobError.

    Faults that several ranks are needed for are measured by a suite of their own, and so are the others.
    """
    measured = (BASELINE, *faults, CLEAN)
    base = _commit(BASELINE.name, parents=[])
    children = {fault.name: _commit(fault.name, parents=[base.sha]) for fault in (*faults, CLEAN)}
    commits = {BASELINE.name: base, **children}
    batches = {
        name: (BASELINE, *chosen, CLEAN)
        for name, parallel in ((SUITE, False), (PARALLEL_SUITE, True))
        if (chosen := [fault for fault in faults if fault.parallel is parallel])
    }
    steps = count(1)
    total = sum(len(batch) * len(suite(name)) for name, batch in batches.items())
    results = []
    for name, batch in batches.items():
        kernels = measure_mutants(
            KERNEL,
            [fault.edits for fault in batch],
            suite(name),
            on_progress=lambda words: on_progress(f"{next(steps)} of {total}: {words}"),
            limits=limits,
        )
        results += [_result(commits[one.name], name, *kernel) for one, kernel in zip(batch, kernels, strict=True)]
    return Measured(measured, [commits[fault.name] for fault in measured], results)


def _commit(name: str, *, parents: list[str]) -> Commit:
    """A commit that no repository has; the baseline is the oldest."""
    sha = hashlib.sha1(f"selftest {name}".encode(), usedforsecurity=False).hexdigest()
    committed_at = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(days=len(parents))
    return Commit(sha=sha, parents=parents, subject=name, committed_at=committed_at)


def _result(commit: Commit, suite_name: str, environment: Environment, measurements: list[Measurement]) -> Result:
    now = datetime.now(UTC)
    return Result(
        attempt=uuid4(),
        target=TARGET.name,
        commit=commit,
        suite=suite_name,
        suite_digest=suite_digest(suite_name),
        environment=environment,
        started_at=now,
        finished_at=now,
        units=units_of(measurements),
        measurements=measurements,
    )


# --- Telling ----------------------------------------------------------------------------------------------------------


def report(findings: Sequence[Finding]) -> str:
    """A row a metric and a column a fault, then a line for each fault, and what was not measured or not seen."""
    lines = [*_matrix(findings), "", *(_line(finding) for finding in findings)]
    if {finding.fault for finding in findings} >= set(FAULTS):
        lines += ["", *(f"{fault.number:>3}  {fault.name}: not run, {fault.reason}" for fault in UNMEASURED)]
        if blind := ", ".join(_blind(findings)):
            lines += ["", f"seen by no fault here: {blind}"]
    return "\n".join(lines)


def _matrix(findings: Sequence[Finding]) -> Iterable[str]:
    rows = [m.name for m in METRICS if any(m.name in finding.seen | finding.fault.required for finding in findings)]
    width = max(map(len, ("fault", *rows)))
    yield f"{'fault':<{width}}" + "".join(f"{finding.fault.number:>4}" for finding in findings)
    for name in rows:
        yield f"{name:<{width}}" + "".join(f"{_mark(finding, name):>4}" for finding in findings)
    yield "R required and seen, + allowed and seen, ! required and missed, X seen and not allowed"


def _mark(finding: Finding, metric: str) -> str:
    if metric in finding.missed:
        return "!"
    if metric in finding.unexpected:
        return "X"
    return "R" if metric in finding.fault.required else "+" if metric in finding.seen else "."


def _line(finding: Finding) -> str:
    told = [
        f"{words}: {', '.join(sorted(names))}"
        for words, names in (("missed", finding.missed), ("not allowed", finding.unexpected))
        if names
    ]
    answer = "as wanted" if finding.as_wanted else "; ".join(["NOT AS WANTED", *told])
    return f"{finding.fault.number:>3}  {finding.fault.name}: {finding.state}, {answer}"


def _blind(findings: Sequence[Finding]) -> Iterable[str]:
    """The metrics that decide and showed no fault."""
    seen = {name for finding in findings for name in finding.seen}
    return (metric.name for metric in METRICS if metric.rule is not Rule.INFORMATIONAL and metric.name not in seen)
