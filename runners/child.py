"""The measured process: reads a plan on stdin, measures its cases, answers on a private descriptor, and ends.

Started by runners.process and by nothing else. Here a stranger's code runs: everything of ours is imported before it,
and nothing of ours is imported after it. Holds no token and knows neither job, spool nor service.
"""

import ctypes
import fcntl
import os
import resource
import signal
import sys
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
from runners.instruments.measure import measure_case
from runners.instruments.subject import Subject
from runners.kernels.faults.mutation import mutated
from runners.kernels.registry import kernel
from runners.targets import needed_arguments
from service.wire import Case, Measurement

_PR_SET_PDEATHSIG = 1
_DESCRIPTOR_MIN = 200  # out of the way of code that closes or writes to low numbers

Send = Callable[[Mapping[str, Any]], None]


def main() -> None:
    """Measure the plan on stdin. Ends the process without running anything that a stranger has left for its end."""
    plan = Plan.model_validate_json(sys.stdin.buffer.read())
    _die_with(plan.parent)
    _limit(plan)
    send = _take_channel(plan)
    torch.set_num_threads(plan.threads)
    send({"kind": "started", "environment": environment(plan.device).model_dump(mode="json")})
    try:
        bound, group = _prepare(plan.subject, plan.device)
    except UnmeasurableError as error:
        send({"kind": "unmeasurable", "reason": _reason(str(error), plan.subject)})
    else:
        for index, case in enumerate(plan.cases):
            _measure(index, case, bound, group, plan, send)
    send({"kind": "done"})
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _measure(index: int, case: Case, bound: Bound, group: dist.ProcessGroup | None, plan: Plan, send: Send) -> None:
    unfit = needed_arguments(case) & set(bound.subject.omitted)
    if unfit:
        send({"kind": "skipped", "index": index})
        return
    send({"kind": "begin", "index": index})
    bound.import_failures.clear()
    measurement = measure_case(bound.subject, case, group=group)
    if measurement.outcome == "raised" and bound.import_failures:
        reason = _reason(f"the entry cannot be called: {bound.import_failures[0]}", plan.subject)
        measurement = Measurement(
            kernel=measurement.kernel, case=case, outcome="unmeasurable", notes={"outcome": reason}
        )
    send({"kind": "measurement", "index": index, "measurement": measurement.model_dump(mode="json")})


def _reason(text: str, subject: SubjectPlan) -> str:
    return printable("; ".join([text, *subject.missing]))


# --- Preparing ------------------------------------------------------------------------------------------------------


def _prepare(subject: SubjectPlan, device: str) -> tuple[Bound, dist.ProcessGroup | None]:
    """The bound kernel and the group it is called with. Raises UnmeasurableError."""
    if subject.built_in is not None:
        found = kernel(subject.built_in)
        if found.missing is not None:
            raise UnmeasurableError(found.missing)
        if subject.edits:
            found = mutated(found, subject.edits)
        return Bound(Subject(found.name, found.run, contract=found.contract, device=device)), None
    assert subject.kernel is not None
    group = _world() if subject.process_group or subject.megatron else None
    bound = bind(subject.kernel, Path(subject.files), subject.path, subject.omittable, device)
    if subject.megatron:
        _initialise_megatron()
    return bound, group


def _world() -> dist.ProcessGroup:
    """A group of this process alone, which needs no network beyond the loopback interface."""
    meeting_place = Path.cwd() / "process-group"
    dist.init_process_group("gloo", f"file://{meeting_place}", timedelta(seconds=60), world_size=1, rank=0)
    world = dist.group.WORLD
    assert world is not None
    return world


def _initialise_megatron() -> None:
    """Initialise megatron-core's parallel state for one rank; nothing where it is not installed."""
    if find_spec("megatron") is None or find_spec("megatron.core") is None:
        return
    try:
        from megatron.core import parallel_state  # noqa: PLC0415 - optional, and slow to import

        parallel_state.initialize_model_parallel(1)
    except Exception as error:  # a stranger's package can raise anything
        raise UnmeasurableError(f"megatron-core's parallel state cannot be initialised: {last_line(error)}") from error


# --- The process ----------------------------------------------------------------------------------------------------


def _die_with(parent: int) -> None:
    """Have the kernel end this process when its job ends, however that ends. Linux only, like the descriptor."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _limit(plan: Plan) -> None:
    _lower(resource.RLIMIT_CORE, 0)
    _lower(resource.RLIMIT_FSIZE, plan.file_bytes)
    if plan.memory_bytes is not None:
        _lower(resource.RLIMIT_AS, plan.memory_bytes)


def _lower(kind: int, most: int) -> None:
    """Lower a limit for good; one that the host has set lower stays."""
    hard = resource.getrlimit(kind)[1]
    limit = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(kind, (limit, limit))


def _take_channel(plan: Plan) -> Send:
    """Move the channel to a high descriptor that no program started from here inherits, and close stdin."""
    channel = fcntl.fcntl(plan.descriptor, fcntl.F_DUPFD_CLOEXEC, _DESCRIPTOR_MIN)
    os.close(plan.descriptor)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    nonce = bytes.fromhex(plan.nonce)
    return lambda message: write_message(channel, nonce, message)
