"""Starts a measured process, listens to it, and ends it with everything it started. Knows no message's meaning.

The process gets a scrubbed environment, a session and a temporary home of its own, no stdin, and a private descriptor
to answer on; what it prints is kept only as a bounded tail. Where the host allows it, it also gets namespaces of its
own (runners.keeper): it sees no other process, has no network, and can write to its own directories only.
"""

import json
import os
import secrets
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any, Literal, Protocol, Self

from runners.channel import NONCE_BYTES, FrameReader, GarbageError, Plan, SubjectPlan, printable
from runners.keeper import descendants, hide
from runners.settings import RunnerSettings
from service.wire import Case

_INHERITED = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES")
_TAIL_BYTES = 8192
_READ_BYTES = 1 << 20
_POLL_SECONDS = 0.1
_WEIGHING_SECONDS = 0.5
_ENDING_SECONDS = 10.0
_PROBE_SECONDS = 60.0
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_ROOT = str(Path(__file__).resolve().parent.parent)
# The directory that holds our packages is on the path for as long as they are imported: a target must not find what
# lies beside them.
_BOOT = (
    "import json, sys; sys.path.insert(0, sys.argv[1]); from runners.keeper import keep;"
    " keep(**json.loads(sys.argv.pop())); from runners.child import main; sys.path.remove(sys.argv[1]); main()"
)
_PROBE = (
    "import json, sys; sys.path.insert(0, sys.argv[1]); from runners.keeper import keep;"
    " keep(**json.loads(sys.argv.pop())); open('written', 'w').close(); import pydantic"
)


class StoppedError(Exception):
    """A process was ended because its answer is no longer wanted."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a measured process may take: seconds, bytes, threads, processes of its own.

    `start_seconds` is for its start and the import of a stranger's code, `case_seconds` for one case,
    `kernel_seconds` for all cases of one kernel. `memory_bytes` bounds what it and all that it starts hold at once
    (resident, looked at twice a second); None stands for nine tenths of what the host has.
    """

    start_seconds: float = 180.0
    case_seconds: float = 120.0
    kernel_seconds: float = 3600.0
    memory_bytes: int | None = None
    file_bytes: int = 1 << 30
    threads: int = 1
    started_max: int = 512

    @classmethod
    def of(cls, settings: RunnerSettings) -> Self:
        """The limits that the settings name."""
        return cls(case_seconds=settings.case_seconds, memory_bytes=settings.memory_bytes, threads=settings.threads)

    @property
    def memory_bound(self) -> int:
        """The bytes that a process and all that it starts may hold."""
        return self.memory_bytes if self.memory_bytes is not None else _host_memory_bytes() * 9 // 10

    @property
    def processes(self) -> int:
        """How many measured processes this host's cores hold at once."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return max(1, cores // self.threads)


@dataclass(frozen=True, slots=True)
class Ending:
    """How a measured process ended: the outcome of the case it was in, why, and the end of what it printed."""

    outcome: Literal["done", "killed", "timeout", "exited", "garbage", "out_of_memory"]
    reason: str
    printed: bytes

    @property
    def story(self) -> str:
        """The reason with what was printed, in at most 2000 characters."""
        printed = printable(self.printed.decode(errors="replace").strip(), 1500, keep_end=True)
        return printable(self.reason + (f"; it printed last:\n{printed}" if printed else ""))


@dataclass(frozen=True, slots=True)
class Isolation:
    """Whether measured processes get namespaces of their own here, and in words, why not."""

    works: bool
    words: str


class Listener(Protocol):
    """Receives the messages of one process, in order."""

    @property
    def is_measuring(self) -> bool:
        """Whether the time limit of a case holds now, not that of the start."""

    def receive(self, message: dict[str, Any]) -> bool:
        """Take a message; True if it was the last. Raises GarbageError for one that cannot follow."""


def converse(
    subject: SubjectPlan,
    cases: list[Case],
    listener: Listener,
    *,
    limits: Limits,
    device: str = "cpu",
    environment: Mapping[str, str] | None = None,
    ranks: int = 1,
    stop_at: float = float("inf"),
    stop: threading.Event | None = None,
) -> Ending:
    """Start a process on a plan and pass on its messages until it is done, dies, or must be ended.

    `environment` adds to the scrubbed one; the cases are split over `ranks` processes; `stop_at` is a
    time.monotonic() at which it is ended whatever it does.
    Raises StoppedError once `stop` is set. Nothing it started is left running.
    """
    hide()
    nonce = secrets.token_bytes(NONCE_BYTES)
    ours, theirs = os.pipe()
    plan = Plan(
        nonce=nonce.hex(),
        descriptor=theirs,
        subject=subject,
        cases=cases,
        ranks=ranks,
        device=device,
        threads=limits.threads,
        file_bytes=limits.file_bytes,
    )
    with ExitStack() as stack:
        channel = stack.enter_context(open(ours, "rb", buffering=0))  # noqa: PTH123 - a descriptor
        home = stack.enter_context(tempfile.TemporaryDirectory(prefix="ulpwatch-child-", ignore_cleanup_errors=True))
        try:
            process = _start(plan, home, _scrubbed(home, limits.threads, environment or {}))
        finally:
            os.close(theirs)
        if not isolation().works:
            stack.callback(_end_leftovers, home)
        stack.callback(_end, process)
        assert process.stdout is not None
        stack.enter_context(process.stdout)
        return _listen(process, channel, FrameReader(nonce), listener, limits, stop_at, stop or threading.Event())


# --- Starting -------------------------------------------------------------------------------------------------------


@cache
def isolation() -> Isolation:
    """Found out once, by starting a process in namespaces that does nothing else."""
    with tempfile.TemporaryDirectory(prefix="ulpwatch-probe-") as home:
        command = [sys.executable, "-P", "-s", "-c", _PROBE, _ROOT, _keeping([home], isolated=True)]
        environment = _scrubbed(home, 1, {})
        try:
            done = subprocess.run(
                command, cwd=home, env=environment, capture_output=True, text=True, timeout=_PROBE_SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            return Isolation(False, f"none: no process could be isolated within {_PROBE_SECONDS:g} s")
    if done.returncode == 0:
        return Isolation(True, "namespaces")
    last = (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1]
    return Isolation(False, printable(f"none: {last}", 200))


def _keeping(writable: list[str], *, isolated: bool) -> str:
    """What runners.keeper.keep is told."""
    told = {"parent": os.getpid(), "isolated": isolated, "writable": writable, "hidden": _own_homes()}
    return json.dumps(told)


def _own_homes() -> list[str]:
    """The home directory of this user, with what it may hold of credentials; none where it is not this user's own."""
    try:
        home = Path.home()
        is_own = home != Path("/") and home.stat().st_uid == os.geteuid()
    except (OSError, RuntimeError):
        return []
    return [str(home)] if is_own else []


def _start(plan: Plan, home: str, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    writable = [home, *([plan.subject.files] if plan.subject.files else [])]
    keeping = _keeping(writable, isolated=isolation().works)
    with tempfile.TemporaryFile() as stdin:
        stdin.write(plan.model_dump_json().encode())
        stdin.seek(0)
        return subprocess.Popen(
            [sys.executable, "-P", "-s", "-c", _BOOT, _ROOT, str(plan.ranks), keeping],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            pass_fds=(plan.descriptor,),
            cwd=home,
            env=environment,
            start_new_session=True,
        )


def _scrubbed(home: str, threads: int, added: Mapping[str, str]) -> dict[str, str]:
    """The whole environment of a measured process: nothing of the parent's but what finds programs and devices."""
    kept = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    fixed = {
        "HOME": home,
        "TMPDIR": home,
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "PYTHONHASHSEED": "0",
        "KINETO_LOG_LEVEL": "99",
        "GLOO_SOCKET_IFNAME": "lo",
        # Large buffers are kept and used again: mapping them anew each time costs a fifth of a measurement.
        "MALLOC_MMAP_MAX_": "0",
        "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    }
    allowed = {name: value for name, value in added.items() if not name.startswith("ULPWATCH_")}
    return {**kept, **allowed, **fixed}


# --- Listening ------------------------------------------------------------------------------------------------------


def _listen(
    process: subprocess.Popen[bytes],
    channel: IO[bytes],
    frames: FrameReader,
    listener: Listener,
    limits: Limits,
    stop_at: float,
    stop: threading.Event,
) -> Ending:
    assert process.stdout is not None
    output = process.stdout
    printed = b""
    with selectors.DefaultSelector() as selector:
        for stream in (channel, output):
            os.set_blocking(stream.fileno(), False)
            selector.register(stream, selectors.EVENT_READ)
        heard_at = weighed_at = time.monotonic()
        while True:
            limit = limits.case_seconds if listener.is_measuring else limits.start_seconds
            left = min(heard_at + limit, stop_at) - time.monotonic()
            selector.select(max(0.0, min(left, _POLL_SECONDS)))
            if stop.is_set():
                raise StoppedError("the process was ended because what it was asked for is no longer wanted")
            death = _death(process)  # asked before reading, so that nothing said before it is missed
            said = _read(channel, selector)
            printed = (printed + _read(output, selector))[-_TAIL_BYTES:]
            try:
                for message in frames.feed(said):
                    heard_at = time.monotonic()
                    if listener.receive(message):
                        return Ending("done", "", printed)
            except GarbageError as error:
                return Ending("garbage", str(error), printed)
            if death is not None:
                return _ending_of(death, printed)
            if time.monotonic() - weighed_at >= _WEIGHING_SECONDS:
                weighed_at = time.monotonic()
                if (excess := _excess(process.pid, limits)) is not None:
                    return Ending(*excess, printed)
            if left <= 0:
                return Ending("timeout", f"ended by the runner: nothing was heard for {limit:g} s", printed)


def _read(stream: IO[bytes], selector: selectors.BaseSelector) -> bytes:
    """What a stream holds now, at most _READ_BYTES; at its end it is no longer waited for."""
    data = b""
    while len(data) < _READ_BYTES:
        try:
            part = os.read(stream.fileno(), 1 << 16)
        except BlockingIOError:
            break
        if not part:
            with suppress(KeyError):
                selector.unregister(stream)
            break
        data += part
    return data


def _excess(keeper: int, limits: Limits) -> tuple[Literal["out_of_memory", "killed"], str] | None:
    """Which bound the processes of a keeper are over, as an outcome and its reason; None if they keep them."""
    running = descendants(keeper)
    held = sum(map(_resident_bytes, running))
    if held > limits.memory_bound:
        return (
            "out_of_memory",
            f"ended by the runner: it held {held} bytes, more than the {limits.memory_bound} allowed",
        )
    if len(running) > limits.started_max:
        return (
            "killed",
            f"ended by the runner: it ran {len(running)} processes, more than the {limits.started_max} allowed",
        )
    return None


def _resident_bytes(process: int) -> int:
    try:
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * _PAGE_BYTES
    except OSError:
        return 0


@cache
def _host_memory_bytes() -> int:
    """What this host, or the control group that it is seen from, has."""
    found = [os.sysconf("SC_PHYS_PAGES") * _PAGE_BYTES]
    for limit in ("memory.max", "memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):
            found.append(int(Path("/sys/fs/cgroup", limit).read_text()))
    return min(found)


def _death(process: subprocess.Popen[bytes]) -> os.waitid_result | None:
    """How the process died, None while it lives. It is left unreaped, so that its group id stays its own."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)


def _ending_of(death: os.waitid_result, printed: bytes) -> Ending:
    if death.si_code == os.CLD_EXITED:
        return Ending("exited", f"the process ended itself with exit status {death.si_status}", printed)
    name = signal.Signals(death.si_status).name if death.si_status in set(signal.Signals) else "unknown"
    return Ending("killed", f"the process was killed by signal {death.si_status} ({name})", printed)


# --- Ending ---------------------------------------------------------------------------------------------------------


def _end(process: subprocess.Popen[bytes]) -> None:
    """Have the keeper end all that it keeps, and reap it."""
    process.terminate()
    try:
        process.wait(_ENDING_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _end_leftovers(home: str) -> None:
    """Kill what still carries the temporary home in its environment: a keeper can be killed by what it keeps."""
    marker = f"HOME={home}\0".encode()
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if marker in environ.read_bytes():
                os.kill(int(environ.parent.name), signal.SIGKILL)
