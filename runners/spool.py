"""Results on disk until the service has them: one file an attempt, complete or not there. Knows no network."""

import fcntl
import os
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Self
from uuid import UUID


class SpoolBusyError(Exception):
    """Another daemon works with this spool."""


@dataclass(frozen=True, slots=True)
class Spooled:
    """A result that waits: the attempt and its file."""

    attempt: UUID
    path: Path

    def body(self) -> bytes:
        """The payload, byte for byte as it was put."""
        return self.path.read_bytes()


class Spool:
    """A directory that one daemon owns for as long as it holds the lock; the lock ends with the process."""

    def __init__(self, directory: Path) -> None:
        """Take the spool at `directory`, made if it is missing. Raises SpoolBusyError if another process holds it."""
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self._lock: IO[bytes] = (directory / "lock").open("ab")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise SpoolBusyError(f"another runner works with the spool {directory}: give this one its own") from None
        for unfinished in directory.glob("*.part"):
            unfinished.unlink()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the lock."""
        self._lock.close()

    def put(self, attempt: UUID, body: bytes) -> Spooled:
        """Keep a payload. When this returns it survives a crash of process and host."""
        part = self._directory / f"{attempt}.part"
        with part.open("wb") as file:
            file.write(body)
            file.flush()
            os.fsync(file.fileno())
        path = part.rename(self._directory / f"{attempt}.json")
        _sync(self._directory)
        return Spooled(attempt, path)

    def pending(self) -> list[Spooled]:
        """What waits, oldest first. Files that are not named for an attempt are left alone."""
        paths = sorted(self._directory.glob("*.json"), key=lambda path: (path.stat().st_mtime_ns, path.name))
        return [Spooled(attempt, path) for path in paths if (attempt := _attempt(path)) is not None]

    def delete(self, spooled: Spooled) -> None:
        """Forget a payload that the service has."""
        spooled.path.unlink()
        _sync(self._directory)

    def reject(self, spooled: Spooled, reason: str) -> Path:
        """Set a payload aside that the service will never take, with the reason beside it. Returns its new place."""
        rejected = self._directory / "rejected"
        rejected.mkdir(exist_ok=True)
        (rejected / f"{spooled.attempt}.reason.txt").write_text(f"{reason}\n", encoding="utf-8")
        path = spooled.path.rename(rejected / spooled.path.name)
        _sync(rejected)
        _sync(self._directory)
        return path


def _attempt(path: Path) -> UUID | None:
    try:
        return UUID(path.stem)
    except ValueError:
        return None


def _sync(directory: Path) -> None:
    """Make renames and removals in a directory last."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
