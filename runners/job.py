"""One job: the kernels of one commit, measured case by case in child processes, become one wire.Result.

It plans, and turns the deaths of children into outcomes: each costs the case it happened in. It calls no kernel,
imports no torch, and knows neither service nor spool.
"""

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TypeVar
from uuid import UUID

from pydantic import BaseModel, ValidationError

from runners import process
from runners.channel import GarbageError, SubjectPlan, printable
from runners.checkout import (
    CheckoutError,
    Repository,
    checked_out,
    describe,
    is_ancestor,
    open_repository,
    resolve,
    submodules,
)
from runners.kernels.faults import Edit
from runners.process import Ending, Limits, converse
from runners.suites import NEEDS_CUDA, SUITES, suite_digest
from runners.suites import suite as cases_of
from runners.targets import faults_of, fitting_cases, missing_requirements
from service.catalogue import BY_NAME
from service.wire import Case, Environment, Measurement, Outcome, Result, Target, TargetKernel

__all__ = ["JobError", "Limits", "PlanError", "environment_here", "measure_commit", "measure_mutants", "units_of"]

_Model = TypeVar("_Model", bound=BaseModel)
Role = Literal["kernel", "control"]
# Makes what one process is told about its kernel, with files that are its own while it runs: a process can spoil them.
Subject = Callable[[], AbstractContextManager[SubjectPlan]]
# What a measured process may say of itself; the other outcomes are for its job to find.
_OWN_OUTCOMES = frozenset({"ok", "unmeasurable", "raised", "out_of_memory"})

_UNKNOWN_SINCE = (
    "the target's since names commits that the repository does not hold: {}; the arguments that they brought may be "
    "missing at any commit: correct the target file if a commit is mistyped"
)


class JobError(Exception):
    """Nothing was measured for a reason that lies with this host, not with the commit: worth another try."""


class PlanError(ValueError):
    """What was asked for cannot be measured: no such kernel or case, or none that fits. Another try is no use."""


def measure_commit(
    target: Target,
    repository: str | Path,
    sha: str,
    *,
    attempt: UUID,
    suite: str | None = None,
    kernels: Collection[str] | None = None,
    case_ids: Collection[str] | None = None,
    job_id: int | None = None,
    on_progress: Callable[[str], None] | None = None,
    limits: Limits | None = None,
    cache: Path | None = None,
    device: str = "cpu",
) -> Result:
    """Measure a target's kernels, and the controls beside them, at one commit of a repository (a path or a URL).

    `suite` defaults to the target's, `kernels` (names of kernels and controls) and `case_ids` narrow it down.
    `on_progress` is told in a few words what is being measured; `cache` is where mirrors of URLs are kept. What the
    commit's own code does wrong is recorded in the result. Raises CheckoutError (UnreachableError if another try may
    help) for the repository or commit, PlanError for what was asked, JobError if no process could be started.
    """
    started_at = datetime.now(UTC)
    suite = suite or target.suite
    if faults := faults_of(target):
        raise PlanError(f"target {target.name!r} cannot be measured: {'; '.join(faults)}")
    if suite in NEEDS_CUDA and device == "cpu" and case_ids is None:
        raise PlanError(f"suite {suite!r} is for a CUDA device and this is a CPU: choose {', '.join(_cpu_suites())}")
    assignments = _assign(target, suite, kernels, case_ids)
    opened = open_repository(repository, cache=cache, wanted=sha)
    commit = describe(opened, resolve(opened, sha), target.paths)
    host = _Host(limits or Limits(), device, target.python.env, on_progress or (lambda _words: None))
    subjects = [assignment.subject(target, opened, commit.sha) for assignment in assignments]
    environments, measured = zip(*_measure_side_by_side(assignments, subjects, host), strict=True)
    measurements = [measurement for of_one_kernel in measured for measurement in of_one_kernel]
    if not measurements:
        raise PlanError(f"no case of suite {suite!r} can be asked of the kernels at {commit.sha}: choose another suite")
    return Result(
        attempt=attempt,
        job=job_id,
        target=target.name,
        commit=commit,
        suite=suite,
        suite_digest=suite_digest(suite),
        environment=environments[0],
        started_at=started_at,
        finished_at=datetime.now(UTC),
        units=units_of(measurements),
        measurements=measurements,
    )


def measure_mutants(
    kernel: str,
    mutants: Sequence[Sequence[Edit]],
    cases: Sequence[Case],
    *,
    on_progress: Callable[[str], None] | None = None,
    limits: Limits | None = None,
) -> list[tuple[Environment, list[Measurement]]]:
    """Measure a built-in kernel on the CPU once for each list of edits to its source, as the kernel of a target; an
    empty list measures it as it is. Raises JobError if no process could be started.
    """
    assignments = [Assignment(kernel, "kernel", None, list(cases)) for _ in mutants]
    plans = [SubjectPlan(built_in=kernel, edits=list(edits)) for edits in mutants]
    subjects: list[Subject] = [lambda plan=plan: nullcontext(plan) for plan in plans]  # type: ignore[misc]
    host = _Host(limits or Limits(), "cpu", {}, on_progress or (lambda _words: None))
    return _measure_side_by_side(assignments, subjects, host)


def environment_here(target: Target, *, limits: Limits | None = None, device: str = "cpu") -> Environment:
    """The environment that a target's kernels would be measured in, here and now. Raises JobError if no process could
    be started.
    """
    host = _Host(limits or Limits(), device, target.python.env, lambda _words: None)
    nothing = Assignment("fused", "control", None, [])
    return _measure(nothing, lambda: nullcontext(SubjectPlan(built_in="fused")), host)[0]


def units_of(measurements: Iterable[Measurement]) -> dict[str, str]:
    """The unit of every metric that occurs, as a result names them."""
    metrics = sorted({name for measurement in measurements for name in measurement.values})
    return {name: BY_NAME[name].unit for name in metrics}


# --- Planning -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Assignment:
    """One kernel with its cases: `kernel` of the target, or the built-in `name` as a control."""

    name: str
    role: Role
    kernel: TargetKernel | None
    cases: list[Case]

    def subject(self, target: Target, repository: Repository, sha: str) -> Subject:
        """The kernel, read off the commit's files and place in history."""
        if self.kernel is None:
            return lambda: nullcontext(SubjectPlan(built_in=self.name))
        known = {since: _has(repository, sha, since) for since in self.kernel.since.values()}
        unknown = sorted({since for since, has in known.items() if has is None})
        plan = SubjectPlan(
            kernel=self.kernel,
            omittable=[name for name, since in self.kernel.since.items() if not known[since]],
            doubts={"since": _UNKNOWN_SINCE.format(", ".join(unknown))} if unknown else {},
            missing=[*missing_requirements(target.python.requires), *_submodules_left_out(repository, sha)],
            process_group=target.python.process_group,
            megatron=target.python.megatron,
        )

        @contextmanager
        def with_files() -> Iterator[SubjectPlan]:
            with checked_out(repository, sha) as files:
                path = [str(files / entry) for entry in target.python.path]
                yield plan.model_copy(update={"files": str(files), "path": path})

        return with_files

    def checked(self, facts: Any, case: Case) -> Measurement:
        """A process's own measurement of `case`. GarbageError if it is not one, or of something else."""
        measurement = _validated(Measurement, _with_printable_notes(facts))
        if (measurement.kernel, measurement.case) != (self.name, case) or measurement.outcome not in _OWN_OUTCOMES:
            raise GarbageError(f"the process answered for {measurement.kernel!r} on {measurement.case.id!r}")
        return self._completed(measurement)

    def without_result(self, case: Case, outcome: Outcome, reason: str) -> Measurement:
        """The measurement of a case that no process answered for."""
        return self._completed(Measurement(kernel=self.name, case=case, outcome=outcome, notes={"outcome": reason}))

    def _completed(self, measurement: Measurement) -> Measurement:
        """With its role and the two checks that only the job can make."""
        is_callable = measurement.outcome != "unmeasurable"
        checks = {"callable": [float(is_callable)]}
        if is_callable:
            checks["completes"] = [float(measurement.outcome == "ok")]
        return measurement.model_copy(update={"role": self.role, "values": {**measurement.values, **checks}})


def _submodules_left_out(repository: Repository, sha: str) -> list[str]:
    """A sentence for who wonders why an import fails; none without submodules."""
    paths = submodules(repository, sha)
    return [f"the commit has submodules, whose files are not there: {', '.join(paths)}"] if paths else []


def _has(repository: Repository, sha: str, since: str) -> bool | None:
    """Whether commit `since` lies in the history of `sha`; None if the repository does not hold it."""
    try:
        return is_ancestor(repository, resolve(repository, since), sha)
    except CheckoutError:
        return None


def _assign(
    target: Target, suite: str, kernels: Collection[str] | None, case_ids: Collection[str] | None
) -> list[Assignment]:
    """Every wanted kernel of the target with the cases that fit it, and its control with the same cases."""
    cases = _wanted_cases(suite, case_ids)
    controls: dict[str, list[Case]] = {}
    assignments = []
    for kernel in target.kernels:
        fitting = fitting_cases(kernel, cases)
        assignments.append(Assignment(kernel.name, "kernel", kernel, fitting))
        if kernel.control is not None:
            known = controls.setdefault(kernel.control, [])
            known += [case for case in fitting if case not in known]
    assignments += [Assignment(name, "control", None, fitting) for name, fitting in controls.items()]
    names = {assignment.name for assignment in assignments}
    if unknown := sorted(set(kernels or ()) - names):
        raise PlanError(f"target {target.name!r} has no kernel {unknown[0]!r}; it has {', '.join(sorted(names))}")
    chosen = [a for a in assignments if a.cases and (kernels is None or a.name in kernels)]
    if not chosen:
        raise PlanError(f"none of the chosen cases can be asked of the chosen kernels of target {target.name!r}")
    return chosen


def _cpu_suites() -> list[str]:
    return sorted(SUITES.keys() - NEEDS_CUDA)


def _wanted_cases(suite: str, case_ids: Collection[str] | None) -> list[Case]:
    """The cases of a suite, or those of the given ids, which any suite may hold."""
    try:
        cases = list(cases_of(suite))
    except KeyError as error:
        raise PlanError(error.args[0]) from error
    if case_ids is None:
        return cases
    known = {case.id: case for case in (*(case for all_of in SUITES.values() for case in all_of), *cases)}
    if unknown := sorted(set(case_ids) - set(known)):
        raise PlanError(f"no suite has a case {unknown[0]!r}: take the id from a result or a finding")
    return [known[case_id] for case_id in dict.fromkeys(case_ids)]


# --- Measuring ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Host:
    """How processes are run here, the same for every kernel of a job."""

    limits: Limits
    device: str
    environment: Mapping[str, str]
    on_progress: Callable[[str], None]
    stop: threading.Event = field(default_factory=threading.Event)


def _measure_side_by_side(
    assignments: Sequence[Assignment], subjects: Sequence[Subject], host: _Host
) -> list[tuple[Environment, list[Measurement]]]:
    """Every kernel in processes of its own, as many at once as the cores hold. What ends one badly ends all."""
    with ThreadPoolExecutor(host.limits.processes) as pool:
        running = [
            pool.submit(_measure, assignment, subject, host)
            for assignment, subject in zip(assignments, subjects, strict=True)
        ]
        try:
            done, _ = wait(running, return_when=FIRST_EXCEPTION)
            failures = [error for one in done if (error := one.exception()) is not None]
            if failures:
                raise failures[0]
        except BaseException:
            host.stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        return [one.result() for one in running]


def _measure(assignment: Assignment, subject: Subject, host: _Host) -> tuple[Environment, list[Measurement]]:
    """One kernel on its cases, in as many processes as their ranks and deaths make necessary.

    A process that begins no case is the last one for its number of ranks, so that there are never more processes than
    cases.
    """
    stop_at = time.monotonic() + host.limits.kernel_seconds
    measured: list[Measurement] = []
    rest = assignment.cases
    while True:
        ranks = min((case.tensor_parallel for case in rest), default=1)
        batch = [case for case in rest if case.tensor_parallel == ranks]
        others = [case for case in rest if case.tensor_parallel != ranks]
        hearing = Hearing(assignment, batch, host.on_progress)
        with subject() as plan:
            ending = converse(
                plan,
                batch,
                hearing,
                limits=host.limits,
                device=host.device,
                environment=host.environment,
                ranks=ranks,
                stop_at=stop_at,
                stop=host.stop,
            )
        if hearing.environment is None:
            raise JobError(f"the measured process of kernel {assignment.name!r} did not start: {ending.story}")
        measured += hearing.measurements
        lost, left = lost_and_left(hearing, ending, is_late=time.monotonic() >= stop_at)
        measured += [assignment.without_result(case, outcome, reason) for case, outcome, reason in lost]
        rest = left + others
        if not rest:
            place = {case.id: index for index, case in enumerate(assignment.cases)}
            return _with_isolation(hearing.environment), sorted(measured, key=lambda one: place[one.case.id])


def _with_isolation(environment: Environment) -> Environment:
    """With the fact whether this host's processes are isolated: good to know, and of no influence on a metric."""
    return environment.model_copy(update={"volatile": {**environment.volatile, "isolation": process.isolation().words}})


class Hearing:
    """Follows one process through its cases: a runners.process.Listener.

    Messages come in this order: started; then unmeasurable, or for each case either skipped or begin and measurement;
    then done. In place of any of them garbage may come: the kernel's half of the process said what it cannot have said.
    """

    def __init__(self, assignment: Assignment, cases: list[Case], on_progress: Callable[[str], None]) -> None:
        self.cases = cases
        self.environment: Environment | None = None
        self.measurements: list[Measurement] = []
        self.unmeasurable: str | None = None
        self.next = 0  # index of the case in progress, or of the one to come
        self.has_begun = False
        self.is_measuring = False
        self._assignment = assignment
        self._on_progress = on_progress

    def receive(self, message: dict[str, Any]) -> bool:
        """Take the next message; True if it was the last. Raises GarbageError for one that cannot follow."""
        kind = message.get("kind")
        if kind == "garbage":
            raise GarbageError(printable(str(message.get("reason")), 500))
        if kind not in self._may_follow() or (kind in _OF_A_CASE and message.get("index") != self.next):
            raise GarbageError(f"a message came out of order: {printable(repr(message), 200)}")
        match kind:
            case "started":
                self.environment = _validated(Environment, message.get("environment"))
            case "unmeasurable":
                self.unmeasurable = printable(str(message.get("reason")))
            case "begin":
                self._begin()
            case "measurement":
                self.measurements.append(self._assignment.checked(message.get("measurement"), self.cases[self.next]))
                self.is_measuring = False
                self.next += 1
            case "skipped":
                self.next += 1
        return kind == "done"

    def _may_follow(self) -> Collection[str]:
        """The kinds of message that can come now."""
        if self.environment is None:
            return ("started",)
        if self.is_measuring:
            return ("measurement",)
        if self.unmeasurable is not None or self.next == len(self.cases):
            return ("done",)
        return ("begin", "skipped") if self.has_begun else ("begin", "skipped", "unmeasurable")

    def _begin(self) -> None:
        self.has_begun = self.is_measuring = True
        cases = self._assignment.cases
        total, place = len(cases), cases.index(self.cases[self.next]) + 1
        self._on_progress(f"{self._assignment.name}: case {place} of {total}, {self.cases[self.next].id}")


Loss = tuple[Case, Outcome, str]


def lost_and_left(hearing: Hearing, ending: Ending, *, is_late: bool) -> tuple[list[Loss], list[Case]]:
    """The cases that a process cost, each with outcome and reason, and those that go on in a new one."""
    left = hearing.cases[hearing.next :]
    if hearing.unmeasurable is not None:
        return [(case, "unmeasurable", hearing.unmeasurable) for case in left], []
    if ending.outcome == "done":
        return [], []
    if not hearing.has_begun and not is_late:
        reason = printable(f"the entry cannot be imported: {ending.story}")
        return [(case, "unmeasurable", reason) for case in left], []
    lost: list[Loss] = []
    if hearing.is_measuring:
        lost, left = [(left[0], ending.outcome, ending.story)], left[1:]
    if is_late:
        lost += [(case, "timeout", "not begun: the time for all cases of one kernel was used up") for case in left]
        left = []
    return lost, left


_OF_A_CASE = ("begin", "measurement", "skipped")


def _validated(model: type[_Model], facts: Any) -> _Model:
    try:
        return model.model_validate(facts)
    except ValidationError as error:
        raise GarbageError(f"the process sent no valid {model.__name__}: {printable(str(error), 500)}") from error


def _with_printable_notes(facts: Any) -> Any:
    """A measurement's notes may quote what a stranger's exception says: take out what a store would refuse."""
    if isinstance(facts, dict) and isinstance(notes := facts.get("notes"), dict):
        return {**facts, "notes": {name: printable(str(text)) for name, text in notes.items()}}
    return facts
