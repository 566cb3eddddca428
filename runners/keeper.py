"""Stands between the runner and one measured process: gives it namespaces of its own where the host has them, outlives
it, ends whatever it started, and then ends the way it ended.

Runs before anything else in the interpreter that runners.process starts, and imports the standard library only. The
keeper forks the measured process; with namespaces there is one process more between the two, the first of the new
process namespace, with which the kernel ends all others in it. Linux only.
"""

import ctypes
import fcntl
import os
import resource
import signal
import socket
import struct
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_CAPBSET_DROP = 24
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38
_CLONE_NEWNS, _CLONE_NEWIPC, _CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET = (
    0x20000,
    0x8000000,
    1 << 28,
    1 << 29,
    1 << 30,
)
_NAMESPACES = _CLONE_NEWIPC | _CLONE_NEWPID | _CLONE_NEWNET
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
_SYS_MOUNT_SETATTR = 442  # the same number on every architecture; Linux 5.12
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_MOUNT_ATTR_RDONLY = 1
_CAPABILITY_VERSION_3 = 0x20080522
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
# Replaced by empty directories of this process's own: where others leave files, and where daemons have their sockets,
# which can be connected to even if they cannot be written to.
_SCRATCH = ("/tmp", "/dev/shm", "/run")  # noqa: S108
_SCRATCH_SIZE = "1g"
_WATCHED = {signal.SIGTERM, signal.SIGCHLD}

_libc = ctypes.CDLL(None, use_errno=True)


def keep(parent: int, *, isolated: bool, writable: Sequence[str], hidden: Sequence[str]) -> None:
    """Fork, and return in the new process alone, which is to measure.

    `parent` is the runner's process id: when it ends, however it ends, so does everything here. With `isolated`, the
    new process sees no other's, can write to the directories `writable` and to empty scratch space only, finds those
    `hidden` empty, but for what this interpreter needs, and has no network but the loopback interface. Raises OSError
    where the host does not allow that.

    A runner that was killed cannot remove the directories `writable`: then they are removed here.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    if isolated:
        _enter_namespaces()
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(1)
    told, tell = os.pipe()
    keeper = os.getpid()
    first = os.fork()
    if first:
        os.close(tell)
        status = _watched(first, told)
        if os.getppid() != parent:
            _remove(writable)
        _end_like(status)
    os.close(told)
    if isolated:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        _mount_own_view(writable, hidden)
        _raise_loopback()
        measured = os.fork()
        if measured:
            _be_first(measured, tell)
    else:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != keeper:
            os._exit(1)
    os.close(tell)
    os.setsid()
    _give_up_privileges()
    _prefer_to_be_killed()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _WATCHED)


def hide() -> None:
    """Let no other process without privileges read this one's memory and environment, or trace it."""
    _prctl(_PR_SET_DUMPABLE, 0)


# --- The keeper -----------------------------------------------------------------------------------------------------


def _watched(first: int, told: int) -> int:
    """Wait for the measured process or for SIGTERM and end all that is left; the wait status to end with."""
    status: int | None = None
    while status is None and signal.sigwait(_WATCHED) != signal.SIGTERM:
        for process, how in _ended():
            if process == first:
                status = how
    if status is None:
        os.kill(first, signal.SIGKILL)
    _end_descendants()
    if status is None:
        return signal.SIGTERM
    report = os.read(told, 4)  # of the measured process, where `first` is the one between
    return int(struct.unpack("=i", report)[0]) if len(report) == 4 else status


def _be_first(measured: int, tell: int) -> NoReturn:
    """The first process of a namespace: reap what is orphaned, and pass on how the measured process ended."""
    while True:
        process, status = os.wait()
        if process == measured:
            os.write(tell, struct.pack("=i", status))
            os._exit(0)


def _ended() -> Iterator[tuple[int, int]]:
    """(process id, wait status) of each child that has ended and was not yet reaped."""
    with suppress(ChildProcessError):
        while True:
            process, status = os.waitpid(-1, os.WNOHANG)
            if process == 0:
                return
            yield process, status


def _end_descendants() -> None:
    """Kill and reap until there is no child: an orphan becomes one, since this process is a subreaper."""
    with suppress(ChildProcessError):
        while True:
            for process in descendants(os.getpid()):
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            os.waitpid(-1, 0)


def descendants(ancestor: int) -> list[int]:
    """The processes that a process has started, and those that these have, as far as their parents live."""
    found, unseen = [], [ancestor]
    while unseen:
        children: list[int] = []
        for listed in Path(f"/proc/{unseen.pop()}/task").glob("*/children"):
            with suppress(OSError):
                children += map(int, listed.read_text().split())
        found += children
        unseen += children
    return found


def _remove(directories: Sequence[str]) -> None:
    import shutil  # noqa: PLC0415 - seldom needed

    for directory in directories:
        shutil.rmtree(directory, ignore_errors=True)


def _end_like(status: int) -> NoReturn:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        os.kill(os.getpid(), number)
    os._exit(os.WEXITSTATUS(status))


# --- Namespaces -----------------------------------------------------------------------------------------------------


def _enter_namespaces() -> None:
    """Make namespaces for the processes to come, in a user namespace where this user needs one."""
    user, group = os.geteuid(), os.getegid()
    try:
        _call("unshare", _CLONE_NEWUSER | _NAMESPACES)
    except OSError:
        _call("unshare", _NAMESPACES)  # a privileged container may have user namespaces switched off
    else:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")


def _mount_own_view(writable: Sequence[str], hidden: Sequence[str]) -> None:
    """Everything read-only, but for `writable` and empty scratch directories, `hidden` among them; only this
    namespace's processes in /proc. Where a scratch directory covers them, `writable` and what this interpreter needs
    are put back.
    """
    _call("unshare", _CLONE_NEWNS)
    _mount(None, Path("/"), None, _MS_REC | _MS_PRIVATE)
    own = [Path(path).resolve() for path in writable]
    scratch = _outermost([*map(Path, (*_SCRATCH, *hidden)), *(path.parent for path in own)])
    covered = [path for path in _outermost(_needed()) if any(path.is_relative_to(place) for place in scratch)]
    kept = [(path, os.open(path, os.O_PATH)) for path in (*covered, *own)]
    for place in scratch:
        _mount("tmpfs", place, "tmpfs", _MS_NOSUID | _MS_NODEV, f"size={_SCRATCH_SIZE},mode=1777")
    for path, descriptor in kept:
        path.mkdir(parents=True, exist_ok=True)
        _mount(f"/proc/self/fd/{descriptor}", path, None, _MS_BIND | _MS_REC)
        os.close(descriptor)
    _mount("proc", Path("/proc"), "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    _set_read_only(Path("/"), True)
    for path in (*scratch, *own):
        _set_read_only(path, False)
    os.chdir(Path.cwd())  # into what is mounted there now


def _needed() -> Iterator[Path]:
    """Where this interpreter, the programs it may start and their libraries are found."""
    yield from map(Path, (sys.prefix, sys.base_prefix, *sys.path))
    for name in ("PATH", "LD_LIBRARY_PATH"):
        yield from map(Path, filter(None, os.environ.get(name, "").split(os.pathsep)))
    for name, module in list(sys.modules.items()):
        if name.startswith("__editable__"):  # how setuptools lets an editable installation be found
            yield from map(Path, getattr(module, "MAPPING", {}).values())


def _outermost(paths: Iterable[Path]) -> list[Path]:
    """The directories among `paths` that lie in no other of them."""
    found: list[Path] = []
    for path in sorted({path.resolve() for path in paths if _is_directory(path)}):
        if not any(path.is_relative_to(other) for other in found):
            found.append(path)
    return found


def _is_directory(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # it lies where this user may not look
        return False


def _set_read_only(path: Path, wanted: bool) -> None:
    change = (_MOUNT_ATTR_RDONLY, 0) if wanted else (0, _MOUNT_ATTR_RDONLY)
    attributes = struct.pack("=QQQQ", *change, 0, 0)
    flags = _AT_RECURSIVE if wanted else 0
    if _libc.syscall(_SYS_MOUNT_SETATTR, _AT_FDCWD, bytes(path), flags, attributes, ctypes.c_size_t(32)):
        raise _error("mount_setattr", str(path))


def _raise_loopback() -> None:
    """Bring the loopback interface up: a process group of one meets itself there."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = struct.pack("16sH14x", b"lo", 0)
        flags = struct.unpack("16sH14x", fcntl.ioctl(control, _SIOCGIFFLAGS, request))[1]
        fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | _IFF_UP))


# --- Privileges -----------------------------------------------------------------------------------------------------


def _give_up_privileges() -> None:
    """Let neither this process nor any that it starts have a capability, not even as root."""
    number = 0
    while _libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0) == 0:
        number += 1
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
    if _libc.capset(header, bytes(24)):
        raise _error("capset", "")


def _prefer_to_be_killed() -> None:
    """When the host runs out of memory, the measured process is the first to go, not the runner."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


# --- The C library --------------------------------------------------------------------------------------------------


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0):
        raise _error("prctl", str(option))


def _mount(source: str | None, place: Path, kind: str | None, flags: int, data: str | None = None) -> None:
    what, how, options = (None if word is None else word.encode() for word in (source, kind, data))
    if _libc.mount(what, bytes(place), how, ctypes.c_ulong(flags), options):
        raise _error("mount", str(place))


def _call(function: str, *arguments: int) -> None:
    if getattr(_libc, function)(*arguments):
        raise _error(function, "")


def _error(function: str, about: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{function} {about}".strip() + f": {os.strerror(number)}")
