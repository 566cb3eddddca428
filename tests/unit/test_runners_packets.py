"""Messages with tensors between two ends of a connection."""

import os
import socket
from collections.abc import Iterator

import pytest
import torch

from runners.channel import NONCE_BYTES, GarbageError, write_message
from runners.packets import Connection

NONCE = b"n" * NONCE_BYTES
Ends = tuple[Connection, Connection, socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """Two connected ends that map 4096 bytes each way, and the second one's socket."""
    one, other = socket.socketpair()
    with one, other:
        first, second = Connection(one, NONCE), Connection(other, NONCE)
        first.offer_memory(4096)
        second.take_memory()
        yield first, second, other


def test_tensors_of_every_kind_arrive_as_they_were_sent(ends: Ends) -> None:
    first, second, _ = ends
    sent = [
        torch.randn(3, 5),
        torch.randn(3, 5).t(),
        torch.randn(4).bfloat16(),
        torch.tensor([True, False]),
        torch.arange(7),
        torch.empty(0, 5),
        torch.tensor(2.5, dtype=torch.float64),
    ]
    first.send({"list": sent, "nested": {"none": None, "word": "a", "tensor_less": [1, 2.5]}})
    got = second.receive()
    assert got["nested"] == {"none": None, "word": "a", "tensor_less": [1, 2.5]}
    for one, other in zip(sent, got["list"], strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


def test_both_directions_have_memory_of_their_own(ends: Ends) -> None:
    first, second, _ = ends
    first.send({"x": torch.ones(8)})
    seen = second.receive(keep=False)["x"]
    second.send({"y": torch.zeros(8)})
    assert torch.equal(first.receive()["y"], torch.zeros(8))
    assert torch.equal(seen, torch.ones(8))


def test_what_is_kept_is_a_copy(ends: Ends) -> None:
    first, second, _ = ends
    first.send({"x": torch.ones(8)})
    kept = second.receive()["x"]
    first.send({"x": torch.zeros(8)})
    assert torch.equal(kept, torch.ones(8))


def test_tensors_that_do_not_fit_are_refused(ends: Ends) -> None:
    with pytest.raises(ValueError, match="more than the 4096 bytes"):
        ends[0].send({"x": torch.ones(2000)})


def test_an_end_that_is_gone_is_told(ends: Ends) -> None:
    first, _, other = ends
    other.close()
    with pytest.raises(EOFError):
        first.receive()


@pytest.mark.parametrize(
    "tensor",
    [
        ["torch.float32", [2000], 0],
        ["torch.float32", [2], 4095],
        ["torch.float32", [-1], 0],
        ["torch.surprise", [1], 0],
        ["torch.float32", "x", 0],
        "x",
    ],
)
def test_a_tensor_that_is_not_there_is_garbage(ends: Ends, tensor: object) -> None:
    first, _, other = ends
    write_message(other.fileno(), NONCE, {"x": {"tensor": tensor}})
    with pytest.raises(GarbageError):
        first.receive()


def test_two_messages_at_once_and_scribbling_are_garbage(ends: Ends) -> None:
    first, second, other = ends
    second.send({"x": 1})
    second.send({"x": 2})
    with pytest.raises(GarbageError, match="out of turn"):
        first.receive()
    os.write(other.fileno(), b"result: perfect")
    with pytest.raises(GarbageError):
        first.receive()
