"""The reader of messages: it assembles frames whatever the chunks they arrive in, and rejects invalid bytes."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.transport.admission.channel import PlainChannel
from echelon.transport.connection import (
    MAX_FRAMES,
    MAX_HEAD,
    Connection,
    ConnectionBroken,
    MessageReader,
    State,
    buffer_bytes,
)
from echelon.transport.interface import Traffic
from echelon.transport.outbox import Precedence


def as_bytes(frames: Sequence[bytes]) -> bytes:
    return struct.pack(f"!I{len(frames)}Q", len(frames), *map(len, frames)) + b"".join(frames)


def receiving(chunks: Sequence[bytes]) -> Callable[[memoryview], int]:
    """Return a `recv_into` that delivers at most one chunk per call, and then blocks."""
    left = [chunk for chunk in chunks if chunk]

    def recv_into(target: memoryview) -> int:
        if not left:
            raise BlockingIOError
        count = min(len(left[0]), len(target))
        target[:count] = left[0][:count]
        left[0] = left[0][count:]
        if not left[0]:
            left.pop(0)
        return count

    return recv_into


messages = st.lists(st.lists(st.binary(max_size=20), min_size=1, max_size=4), min_size=1, max_size=4)


@given(sent=messages, cuts=st.lists(st.integers(0, 400)))
def test_messages_arrive_whole_whatever_the_chunks(sent: list[list[bytes]], cuts: list[int]) -> None:
    data = b"".join(as_bytes(frames) for frames in sent)
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    chunks = [data[start:stop] for start, stop in pairwise(edges)]
    reader, recv_into = MessageReader(), receiving(chunks)
    received = []
    while (frames := reader.read(recv_into, None)) is not None:
        received.append([bytes(frame) for frame in frames])
    assert received == sent
    assert reader.state is State.COUNT


@pytest.mark.parametrize(
    ("num_bytes", "state"),
    [(0, State.COUNT), (3, State.COUNT), (4, State.SIZES), (19, State.SIZES), (20, State.HEAD), (24, State.FRAMES)],
)
def test_the_state_says_what_the_reader_waits_for(num_bytes: int, state: State) -> None:
    reader = MessageReader()
    assert reader.read(receiving([as_bytes([b"head", b"frame"])[:num_bytes]]), None) is None
    assert reader.state is state


def test_frames_go_where_the_placer_says() -> None:
    memory = memoryview(bytearray(7))
    asked: list[tuple[bytes, list[int]]] = []

    def placer(head: memoryview, sizes: list[int]) -> list[memoryview]:
        asked.append((bytes(head), sizes))
        return [memory[:3], memory[3:]]

    frames = MessageReader().read(receiving([as_bytes([b"head", b"abc", b"defg"])]), placer)
    assert asked == [(b"head", [3, 4])]
    assert bytes(memory) == b"abcdefg"
    assert frames is not None
    assert [bytes(frame) for frame in frames] == [b"head", b"abc", b"defg"]


@pytest.mark.parametrize("places", [None, [], [memoryview(bytearray(1))]])
def test_a_placer_that_does_not_fit_is_ignored(places: list[memoryview] | None) -> None:
    frames = MessageReader().read(receiving([as_bytes([b"head", b"abc"])]), lambda head, sizes: places)
    assert frames is not None
    assert [bytes(frame) for frame in frames] == [b"head", b"abc"]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (struct.pack("!I", 0), "a message of 0 frames"),
        (struct.pack("!I", MAX_FRAMES + 1), f"a message of {MAX_FRAMES + 1} frames"),
        (struct.pack("!IQ", 1, MAX_HEAD + 1), f"a message of {MAX_HEAD + 1} bytes"),
        (struct.pack("!IQQ", 2, 1, 1 << 40), "a message of .* bytes"),
    ],
)
def test_bytes_that_are_not_a_message_break_the_connection(data: bytes, words: str) -> None:
    with pytest.raises(ConnectionBroken, match=words):
        MessageReader().read(receiving([data]), None)


def test_the_end_of_the_stream_breaks_the_connection() -> None:
    with pytest.raises(ConnectionBroken, match="the other side closed the connection"):
        MessageReader().read(lambda target: 0, None)


def test_what_the_kernel_does_not_accept_at_once_is_left_for_flush() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connection = Connection(PlainChannel(socket.create_connection(listener.getsockname())), Traffic())
        theirs, _ = listener.accept()
    with theirs:
        theirs.setblocking(False)
        large = bytes(64 << 20)
        assert not connection.send([b"head", large])
        assert not connection.send([b"second"]), "messages keep their order"
        reader = MessageReader()
        received: list[list[memoryview]] = []
        while len(received) < 2:
            connection.flush()
            while (frames := reader.read(theirs.recv_into, None)) is not None:
                received.append(frames)
        assert connection.flush()
        assert [len(frame) for frame in received[0]] == [4, len(large)]
        assert bytes(received[1][0]) == b"second"
        connection.close()


@pytest.mark.parametrize(
    ("max_fixed", "max_automatic", "chosen"),
    [
        (212_992, 4 << 20, None),  # Linux as it comes: a set size would be 0.4 MB, the kernel finds up to 4 MB
        (4 << 20, 4 << 20, 4 << 20),
        (4 << 20, 32 << 20, None),
        (64 << 20, 6 << 20, 4 << 20),
    ],
)
def test_a_buffer_has_a_set_size_only_if_that_is_larger(max_fixed: int, max_automatic: int, chosen: int | None) -> None:
    assert buffer_bytes(max_fixed, max_automatic) == chosen


def test_the_first_layers_overtake_over_a_connection_that_is_full() -> None:
    """Nobody reads while messages are queued. What has not begun then leaves by its priority."""
    one, other = socket.socketpair()
    sender, receiver = Connection(PlainChannel(one), Traffic()), Connection(PlainChannel(other), Traffic())
    for layer in reversed(range(32)):  # as backward finishes them
        sender.send([b"%d" % layer, bytes(1 << 20)], Precedence(-layer, [layer]))
    arrived: list[int] = []
    while len(arrived) < 32:
        sender.flush()
        while (frames := receiver.read(None)) is not None:
            arrived.append(int(bytes(frames[0])))
    assert arrived[0] == 31  # it had begun
    waited = arrived[arrived.index(0) :]
    assert len(waited) > 16
    assert waited == sorted(waited)
    sender.close()
    receiver.close()
