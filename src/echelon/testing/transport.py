"""What `transport.interface` promises, checked on any transport: messages first, then shared memory, then the end.

Every check makes a transport of its own, so nothing one leaves behind can help or harm the next.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from echelon.testing.expect import same
from echelon.transport.interface import Buffer, Endpoint, Peer, Transport

MakeTransport = Callable[[], Transport]
Check = Callable[[MakeTransport], None]

HOST = "127.0.0.1"
PATIENCE_S = 30.0  # for what must come; only a broken transport takes this long
SHORT_S = 0.05
LARGE_BYTES = 24 << 20
_GARBAGE = ("", " ", "x", "a b c d e", "1 2 3 4", "0 0 0 0 0", "\0", "é" * 40, "9" * 5000, "- - - - -")


def check_transport(make_transport: MakeTransport) -> None:
    """Run every check on transports that `make_transport` makes."""
    for check in CHECKS:
        check(make_transport)


def messages_arrive_whole(make_transport: MakeTransport) -> None:
    """Frames come as they were sent: number, order, bytes, with empty ones among them, both ways."""
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
            same("a request's frames", [bytes(frame) for frame in received], wanted)
            same("their lengths in bytes", [len(frame) for frame in received], [len(frame) for frame in wanted])
            server.send(peer, received)
            same("an answer's frames", [bytes(frame) for frame in _receive(client)[1]], wanted)


def large_frames_arrive(make_transport: MakeTransport) -> None:
    """Frames of tens of megabytes, several to a message, both ways; memory may be used again once answered."""
    first, second = bytearray(os.urandom(1 << 16) * (LARGE_BYTES >> 16)), bytearray(LARGE_BYTES // 2)
    with _network(make_transport(), clients=1, servers=1) as ([client], [server]):
        for turn in range(2):
            second[:] = bytes([turn + 1]) * len(second)
            client.send(0, [b"head", first, memoryview(second)])
            peer, received = _receive(server)
            same("lengths", [len(frame) for frame in received], [4, len(first), len(second)])
            same("the frames are intact", [bytes(received[1]) == first, bytes(received[2]) == second], [True, True])
            server.send(peer, received[1:])
            answer = _receive(client)[1]
            same("the answer is intact", [bytes(answer[0]) == first, bytes(answer[1]) == second], [True, True])


def messages_keep_their_order(make_transport: MakeTransport) -> None:
    """Many small messages from several clients, sent before any is read, arrive once and in each sender's order."""
    each = 1000
    with _network(make_transport(), clients=3, servers=1) as (clients, [server]):
        for number in range(each):
            for index, client in enumerate(clients):
                client.send(0, [bytes([index]), str(number).encode()])
        heard: dict[Peer, list[int]] = {}
        senders: dict[Peer, set[bytes]] = {}
        for _ in range(each * len(clients)):
            peer, (index_frame, number_frame) = _receive(server)
            heard.setdefault(peer, []).append(int(bytes(number_frame)))
            senders.setdefault(peer, set()).add(bytes(index_frame))
        same("messages of each client, in order", list(heard.values()), [list(range(each))] * len(clients))
        same("each peer is one client", sorted(senders.values(), key=min), [{b"\0"}, {b"\1"}, {b"\2"}])
        for peer in heard:
            for number in range(each):
                server.send(peer, [str(number).encode()])
        for client in clients:
            answers = [int(bytes(_receive(client)[1][0])) for _ in range(each)]
            same("answers, in order", answers, list(range(each)))
        same("nothing comes twice", server.recv(SHORT_S), None)


def many_meet_many(make_transport: MakeTransport) -> None:
    """Peer i of a client is the server at addresses[i], and an answer goes to the client that asked."""
    with _network(make_transport(), clients=3, servers=3) as (clients, servers):
        same("servers have addresses of their own", len({server.address for server in servers}), 3)
        same("clients have none", {client.address for client in clients}, {""})
        for c, client in enumerate(clients):
            for s in range(len(servers)):
                client.send(s, [b"from %d to %d" % (c, s)])
        for s, server in enumerate(servers):
            for _ in clients:
                peer, [frame] = _receive(server)
                same("a request is for this server", bytes(frame)[-1:], b"%d" % s)
                server.send(peer, [b"server %d answers: " % s, frame])
        for c, client in enumerate(clients):
            answers = dict(_receive(client) for _ in servers)
            wanted = {s: [b"server %d answers: " % s, b"from %d to %d" % (c, s)] for s in range(len(servers))}
            same("answers by server", {s: [bytes(f) for f in frames] for s, frames in answers.items()}, wanted)


def namesakes_are_told_apart(make_transport: MakeTransport) -> None:
    """Two clients of one name are two peers: a process that was born again is not taken for the dead one."""
    transport = make_transport()
    server = transport.serve(HOST)
    twins = [transport.connect("worker-0", [server.address]) for _ in range(2)]
    with _closing([*twins, server]):
        for number, twin in enumerate(twins):
            twin.send(0, [b"%d" % number])
        peers = {bytes(frames[0]): peer for peer, frames in (_receive(server) for _ in twins)}
        same("different peers", len(set(peers.values())), 2)
        for text, peer in peers.items():
            server.send(peer, [text])
        for number, twin in enumerate(twins):
            same("each gets its own answer", bytes(_receive(twin)[1][0]), b"%d" % number)


def recv_keeps_its_deadline(make_transport: MakeTransport) -> None:
    """Without a message `recv` returns None when the time is up, not before; with time 0 it does not wait."""
    with _network(make_transport(), clients=1, servers=1) as ([client], [server]):
        for endpoint in (client, server):
            for timeout_s in (0.0, SHORT_S):
                began = time.monotonic()
                same("nothing has come", endpoint.recv(timeout_s), None)
                waited = time.monotonic() - began
                same(f"recv({timeout_s}) waited its time", timeout_s * 0.9 <= waited < PATIENCE_S / 2, True)


def wake_ends_a_wait(make_transport: MakeTransport) -> None:
    """`wake` from another thread ends a `recv`, or the next one; it is used up by that, and loses no message."""
    with _network(make_transport(), clients=1, servers=1) as ([client], [server]):
        for endpoint in (client, server):
            waiter = _Waiter(endpoint)
            endpoint.wake()
            same("a woken recv has no message", waiter.result(), None)
            endpoint.wake()
            began = time.monotonic()
            same("a wake before the wait counts", endpoint.recv(PATIENCE_S), None)
            same("it counts at once", time.monotonic() - began < PATIENCE_S / 2, True)
            began = time.monotonic()
            same("nothing has come", endpoint.recv(SHORT_S), None)
            same("a wake is used up by one recv", time.monotonic() - began >= SHORT_S * 0.9, True)
        waiter = _Waiter(server)
        client.send(0, [b"a message wakes too"])
        received = waiter.result()
        same("the message came", received is not None and bytes(received[1][0]), b"a message wakes too")
        client.send(0, [b"kept"])
        server.wake()
        same("a wake loses no message", bytes(_receive(server)[1][0]), b"kept")


def memory_is_zeroed(make_transport: MakeTransport) -> None:
    """`allocate` gives zeroed, writable bytes, as many as asked for, however big or small."""
    transport = make_transport()
    for size in (0, 1, 4095, 4096, 5 << 20):
        block = transport.allocate(size)
        same("bytes", len(block.buffer), size)
        same("zeroed", bytes(block.buffer) == bytes(size), True)
        block.buffer[:] = b"\xff" * size
        fresh = bytes(transport.allocate(size).buffer)
        same("a new block is zeroed whatever was written before", fresh == bytes(size), True)
        same("blocks do not overlap", bytes(block.buffer) == b"\xff" * size, True)


def attached_memory_is_one(make_transport: MakeTransport) -> None:
    """Where a block can be attached, each side sees what the other writes; where not, the answer is None."""
    transport = make_transport()
    blocks = [transport.allocate(size) for size in (10_000, 10_000, 64)]
    for number, block in enumerate(blocks):
        attached = transport.attach(block.descriptor)
        same("an empty descriptor is one that nobody can attach", attached is None, block.descriptor == "")
        if attached is not None:
            same("all of it is attached", len(attached), len(block.buffer))
            block.buffer[7] = number + 1
            same("the owner's write is seen", attached[7], number + 1)
            attached[-1] = number + 101
            same("the peer's write is seen", block.buffer[-1], number + 101)
    same("each block is its own", [block.buffer[-1] for block in blocks], [101, 102, 103] if attached else [0] * 3)


def false_descriptors_give_none(make_transport: MakeTransport) -> None:
    """A descriptor came over a wire: whatever it says, `attach` raises nothing and gives no other memory."""
    transport = make_transport()
    block = transport.allocate(8192)
    true = block.descriptor
    forged = [true[:at] + chr(ord(true[at]) + 1) + true[at + 1 :] for at in range(len(true))]
    forged += [true[:at] for at in range(len(true))]
    forged += [f"{true} 1", f"x{true}", true.replace(" ", "")] if " " in true else []
    for text in _GARBAGE:
        same(f"attach({text[:120]!r})", transport.attach(text), None)
    for number, text in enumerate(forged):
        attached = transport.attach(text)
        if attached is not None:  # another path to the same memory harms nobody: on Linux a thread's id is one
            block.buffer[:2] = number.to_bytes(2)
            same(f"attach({text!r}) is this very block", bytes(attached[:2]), number.to_bytes(2))
    same("the true one still serves", transport.attach(true) is None, true == "")


def close_is_clean(make_transport: MakeTransport) -> None:
    """After `close` no thread and no file is left, messages unread or not; a peer that has gone harms nobody."""
    _talk_and_close(make_transport())  # what a library keeps for good is there after the first time
    threads, files = threading.active_count(), _open_files()
    _talk_and_close(make_transport())
    same("threads after close", threading.active_count(), threads)
    same("open files after close", _open_files(), files)


def _talk_and_close(transport: Transport) -> None:
    server = transport.serve(HOST)
    leaver, stayer = (transport.connect(name, [server.address]) for name in ("leaver", "stayer"))
    with _closing([stayer, server]):
        leaver.send(0, [b"hello", bytes(20_000)])
        gone, _ = _receive(server)
        server.send(gone, [b"never read", bytes(20_000)])
        leaver.close()
        server.send(gone, [b"to nobody"])
        stayer.send(0, [b"still here"])
        peer, frames = _receive(server)
        server.send(peer, frames)
        same("the others go on", bytes(_receive(stayer)[1][0]), b"still here")
        stayer.send(0, [b"never read", bytes(20_000)])


class _Waiter:
    """A `recv` in another thread."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._received: list[tuple[Peer, list[memoryview]] | None] = []
        self._thread = threading.Thread(target=lambda: self._received.append(endpoint.recv(PATIENCE_S)))
        self._thread.start()

    def result(self) -> tuple[Peer, list[memoryview]] | None:
        """What it got; it must be back well before its own deadline."""
        self._thread.join(PATIENCE_S / 2)
        same("recv came back", self._thread.is_alive(), False)
        return self._received[0]


def _receive(endpoint: Endpoint) -> tuple[Peer, list[memoryview]]:
    """The next message; a None before the deadline is a wake that came late."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        received = endpoint.recv(PATIENCE_S)
        if received is not None:
            return received
    raise AssertionError(f"no message in {PATIENCE_S:g} s")


@contextmanager
def _network(transport: Transport, clients: int, servers: int) -> Iterator[tuple[list[Endpoint], list[Endpoint]]]:
    """Clients that are connected to every server; all closed in the end."""
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
    many_meet_many,
    namesakes_are_told_apart,
    recv_keeps_its_deadline,
    wake_ends_a_wait,
    memory_is_zeroed,
    attached_memory_is_one,
    false_descriptors_give_none,
    close_is_clean,
)
