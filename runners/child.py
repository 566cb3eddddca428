"""The measured process: reads a plan on stdin, measures its cases, answers on a private descriptor, and ends.

Started by runners.process and by nothing else. Here a stranger's code runs: everything of ours is imported before it,
and nothing of ours is imported after it. Holds no token and knows neither job, spool nor service.
"""

import fcntl
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from runners.binding import Bound, UnmeasurableError, bind, last_line
from runners.channel import Plan, SubjectPlan, printable, write_message
from runners.instruments.fingerprint import environment
from runners.instruments.measure import measure_case, measure_split_case
from runners.instruments.parallel import Ranks
from runners.instruments.subject import Subject
from runners.kernels.faults.mutation import mutated
from runners.kernels.registry import kernel
from runners.targets import needed_arguments
from service.wire import Case, Measurement

# How long ranks wait for each other: to start, in a kernel's collective, and in ours after the kernel's.
_TO_START, _IN_THE_KERNEL, _AFTER_IT = (timedelta(seconds=seconds) for seconds in (60, 15, 90))
_BOOT_RANK = (
    "import sys; sys.path.insert(0, sys.argv[1]); from runners.child import main; sys.path.remove(sys.argv[1]); main()"
)
_DESCRIPTOR_MIN = 200  # out of the way of code that closes or writes to low numbers

Send = Callable[[Mapping[str, Any]], None]


def main() -> None:
    """Measure the plan on stdin. Ends the process without running anything that a stranger has left for its end."""
    plan = Plan.model_validate_json(sys.stdin.buffer.read())
    _limit(plan)
    send = _take_channel(plan)
    if plan.rank == 0:
        _start_ranks(plan)
    torch.set_num_threads(plan.threads)
    send({"kind": "started", "environment": environment(plan.device).model_dump(mode="json")})
    try:
        bound, group, ranks = _prepare(plan)
    except UnmeasurableError as error:
        send({"kind": "unmeasurable", "reason": _reason(str(error), plan.subject)})
    else:
        for index, case in enumerate(plan.cases):
            _measure(index, case, bound, ranks or group, plan, send)
    send({"kind": "done"})
    _end()


def _end() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _measure(
    index: int, case: Case, bound: Bound, group: dist.ProcessGroup | Ranks | None, plan: Plan, send: Send
) -> None:
    unfit = needed_arguments(case) & set(bound.subject.omitted)
    if unfit:
        send({"kind": "skipped", "index": index})
        return
    send({"kind": "begin", "index": index})
    bound.import_failures.clear()
    if isinstance(group, Ranks):
        measurement = measure_split_case(bound.subject, case, group)
    else:
        measurement = measure_case(bound.subject, case, group=group)
    if measurement.outcome == "raised" and bound.import_failures:
        reason = _reason(f"the entry cannot be called: {bound.import_failures[0]}", plan.subject)
        measurement = Measurement(
            kernel=measurement.kernel, case=case, outcome="unmeasurable", notes={"outcome": reason}
        )
    send({"kind": "measurement", "index": index, "measurement": measurement.model_dump(mode="json")})
    if isinstance(group, Ranks) and measurement.outcome != "ok":
        _end()  # the ranks are out of step: what is left goes on in new ones


def _reason(text: str, subject: SubjectPlan) -> str:
    return printable("; ".join([text, *subject.missing]))


# --- Preparing ------------------------------------------------------------------------------------------------------


def _prepare(plan: Plan) -> tuple[Bound, dist.ProcessGroup | None, Ranks | None]:
    """The bound kernel, the group that it is called with on one rank, and the ranks where there are several. Raises
    UnmeasurableError."""
    subject = plan.subject
    if subject.built_in is not None:
        found = kernel(subject.built_in)
        if found.missing is not None:
            raise UnmeasurableError(found.missing)
        if subject.edits:
            found = mutated(found, subject.edits)
        bound = Bound(Subject(found.name, found.run, contract=found.contract, device=plan.device))
        if plan.ranks == 1:
            return bound, None, None
        return bound, _world(plan), _ranks(plan, needs_group=False)
    assert subject.kernel is not None
    needs_group = subject.process_group or subject.megatron
    world = _world(plan) if needs_group or plan.ranks > 1 else None
    bound = bind(subject.kernel, Path(subject.files), subject.path, subject.omittable, plan.device)
    if subject.megatron:
        _initialise_megatron(plan.ranks)
    return bound, world, _ranks(plan, needs_group=needs_group) if plan.ranks > 1 else None


def _world(plan: Plan) -> dist.ProcessGroup:
    """A group of this plan's ranks, which needs no network beyond the loopback interface."""
    meeting_place = Path.cwd() / "process-group"
    dist.init_process_group("gloo", f"file://{meeting_place}", _TO_START, world_size=plan.ranks, rank=plan.rank)
    world = dist.group.WORLD
    assert world is not None
    return world


def _ranks(plan: Plan, *, needs_group: bool) -> Ranks:
    """The groups of a kernel that is split over ranks. Ours outlives a kernel that waits in vain."""
    everyone = list(range(plan.ranks))
    kernel_group = dist.new_group(everyone, timeout=_IN_THE_KERNEL)
    talk = dist.new_group(everyone, timeout=_AFTER_IT)
    alone = [dist.new_group([rank]) for rank in everyone]
    return Ranks(plan.rank, plan.ranks, kernel_group, talk, alone[plan.rank] if needs_group else None)


def _initialise_megatron(ranks: int) -> None:
    """Initialise megatron-core's parallel state; nothing where it is not installed."""
    if find_spec("megatron") is None or find_spec("megatron.core") is None:
        return
    try:
        from megatron.core import parallel_state  # noqa: PLC0415 - optional, and slow to import

        parallel_state.initialize_model_parallel(ranks)
    except Exception as error:  # a stranger's package can raise anything
        raise UnmeasurableError(f"megatron-core's parallel state cannot be initialised: {last_line(error)}") from error


# --- The process ----------------------------------------------------------------------------------------------------


def _start_ranks(plan: Plan) -> None:
    """Start the other ranks of the plan, kept as this process is: they end when it ends."""
    for rank in range(1, plan.ranks):
        with tempfile.TemporaryFile() as stdin:
            stdin.write(plan.model_copy(update={"rank": rank}).model_dump_json().encode())
            stdin.seek(0)
            subprocess.Popen([sys.executable, "-P", "-s", "-c", _BOOT_RANK, sys.argv[1]], stdin=stdin)


def _limit(plan: Plan) -> None:
    _lower(resource.RLIMIT_CORE, 0)
    _lower(resource.RLIMIT_FSIZE, plan.file_bytes)


def _lower(kind: int, most: int) -> None:
    """Lower a limit for good; one that the host has set lower stays."""
    hard = resource.getrlimit(kind)[1]
    limit = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(kind, (limit, limit))


def _take_channel(plan: Plan) -> Send:
    """Move the channel to a high descriptor that no program started from here inherits, and close stdin. A rank that
    is not the first has none, and tells nobody."""
    if plan.rank > 0:
        return lambda _message: None
    channel = fcntl.fcntl(plan.descriptor, fcntl.F_DUPFD_CLOEXEC, _DESCRIPTOR_MIN)
    os.close(plan.descriptor)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    nonce = bytes.fromhex(plan.nonce)
    return lambda message: write_message(channel, nonce, message)
