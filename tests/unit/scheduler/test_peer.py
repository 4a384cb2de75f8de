"""One connection of the scheduler: bounded turns, a bounded rate, a bounded queue, and when its process is dead."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

import pytest

from echelon.cluster.messages import Halt, Heartbeat, Leave, Malformed, Registered
from echelon.scheduler.peer import (
    BURST,
    MAX_FRAME,
    MEMBER_QUEUE,
    OTHER_QUEUE,
    RATE,
    TURN_MESSAGES,
    Peer,
    PeerError,
    cost,
)
from echelon.transport.admission.channel import PlainChannel
from echelon.transport.awake import LATE_S, AwakeClock
from echelon.transport.control import frame

Pair = tuple[Peer, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """A connection at time 0, and the other side's socket."""
    own, other = socket.socketpair()
    with own, other:
        yield Peer(1, PlainChannel(own), 0.0), other


def test_a_turn_has_a_limit_and_the_next_one_is_at_once(pair: Pair) -> None:
    peer, other = pair
    other.sendall(frame(Heartbeat()) * (TURN_MESSAGES + 5))
    assert len(list(peer.receive(0.0))) == TURN_MESSAGES
    assert peer.resumes_at == 0.0
    assert len(list(peer.receive(0.0))) == 5
    assert peer.resumes_at is None, "the selector reports the next bytes"


def test_a_connection_that_sends_too_much_is_read_more_slowly(pair: Pair) -> None:
    peer, other = pair
    other.setblocking(False)
    now, handled = 0.0, 0
    while now < 10.0:
        try:
            other.send(frame(Heartbeat()) * 100)
        except BlockingIOError:
            pass
        handled += len(list(peer.receive(now)))
        assert peer.dead_because(now, timeout_s=1.0) is None, "it is not silent while the scheduler does not read"
        now = max(now + 1e-3, peer.resumes_at or 0.0)
    assert handled == pytest.approx(BURST + 10 * RATE, rel=0.2)


def test_a_message_that_goes_to_all_costs_more() -> None:
    assert cost(Halt("stop"), 20) > 10 * cost(Heartbeat(), 20)
    assert cost(Leave("x"), 20_000) > 10 * cost(Leave("x"), 20)


def test_a_frame_that_is_too_long_is_refused_before_it_arrives(pair: Pair) -> None:
    peer, other = pair
    other.sendall(struct.pack("!I", MAX_FRAME + 1))
    with pytest.raises(Malformed, match=f"{MAX_FRAME + 1} bytes, and at most {MAX_FRAME}"):
        list(peer.receive(0.0))


def test_messages_of_the_scheduler_itself_are_refused(pair: Pair) -> None:
    peer, other = pair
    other.sendall(frame(Registered(1)))
    with pytest.raises(Malformed, match="not a message to the scheduler"):
        list(peer.receive(0.0))


@pytest.mark.parametrize(("joined", "limit"), [(False, OTHER_QUEUE), (True, MEMBER_QUEUE)])
def test_the_queue_of_a_peer_that_does_not_read_is_bounded(pair: Pair, joined: bool, limit: int) -> None:
    peer, _ = pair
    peer.joined = joined
    message = bytes(10_000)

    def queue_many() -> None:
        for _ in range(2 * limit // len(message) + 100):
            peer.queue(message, 0.0)

    with pytest.raises(PeerError, match=r"it does not read: \d+ bytes wait for it"):
        queue_many()
    assert limit < peer._num_queued <= limit + len(message)


def test_queued_messages_arrive_whole_and_in_order(pair: Pair) -> None:
    peer, other = pair
    peer.joined = True
    messages = [bytes([number]) * 50_000 for number in range(20)]
    for message in messages:
        peer.queue(message, 0.0)
    assert peer.has_output
    other.setblocking(False)
    received = bytearray()
    while len(received) < 20 * 50_000:
        received += other.recv(1 << 20)
        peer.flush(0.0)
    assert bytes(received) == b"".join(messages)
    assert not peer.has_output


def test_silence_is_death(pair: Pair) -> None:
    peer, other = pair
    other.sendall(frame(Heartbeat()))
    list(peer.receive(5.0))
    assert peer.dead_because(14.9, timeout_s=10.0) is None
    assert peer.dead_because(15.1, timeout_s=10.0) == "no message for 10.1 s"


def test_a_peer_that_sends_but_does_not_read_is_dead(pair: Pair) -> None:
    peer, other = pair
    peer.joined = True
    while not peer.has_output:
        peer.queue(bytes(10_000), 1.0)
    other.sendall(frame(Heartbeat()))
    list(peer.receive(11.0))
    assert peer.dead_because(10.9, timeout_s=10.0) is None
    assert peer.dead_because(11.2, timeout_s=10.0) == "it has not read the scheduler's messages for 10.2 s"
    other.recv(1 << 20)
    peer.flush(11.2)
    assert peer.dead_because(11.2, timeout_s=10.0) is None


def test_time_in_which_the_scheduler_did_not_run_does_not_count() -> None:
    """Nobody is judged in the turn after such a time."""
    clock = AwakeClock(100.0)
    turns = [(clock.tick(now), clock.was_late) for now in (100.5, 160.5, 161.0, 161.0 + LATE_S)]
    assert turns == [(100.5, False), (100.5, True), (101.0, False), (101.0 + LATE_S, False)]
