"""The measured process: reads a plan on stdin, measures its cases, answers on a private descriptor, and ends.

Started by runners.process and by nothing else. It is two processes: this one makes the inputs, holds the oracle, judges
what comes back and speaks to the job; the kernel runs in the other (runners.kernel_process), forked before the plan is
read. If that one ends, this one ends in the same way. Holds no token and knows neither job, spool nor service.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NoReturn

import torch
import torch._dynamo  # both halves need it for torch's profiler: imported once, before the fork

from runners.binding import UnmeasurableError
from runners.channel import Plan, SubjectPlan, printable, write_message
from runners.instruments.fingerprint import environment
from runners.instruments.measure import measure_case, measure_split_case
from runners.kernel_process import KernelProcess, close_stdin, limit, start_kernel_process
from runners.targets import needed_arguments
from service.wire import Case

_PR_SET_DUMPABLE = 4

Send = Callable[[Mapping[str, Any]], None]


class _Job:
    """The way to the job, which is not there before the plan is read."""

    send: Send


def main() -> None:
    """Measure the plan on stdin. Ends the process without running anything that a stranger has left for its end."""
    job = _Job()
    kernels = [_start(job) for _ in range(int(sys.argv[2]))]
    plan = Plan.model_validate_json(sys.stdin.buffer.read())
    _keep_out()
    close_stdin()
    limit(plan.file_bytes)
    nonce = bytes.fromhex(plan.nonce)
    job.send = lambda message: write_message(plan.descriptor, nonce, message)
    torch.set_num_threads(plan.threads)
    for kernel in kernels:
        kernel.make_ready(plan)
    job.send({"kind": "started", "environment": environment(plan.device).model_dump(mode="json")})
    _measure_all(plan, kernels, job.send)
    job.send({"kind": "done"})
    _end()


def _start(job: _Job) -> KernelProcess:
    return start_kernel_process(lambda reason: _give_up(job, reason), _end_like)


def _end() -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _measure_all(plan: Plan, kernels: list[KernelProcess], send: Send) -> None:
    for rank, kernel in enumerate(kernels):
        kernel.begin_bind(plan, rank)
    try:
        for kernel in kernels:
            kernel.finish_bind(plan.subject)
    except UnmeasurableError as error:
        send({"kind": "unmeasurable", "reason": _reason(str(error), plan.subject)})
        return
    for index, case in enumerate(plan.cases):
        _measure(index, case, kernels, plan, send)


def _measure(index: int, case: Case, kernels: list[KernelProcess], plan: Plan, send: Send) -> None:
    unfit = needed_arguments(case) & set(kernels[0].omitted)
    if unfit:
        send({"kind": "skipped", "index": index})
        return
    send({"kind": "begin", "index": index})
    measurement = measure_case(kernels[0], case) if len(kernels) == 1 else measure_split_case(kernels, case)
    if measurement.outcome == "unmeasurable":
        notes = {"outcome": _reason(measurement.notes["outcome"], plan.subject)}
        measurement = measurement.model_copy(update={"notes": notes, "inputs_digest": None})
    send({"kind": "measurement", "index": index, "measurement": measurement.model_dump(mode="json")})
    if len(kernels) > 1 and measurement.outcome != "ok":
        _end()  # the ranks are out of step: what is left goes on in new ones


def _reason(text: str, subject: SubjectPlan) -> str:
    return printable("; ".join([text, *subject.missing]))


# --- The process ----------------------------------------------------------------------------------------------------


def _keep_out() -> None:
    """Let no other process of this user read this one's memory or descriptors: the kernel's runs as the same user.

    It does not bind root.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0)


def _give_up(job: _Job, reason: str) -> NoReturn:
    """Tell the job that the kernel's process sends what it should not, and wait to be ended."""
    job.send({"kind": "garbage", "reason": reason})
    while True:
        signal.pause()


def _end_like(process: int) -> NoReturn:
    """End as the kernel's process ended: its job reads the reason off this one."""
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    if code < 0:
        with suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)
