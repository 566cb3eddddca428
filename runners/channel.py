"""What a job and its measured process say to each other: the plan on stdin, framed messages on a private descriptor.

A frame is the child's nonce (16 random bytes), the length of the body (4 bytes, big endian) and the body (one JSON
object, UTF-8). Whatever else is written to the descriptor does not carry the nonce, and is noticed. Starts no process
and measures nothing.
"""

import json
import os
import struct
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from runners.kernels.faults import Edit
from service.wire import Case, TargetKernel

NONCE_BYTES = 16
FRAME_BYTES_MAX = 1 << 24
_HEADER = struct.Struct(f">{NONCE_BYTES}sI")


class GarbageError(Exception):
    """The channel carries what this child cannot have said."""


class SubjectPlan(BaseModel):
    """What to measure: a built-in kernel by name, or a target's kernel in the files of a commit.

    `edits` makes a mutant of a built-in kernel (runners.kernels.faults). `path` holds directories for sys.path,
    `omittable` the arguments that this commit's function may lack, `doubts` what a reader of the measurements should
    know of that, and `missing` sentences about required distributions that are not installed.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    built_in: str | None = None
    edits: list[Edit] = Field(default_factory=list)
    kernel: TargetKernel | None = None
    files: str = ""
    path: list[str] = Field(default_factory=list)
    omittable: list[str] = Field(default_factory=list)
    doubts: dict[str, str] = Field(default_factory=dict)
    missing: list[str] = Field(default_factory=list)
    process_group: bool = False
    megatron: bool = False

    @property
    def name(self) -> str:
        """The kernel's name."""
        return self.built_in or (self.kernel.name if self.kernel else "")


class Plan(BaseModel):
    """Everything a measured process is told: the subject, the cases, the limits and where to answer.

    `nonce` is hexadecimal, `descriptor` the inherited end of the channel. The cases are split over `ranks` processes.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    nonce: str
    descriptor: int
    subject: SubjectPlan
    cases: list[Case]
    ranks: int = 1
    device: str = "cpu"
    threads: int = 1
    file_bytes: int = 1 << 30


def write_message(descriptor: int, nonce: bytes, message: Mapping[str, Any]) -> None:
    """Write one message. ValueError for NaN or infinity, which JSON cannot say, and for more than FRAME_BYTES_MAX."""
    body = json.dumps(message, allow_nan=False).encode()
    if len(body) > FRAME_BYTES_MAX:
        raise ValueError(f"a message of {len(body)} bytes is longer than the channel takes ({FRAME_BYTES_MAX})")
    rest = memoryview(_HEADER.pack(nonce, len(body)) + body)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


class FrameReader:
    """Cuts a byte stream into messages. Feed it what was read; it keeps the unfinished tail."""

    def __init__(self, nonce: bytes) -> None:
        self._nonce = nonce
        self._pending = bytearray()

    def feed(self, data: bytes) -> Iterator[dict[str, Any]]:
        """Yield each message that is now complete. GarbageError at the first byte that no frame explains."""
        self._pending += data
        while self._pending:
            if not self._nonce.startswith(bytes(self._pending[:NONCE_BYTES])):
                raise GarbageError("the result channel carries bytes that are not a frame of this process")
            if len(self._pending) < _HEADER.size:
                return
            _, length = _HEADER.unpack_from(self._pending)
            if length > FRAME_BYTES_MAX:
                raise GarbageError(f"the result channel announces a frame of {length} bytes")
            if len(self._pending) < _HEADER.size + length:
                return
            body = bytes(self._pending[_HEADER.size : _HEADER.size + length])
            del self._pending[: _HEADER.size + length]
            yield _object(body)


def _object(body: bytes) -> dict[str, Any]:
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise GarbageError(f"the result channel carries a frame that is not JSON: {error}") from error
    if not isinstance(message, dict):
        raise GarbageError("the result channel carries a frame that is not a JSON object")
    return message


def printable(text: str, length: int = 2000, *, keep_end: bool = False) -> str:
    """Text that every store takes: control characters and lone surrogates replaced, cut to `length` characters."""
    cut = text[-length:] if keep_end else text[:length]
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in cut)
