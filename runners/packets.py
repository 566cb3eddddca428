"""Carries messages with tensors between the two halves of a measured process: JSON on a socket, tensors beside it.

A message is JSON whose values may be tensors; those lie in memory that both halves map, one mapping for each
direction. The halves take turns, so that a message is read before its memory is written again. Knows no meaning.
"""

import math
import mmap
import os
import socket
from typing import Any

import torch

from runners.channel import FrameReader, GarbageError, write_message

_ALIGNMENT = 64
_READ_BYTES = 1 << 16
_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


class Connection:
    """One half's end. `nonce` marks what the other half says; `mappings` are its outgoing and its incoming memory."""

    def __init__(self, end: socket.socket, nonce: bytes) -> None:
        self._end = end
        self._nonce = nonce
        self._frames = FrameReader(nonce)
        self._outgoing = self._incoming = mmap.mmap(-1, _ALIGNMENT)

    def offer_memory(self, size: int) -> None:
        """Make both mappings, of `size` bytes each, and give them to the other half. They cost what is written."""
        descriptors = [os.memfd_create("ulpwatch-tensors", os.MFD_CLOEXEC) for _ in range(2)]
        for descriptor in descriptors:
            os.ftruncate(descriptor, size)
        socket.send_fds(self._end, [b"m"], descriptors)
        self._map(*descriptors)

    def take_memory(self) -> None:
        """Map what the other half offers."""
        _, descriptors, _, _ = socket.recv_fds(self._end, 1, 2)
        self._map(*reversed(descriptors))

    def _map(self, outgoing: int, incoming: int) -> None:
        self._outgoing = mmap.mmap(outgoing, 0)
        self._incoming = mmap.mmap(incoming, 0)
        os.close(outgoing)
        os.close(incoming)

    def send(self, message: dict[str, Any]) -> None:
        """Say something. ValueError if its tensors do not fit in the memory; OSError if nobody is there to hear it."""
        write_message(self._end.fileno(), self._nonce, _Writer(self._outgoing).described(message))

    def receive(self, *, keep: bool = True) -> dict[str, Any]:
        """The next message. Its tensors are copies, or, unless `keep`, hold until this half speaks again.

        EOFError if the other half is gone, GarbageError for what it cannot have said.
        """
        while True:
            data = self._end.recv(_READ_BYTES)
            if not data:
                raise EOFError("the other half of the measured process is gone")
            messages = list(self._frames.feed(data))
            if len(messages) > 1:
                raise GarbageError("the kernel's process spoke out of turn")
            if messages:
                return self._restored(messages[0], keep=keep)  # type: ignore[no-any-return]

    def _restored(self, value: Any, *, keep: bool) -> Any:
        if isinstance(value, list):
            return [self._restored(item, keep=keep) for item in value]
        if not isinstance(value, dict):
            return value
        if set(value) != {"tensor"}:
            return {name: self._restored(item, keep=keep) for name, item in value.items()}
        try:
            tensor = _tensor_at(self._incoming, *value["tensor"])
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise GarbageError(f"the kernel's process describes a tensor that is not there: {error}") from error
        return tensor.clone() if keep else tensor


class _Writer:
    """Lays the tensors of one message out in memory, one after another."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._used = 0

    def described(self, value: Any) -> Any:
        """The value with a description in place of every tensor."""
        if isinstance(value, torch.Tensor):
            return {"tensor": self._put(value)}
        if isinstance(value, dict):
            return {name: self.described(item) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.described(item) for item in value]
        return value

    def _put(self, tensor: torch.Tensor) -> tuple[str, list[int], int]:
        shape, offset = list(tensor.shape), self._used
        size = tensor.numel() * tensor.element_size()
        if offset + size > len(self._memory):
            raise ValueError(f"tensors of a message need more than the {len(self._memory)} bytes that both halves map")
        dtype = str(tensor.dtype)
        _tensor_at(self._memory, dtype, shape, offset).copy_(tensor.detach())
        self._used = -(-(offset + size) // _ALIGNMENT) * _ALIGNMENT
        return dtype, shape, offset


def _tensor_at(memory: mmap.mmap, dtype: str, shape: list[int], offset: int) -> torch.Tensor:
    """A tensor over mapped memory."""
    if any(size < 0 for size in shape):
        raise ValueError(f"a tensor cannot have shape {shape}")
    count = math.prod(shape)
    if not count:
        return torch.empty(shape, dtype=_DTYPES[dtype])
    return torch.frombuffer(memory, dtype=_DTYPES[dtype], count=count, offset=offset).view(shape)
