"""Our own commands as processes: run to the end, or kept alive until they are stopped. Knows not what they do."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

HOST = "127.0.0.1"
STARTS_MAX = 10
PATIENCE_SECONDS = (1.0, 5.0)
_PR_SET_PDEATHSIG = 1


class ProgramError(Exception):
    """A command of ours failed, or keeps dying; the message holds its last words."""


@dataclass(slots=True)
class Program:
    """One of our own commands as a process that is started again when it dies."""

    name: str
    arguments: list[str]
    settings: Mapping[str, str]
    log: Path
    process: subprocess.Popen[bytes] | None = None
    starts: int = 0

    def keep_alive(self) -> bool:
        """Start it if it does not run; True if it was started. Raises ProgramError after STARTS_MAX starts."""
        if self.process is not None and self.process.poll() is None:
            return False
        if self.starts == STARTS_MAX:
            raise ProgramError(
                f"the {self.name} ended {self.starts} times; its last words in {self.log}:\n{tail(self.log)}"
            )
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "ulpwatch", *self.arguments],
                env=_environment(self.settings),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # the terminal's Ctrl-C is the parent's to handle
                preexec_fn=_die_with(os.getpid()),  # noqa: PLW1509 - the callers have one thread
            )
        self.starts += 1
        return True

    def stop(self) -> None:
        """Ask it to end; asked twice a runner gives its job back. Kill it if it does not."""
        if self.process is None:
            return
        for seconds in PATIENCE_SECONDS:
            self.process.terminate()
            try:
                self.process.wait(seconds)
                return
            except subprocess.TimeoutExpired:
                continue
        self.process.kill()
        self.process.wait()


def _die_with(parent: int) -> Callable[[], None] | None:
    """What a new process does first: ask the kernel to be killed when the parent dies, however it dies. Linux only."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None, use_errno=True)

    def before_exec() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return before_exec


def _environment(settings: Mapping[str, str]) -> dict[str, str]:
    """This process's environment, but of ulpwatch's settings only the given ones."""
    return {name: value for name, value in os.environ.items() if not name.startswith("ULPWATCH_")} | dict(settings)


def tail(log: Path, lines: int = 20) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def free_port(wanted: int) -> int:
    """The wanted port, or any free one if it is taken."""
    for port in (wanted, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise ProgramError(f"no free port on {HOST}")


def run_command(database_url: str, *arguments: str) -> str:
    """Run one of our own commands to its end; what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "ulpwatch", *arguments],
        env=_environment({"ULPWATCH_DATABASE_URL": database_url}),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise ProgramError(f"`ulpwatch {' '.join(arguments)}` failed:\n{(done.stderr or done.stdout).strip()}")
    return done.stdout
