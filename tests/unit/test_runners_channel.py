"""The frames between a measured process and its job."""

import os

import pytest

from runners.channel import FRAME_BYTES_MAX, FrameReader, GarbageError, printable, write_message

NONCE = bytes(range(16))


def framed(message: dict[str, object], nonce: bytes = NONCE) -> bytes:
    readable, writable = os.pipe()
    write_message(writable, nonce, message)
    os.close(writable)
    with os.fdopen(readable, "rb") as stream:
        return stream.read()


def test_messages_come_out_whole_however_the_bytes_arrive() -> None:
    messages = [{"kind": "begin", "index": 1}, {"kind": "measurement", "notes": "räk\n"}, {}]
    stream = b"".join(framed(message) for message in messages)
    reader = FrameReader(NONCE)
    assert [m for position in range(len(stream)) for m in reader.feed(stream[position : position + 1])] == messages
    assert list(FrameReader(NONCE).feed(stream)) == messages


@pytest.mark.parametrize(
    "stream",
    [
        b"x",
        framed({"kind": "done"}, nonce=bytes(16)),
        framed({"kind": "begin"}) + b"printed by a kernel",
        NONCE + (FRAME_BYTES_MAX + 1).to_bytes(4, "big"),
        NONCE + (4).to_bytes(4, "big") + b"{oh}",
        NONCE + (2).to_bytes(4, "big") + b"[]",
        NONCE + (60000).to_bytes(4, "big") + b"[" * 60000,
        NONCE + (2).to_bytes(4, "big") + b"\xff\xfe",
    ],
)
def test_bytes_that_no_frame_explains_are_garbage(stream: bytes) -> None:
    with pytest.raises(GarbageError):
        list(FrameReader(NONCE).feed(stream))


def test_a_message_before_the_garbage_is_still_heard() -> None:
    messages = FrameReader(NONCE).feed(framed({"kind": "begin"}) + b"!")
    assert next(messages) == {"kind": "begin"}
    with pytest.raises(GarbageError):
        next(messages)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "x" * (FRAME_BYTES_MAX + 1)])
def test_what_a_frame_cannot_carry_is_refused_and_nothing_is_written(value: object) -> None:
    readable, writable = os.pipe()
    with pytest.raises(ValueError, match=r"JSON|longer"):
        write_message(writable, NONCE, {"value": value})
    os.close(writable)
    with os.fdopen(readable, "rb") as stream:
        assert stream.read() == b""


def test_printable_text_holds_nothing_that_a_store_refuses() -> None:
    assert printable("a\x00b\ud800c\x1b[1m\n") == "a\ufffdb\ufffdc\ufffd[1m\n"
    assert printable("abcdef", 3) == "abc"
    assert printable("abcdef", 3, keep_end=True) == "def"
