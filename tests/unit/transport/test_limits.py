"""A server's connections: no client keeps the server from the others, or keeps memory that it does not fill."""

from __future__ import annotations

import select
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import pytest

from echelon.transport import connection as connection_module
from echelon.transport import sockets as sockets_module
from echelon.transport.admission.admission import connect
from echelon.transport.admission.credentials import Credentials, Security
from echelon.transport.connection import MAX_NAME
from echelon.transport.interface import FramesDeferred, FramesRefused, Peer
from echelon.transport.sockets import ClientSockets, ServerSockets

TIMEOUT_S = 30.0


@lru_cache
def security() -> Security:
    return Security("auto", Credentials.create())


def message(*frames: bytes) -> bytes:
    return struct.pack(f"!I{len(frames)}Q", len(frames), *map(len, frames)) + b"".join(frames)


@contextmanager
def a_server() -> Iterator[ServerSockets]:
    server = ServerSockets("127.0.0.1", security())
    try:
        yield server
    finally:
        server.close()


@contextmanager
def a_client(server: ServerSockets, name: bytes = b"raw") -> Iterator[socket.socket]:
    host, _, port = server.address.removeprefix("tcp://").rpartition(":")
    with connect((host, int(port)), security(), TIMEOUT_S).socket as client:
        client.settimeout(TIMEOUT_S)
        client.sendall(message(name + b" " + server.address.encode()))
        yield client


def peers_of(server: ServerSockets, count: int) -> list[Peer]:
    """Return the senders of the next messages."""
    senders = []
    for _ in range(count):
        received = server.recv(TIMEOUT_S)
        assert received is not None
        senders.append(received[0])
    return senders


def has_ended(server: ServerSockets, client: socket.socket) -> bool:
    """Let the server run, and return whether it has ended the connection."""
    assert server.recv(0.0) is None
    if not select.select([client], [], [], 0.0)[0]:
        return False
    try:
        return client.recv(1) == b""
    except ConnectionResetError:
        return True


def wait_for_end(server: ServerSockets, client: socket.socket) -> None:
    while not has_ended(server, client):
        pass


def test_one_client_with_many_messages_does_not_keep_the_server_from_another() -> None:
    with a_server() as server, a_client(server, b"chatty") as chatty, a_client(server, b"other") as other:
        other.sendall(message(b"first"))
        assert peers_of(server, 1) == [b"other"], "the thread that admits clients has admitted it"
        chatty.sendall(message(b"hello") * 5000)
        peers_of(server, 1)
        other.sendall(message(b"hello"))
        select.select([server._connections[b"other"]], [], [], TIMEOUT_S)  # the kernel may deliver it late
        senders = peers_of(server, 5000)
        assert senders.index(b"other") < 3 * sockets_module._TURN_MESSAGES
        assert senders.count(b"chatty") == 4999, "nothing is lost"


def test_one_client_with_a_large_message_does_not_keep_the_server_from_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "TURN_BYTES", 1000)
    with a_server() as server, a_client(server, b"large") as large, a_client(server, b"other") as other:
        other.sendall(message(b"first"))
        assert peers_of(server, 1) == [b"other"], "the thread that admits clients has admitted it"
        large.sendall(message(b"head", bytes(100_000)))
        other.sendall(message(b"hello"))
        assert peers_of(server, 2) == [b"other", b"large"]


def test_a_message_that_stays_incomplete_ends_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets_module, "CHECK_S", 0.0)
    with a_server() as server, a_client(server) as client, a_client(server, b"idle") as idle:
        client.sendall(message(b"head", bytes(100))[:-1])
        for _ in range(10):
            assert not has_ended(server, client), "it has a minute"
        monkeypatch.setattr(sockets_module, "STALLED_S", 0.05)
        wait_for_end(server, client)
        assert not has_ended(server, idle), "a connection without a message may be idle"


def test_a_client_that_does_not_read_its_answers_is_not_read_until_it_does() -> None:
    with a_server() as server, a_client(server) as client:
        client.sendall(message(b"first"))
        assert peers_of(server, 1) == [b"raw"]
        answer = bytes(2 * sockets_module.MAX_WAITING_BYTES)
        server.send(b"raw", [answer])
        client.sendall(message(b"second"))
        for _ in range(10):
            assert server.recv(0.0) is None
        left = len(message(answer))
        received = None
        while received is None:
            left -= len(client.recv(min(left, 1 << 20))) if left else 0
            received = server.recv(0.0)
        assert bytes(received[1][0]) == b"second"


def test_a_client_that_never_reads_its_answers_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets_module, "CHECK_S", 0.0)
    monkeypatch.setattr(sockets_module, "STALLED_S", 0.05)
    with a_server() as server, a_client(server) as client:
        client.sendall(message(b"first"))
        assert peers_of(server, 1) == [b"raw"]
        server.send(b"raw", [bytes(2 * sockets_module.MAX_WAITING_BYTES)])
        while b"raw" in server._connections:
            assert server.recv(0.0) is None


def test_refused_frames_end_the_connection_before_they_are_received() -> None:
    asked: list[tuple[Peer, bytes, list[int]]] = []

    def refuse(peer: Peer, head: memoryview, sizes: list[int]) -> None:
        asked.append((peer, bytes(head), sizes))
        raise FramesRefused

    with a_server() as server, a_client(server) as client:
        server.placer = refuse
        client.sendall(struct.pack("!IQQ", 2, 4, 1 << 37) + b"head")
        wait_for_end(server, client)
        assert asked == [(b"raw", b"head", [1 << 37])]


def test_the_first_message_is_delivered_before_the_frames_of_the_next_one_are_placed() -> None:
    """A server learns from it whose connection it is, and so which frames it accepts."""
    delivered: list[bytes] = []

    def accept_once_known(peer: Peer, head: memoryview, sizes: list[int]) -> None:
        if not delivered:
            raise FramesRefused

    with a_server() as server, a_client(server) as client:
        server.placer = accept_once_known
        client.sendall(message(b"who I am") + message(b"head", b"frame"))
        while len(delivered) < 2:
            received = server.recv(1.0)
            assert received is not None
            delivered.append(bytes(received[1][-1]))
        assert delivered == [b"who I am", b"frame"]


def test_a_name_is_short() -> None:
    with a_server() as server, a_client(server, bytes(MAX_NAME + 1)) as client:
        wait_for_end(server, client)


def test_a_client_that_was_disconnected_can_connect_again() -> None:
    with a_server() as server:
        client = ClientSockets("worker", [server.address], security())
        client.send(0, [b"one"])
        (name,) = peers_of(server, 1)
        server.disconnect(name)
        assert client.recv(60.0) is None, "it returns when the connection ends"
        assert client.broken == {0}
        assert client.recv(0.01) is None, "it waits, although nobody has emptied the set"
        client.send(0, [b"two"])
        assert peers_of(server, 1) == [name]
        client.close()


def test_frames_without_room_wait_while_other_connections_are_read() -> None:
    has_room = False

    def placer(peer: Peer, head: memoryview, sizes: list[int]) -> None:
        if bytes(head) == b"large" and not has_room:
            raise FramesDeferred

    with a_server() as server, a_client(server, b"one") as one, a_client(server, b"two") as two:
        server.placer = placer
        one.sendall(message(b"small") + message(b"large", b"frame") + message(b"after"))
        assert peers_of(server, 1) == [b"one"]
        for _ in range(3):
            two.sendall(message(b"small"))
            assert peers_of(server, 1) == [b"two"]
        assert server.recv(0.05) is None
        has_room = True
        received = [server.recv(TIMEOUT_S) for _ in range(2)]
        assert [[bytes(frame) for frame in one[1]] for one in received if one] == [[b"large", b"frame"], [b"after"]]
        assert server.traffic.queued == 0


def test_a_connection_that_ends_while_its_frames_wait_is_dropped() -> None:
    def placer(peer: Peer, head: memoryview, sizes: list[int]) -> None:
        raise FramesDeferred

    with a_server() as server, a_client(server, b"one") as one, a_client(server, b"one") as again:
        server.placer = placer
        one.sendall(message(b"large", b"frame"))
        assert server.recv(0.05) is None
        again.sendall(message(b"small"))
        assert peers_of(server, 1) == [b"one"]
        server.disconnect(b"one")
        assert server.recv(0.0) is None
