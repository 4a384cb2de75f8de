"""The conformance suite of transports, for what `transport.interface` requires: messages, shared memory, close.

Every check creates a transport of its own, so that no check depends on another.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from echelon.testing.assertions import assert_equal
from echelon.transport.interface import Buffer, Endpoint, Peer, Transport

MakeTransport = Callable[[], Transport]
Check = Callable[[MakeTransport], None]

HOST = "127.0.0.1"
TIMEOUT_S = 30.0  # timeout of what must happen; only a broken transport reaches it
SHORT_S = 0.05
LARGE_BYTES = 24 << 20
_GARBAGE = ("", " ", "x", "a b c d e", "1 2 3 4", "0 0 0 0 0", "\0", "é" * 40, "9" * 5000, "- - - - -")


def check_transport(make_transport: MakeTransport) -> None:
    """Run every check, each with a new transport."""
    for check in CHECKS:
        check(make_transport)


def messages_arrive_whole(make_transport: MakeTransport) -> None:
    """Frames arrive in the number, order and content they were sent in, also empty ones, in both directions."""
    sent: list[list[Buffer]] = [
        [b"one"],
        [b""],
        [b"", b"", b""],
        [b"head", b"", b"tail" * 2000],
        [bytearray(b"array"), memoryview(b"view")],
        [memoryview(bytearray(9000))[4000:8500]],
        [bytes([i]) for i in range(200)],
        [memoryview(bytes(range(64))).cast("I"), memoryview(bytes(8192)).cast("Q")],
    ]
    with _network(make_transport(), clients=1, servers=1) as ([client], [server]):
        for frames in sent:
            wanted = [bytes(frame) for frame in frames]
            client.send(0, frames)
            peer, received = _receive(server)
            assert_equal("a request's frames", [bytes(frame) for frame in received], wanted)
            assert_equal("their lengths in bytes", [len(frame) for frame in received], [len(frame) for frame in wanted])
            server.send(peer, received)
            assert_equal("an answer's frames", [bytes(frame) for frame in _receive(client)[1]], wanted)


def large_frames_arrive(make_transport: MakeTransport) -> None:
    """A message may have several frames of tens of megabytes; their memory may be reused after the answer."""
    first, second = bytearray(os.urandom(1 << 16) * (LARGE_BYTES >> 16)), bytearray(LARGE_BYTES // 2)
    with _network(make_transport(), clients=1, servers=1) as ([client], [server]):
        for turn in range(2):
            second[:] = bytes([turn + 1]) * len(second)
            client.send(0, [b"head", first, memoryview(second)])
            peer, received = _receive(server)
            assert_equal("lengths", [len(frame) for frame in received], [4, len(first), len(second)])
            assert_equal(
                "the frames are intact", [bytes(received[1]) == first, bytes(received[2]) == second], [True, True]
            )
            server.send(peer, received[1:])
            answer = _receive(client)[1]
            assert_equal("the answer is intact", [bytes(answer[0]) == first, bytes(answer[1]) == second], [True, True])


def messages_keep_their_order(make_transport: MakeTransport) -> None:
    """Many small messages, all sent before any is read, arrive once and in the order of each sender."""
    each = 1000
    with _network(make_transport(), clients=3, servers=1) as (clients, [server]):
        for number in range(each):
            for index, client in enumerate(clients):
                client.send(0, [bytes([index]), str(number).encode()])
        numbers: dict[Peer, list[int]] = {}
        senders: dict[Peer, set[bytes]] = {}
        for _ in range(each * len(clients)):
            peer, (index_frame, number_frame) = _receive(server)
            numbers.setdefault(peer, []).append(int(bytes(number_frame)))
            senders.setdefault(peer, set()).add(bytes(index_frame))
        assert_equal("messages of each client, in order", list(numbers.values()), [list(range(each))] * len(clients))
        assert_equal("each peer is one client", sorted(senders.values(), key=min), [{b"\0"}, {b"\1"}, {b"\2"}])
        for peer in numbers:
            for number in range(each):
                server.send(peer, [str(number).encode()])
        for client in clients:
            answers = [int(bytes(_receive(client)[1][0])) for _ in range(each)]
            assert_equal("answers, in order", answers, list(range(each)))
        assert_equal("no message arrives twice", server.recv(SHORT_S), None)


def every_client_reaches_every_server(make_transport: MakeTransport) -> None:
    """Peer i of a client is the server at addresses[i], and an answer reaches the client that asked."""
    with _network(make_transport(), clients=3, servers=3) as (clients, servers):
        assert_equal("servers have different addresses", len({server.address for server in servers}), 3)
        assert_equal("clients have no address", {client.address for client in clients}, {""})
        for c, client in enumerate(clients):
            for s in range(len(servers)):
                client.send(s, [b"from %d to %d" % (c, s)])
        for s, server in enumerate(servers):
            for _ in clients:
                peer, [frame] = _receive(server)
                assert_equal("the request was sent to this server", bytes(frame)[-1:], b"%d" % s)
                server.send(peer, [b"server %d answers: " % s, frame])
        for c, client in enumerate(clients):
            answers = dict(_receive(client) for _ in servers)
            wanted = {s: [b"server %d answers: " % s, b"from %d to %d" % (c, s)] for s in range(len(servers))}
            assert_equal("answers by server", {s: [bytes(f) for f in frames] for s, frames in answers.items()}, wanted)


def clients_of_one_name_are_separate_peers(make_transport: MakeTransport) -> None:
    """Two clients of one name are two peers, so that a restarted process is not confused with the dead one."""
    transport = make_transport()
    server = transport.serve(HOST)
    twins = [transport.connect("worker-0", [server.address]) for _ in range(2)]
    with _closing([*twins, server]):
        for number, twin in enumerate(twins):
            twin.send(0, [b"%d" % number])
        peers = {bytes(frames[0]): peer for peer, frames in (_receive(server) for _ in twins)}
        assert_equal("different peers", len(set(peers.values())), 2)
        for text, peer in peers.items():
            server.send(peer, [text])
        for number, twin in enumerate(twins):
            assert_equal("each gets its own answer", bytes(_receive(twin)[1][0]), b"%d" % number)


def recv_returns_at_its_timeout(make_transport: MakeTransport) -> None:
    """Without a message, `recv` returns None at its timeout and not before; with timeout 0 it does not wait."""
    with _network(make_transport(), clients=1, servers=1) as ([client], [server]):
        for endpoint in (client, server):
            for timeout_s in (0.0, SHORT_S):
                began = time.monotonic()
                assert_equal("nothing has come", endpoint.recv(timeout_s), None)
                waited = time.monotonic() - began
                assert_equal(f"recv({timeout_s}) waited its time", timeout_s * 0.9 <= waited < TIMEOUT_S / 2, True)


def wake_ends_recv(make_transport: MakeTransport) -> None:
    """`wake` from another thread ends the current or the next `recv`, only one, and no message is lost."""
    with _network(make_transport(), clients=1, servers=1) as ([client], [server]):
        for endpoint in (client, server):
            waiter = _Waiter(endpoint)
            endpoint.wake()
            assert_equal("a woken recv has no message", waiter.result(), None)
            endpoint.wake()
            began = time.monotonic()
            assert_equal("a wake before recv ends that recv", endpoint.recv(TIMEOUT_S), None)
            assert_equal("it ends at once", time.monotonic() - began < TIMEOUT_S / 2, True)
            began = time.monotonic()
            assert_equal("nothing has come", endpoint.recv(SHORT_S), None)
            assert_equal("a wake ends only one recv", time.monotonic() - began >= SHORT_S * 0.9, True)
        waiter = _Waiter(server)
        client.send(0, [b"a message wakes too"])
        received = waiter.result()
        assert_equal("the message arrived", received is not None and bytes(received[1][0]), b"a message wakes too")
        client.send(0, [b"kept"])
        server.wake()
        assert_equal("a wake loses no message", bytes(_receive(server)[1][0]), b"kept")


def allocated_memory_is_zeroed(make_transport: MakeTransport) -> None:
    """`allocate` returns zeroed, writable memory of the requested size."""
    transport = make_transport()
    for size in (0, 1, 4095, 4096, 5 << 20):
        block = transport.allocate(size)
        assert_equal("bytes", len(block.buffer), size)
        assert_equal("zeroed", bytes(block.buffer) == bytes(size), True)
        block.buffer[:] = b"\xff" * size
        fresh = bytes(transport.allocate(size).buffer)
        assert_equal("a new block is zeroed although the last one was written to", fresh == bytes(size), True)
        assert_equal("blocks do not overlap", bytes(block.buffer) == b"\xff" * size, True)


def attached_memory_is_shared(make_transport: MakeTransport) -> None:
    """If a block can be attached, each side sees what the other writes; otherwise `attach` returns None."""
    transport = make_transport()
    blocks = [transport.allocate(size) for size in (10_000, 10_000, 64)]
    for number, block in enumerate(blocks):
        attached = transport.attach(block.descriptor)
        assert_equal("only an empty descriptor cannot be attached", attached is None, block.descriptor == "")
        if attached is not None:
            assert_equal("the whole block is attached", len(attached), len(block.buffer))
            block.buffer[7] = number + 1
            assert_equal("the owner's write is visible", attached[7], number + 1)
            attached[-1] = number + 101
            assert_equal("the peer's write is visible", block.buffer[-1], number + 101)
    assert_equal(
        "blocks are separate", [block.buffer[-1] for block in blocks], [101, 102, 103] if attached else [0] * 3
    )


def invalid_descriptors_are_rejected(make_transport: MakeTransport) -> None:
    """A descriptor comes from another process. An invalid one raises nothing and gives access to no other memory."""
    transport = make_transport()
    block = transport.allocate(8192)
    true = block.descriptor
    forged = [true[:at] + chr(ord(true[at]) + 1) + true[at + 1 :] for at in range(len(true))]
    forged += [true[:at] for at in range(len(true))]
    forged += [f"{true} 1", f"x{true}", true.replace(" ", "")] if " " in true else []
    for text in _GARBAGE:
        assert_equal(f"attach({text[:120]!r})", transport.attach(text), None)
    for number, text in enumerate(forged):
        attached = transport.attach(text)
        if attached is not None:  # another path to the same memory is harmless, such as a thread id on Linux
            block.buffer[:2] = number.to_bytes(2)
            assert_equal(f"attach({text!r}) is the same block", bytes(attached[:2]), number.to_bytes(2))
    assert_equal("the valid descriptor still works", transport.attach(true) is None, true == "")


def close_releases_everything(make_transport: MakeTransport) -> None:
    """After `close` no thread and no file is left, even with unread messages. A closed peer does not disturb others."""
    _exchange_and_close(make_transport())  # libraries may keep threads and files after the first use
    threads, files = threading.active_count(), _open_files()
    _exchange_and_close(make_transport())
    assert_equal("threads after close", threading.active_count(), threads)
    assert_equal("open files after close", _open_files(), files)


def _exchange_and_close(transport: Transport) -> None:
    server = transport.serve(HOST)
    leaver, stayer = (transport.connect(name, [server.address]) for name in ("leaver", "stayer"))
    with _closing([stayer, server]):
        leaver.send(0, [b"hello", bytes(20_000)])
        closed_peer, _ = _receive(server)
        server.send(closed_peer, [b"never read", bytes(20_000)])
        leaver.close()
        server.send(closed_peer, [b"to nobody"])
        stayer.send(0, [b"still here"])
        peer, frames = _receive(server)
        server.send(peer, frames)
        assert_equal("other peers still work", bytes(_receive(stayer)[1][0]), b"still here")
        stayer.send(0, [b"never read", bytes(20_000)])


class _Waiter:
    """Calls `recv` in another thread."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._received: list[tuple[Peer, list[memoryview]] | None] = []
        self._thread = threading.Thread(target=lambda: self._received.append(endpoint.recv(TIMEOUT_S)))
        self._thread.start()

    def result(self) -> tuple[Peer, list[memoryview]] | None:
        """Return what `recv` returned. It must return well before its timeout."""
        self._thread.join(TIMEOUT_S / 2)
        assert_equal("recv returned", not self._thread.is_alive(), True)
        return self._received[0]


def _receive(endpoint: Endpoint) -> tuple[Peer, list[memoryview]]:
    """Return the next message. A None before the deadline comes from a late wake."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        received = endpoint.recv(TIMEOUT_S)
        if received is not None:
            return received
    raise AssertionError(f"no message in {TIMEOUT_S:g} s")


@contextmanager
def _network(transport: Transport, clients: int, servers: int) -> Iterator[tuple[list[Endpoint], list[Endpoint]]]:
    """Connect every client to every server; close all at the end."""
    listening = [transport.serve(HOST) for _ in range(servers)]
    addresses = [server.address for server in listening]
    calling = [transport.connect(f"client-{index}", addresses) for index in range(clients)]
    with _closing([*calling, *listening]):
        yield calling, listening


@contextmanager
def _closing(endpoints: Sequence[Endpoint]) -> Iterator[None]:
    try:
        yield
    finally:
        for endpoint in endpoints:
            endpoint.close()


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


CHECKS: tuple[Check, ...] = (
    messages_arrive_whole,
    large_frames_arrive,
    messages_keep_their_order,
    every_client_reaches_every_server,
    clients_of_one_name_are_separate_peers,
    recv_returns_at_its_timeout,
    wake_ends_recv,
    allocated_memory_is_zeroed,
    attached_memory_is_shared,
    invalid_descriptors_are_rejected,
    close_releases_everything,
)
