"""Half-open connections: the kernel knows when the other machine is silent, and endpoints connect again."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress

import pytest

from echelon.environment import Job
from echelon.errors import JobError
from echelon.transport import connection as connection_module
from echelon.transport import sockets as sockets_module
from echelon.transport.admission.credentials import Security
from echelon.transport.interface import Endpoint, Peer
from echelon.transport.liveness import SILENT_S, send_probes, silence_s
from echelon.transport.sockets import ClientSockets, ServerSockets
from jobs import until


def security() -> Security:
    return Security.of(Job(security="none"))


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        client = stack.enter_context(socket.create_connection(listener.getsockname()))
        yield client, stack.enter_context(listener.accept()[0])


def test_silence_ends_with_data_and_with_an_acknowledgement(pair: tuple[socket.socket, socket.socket]) -> None:
    one, other = pair
    for sender, what in ((one, b"acknowledged by the kernel, although nobody reads it"), (other, b"data")):
        until(lambda: silence_s(one) > 0.3, "nothing has arrived for a while")
        sender.sendall(what)
        until(lambda: silence_s(one) < 0.3, "the silence has ended")


def test_a_process_that_does_not_read_is_not_silent(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernel acknowledges probes, over an idle connection and over one whose window is full."""
    monkeypatch.setattr("echelon.transport.liveness.PROBE_S", 1)
    sender, _ = pair
    send_probes(sender)
    until(lambda: silence_s(sender) > 0.5, "nothing has arrived for a while")
    until(lambda: silence_s(sender) < 0.4, "a probe of the idle connection was acknowledged")
    sender.setblocking(False)
    with suppress(BlockingIOError):
        while True:
            sender.send(bytes(1 << 20))
    end = time.monotonic() + 3.0
    while time.monotonic() < end:
        assert silence_s(sender) < SILENT_S / 2


def receive(endpoint: Endpoint) -> tuple[Peer, list[bytes]]:
    peer, frames = until(lambda: endpoint.recv(0.05), "a message")
    return peer, [bytes(frame) for frame in frames]


def test_half_open_connections_are_ended_on_both_sides_and_the_client_connects_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with (
        closing(ServerSockets("127.0.0.1", security())) as server,
        closing(ClientSockets("worker", [server.address], security())) as client,
    ):
        client.send(0, [b"one"])
        name, _ = receive(server)
        for endpoint, peer in ((client, 0), (server, name)):
            end_idle_connection(endpoint, peer, monkeypatch)
            until(lambda: not client.recv(0.0) and not server.recv(0.0) and not client._connections, "both notice it")
            client.send(0, [b"two"])
            assert receive(server) == (name, [b"two"])
            server.send(name, [b"answer"])
            assert receive(client) == (0, [b"answer"])


def end_idle_connection(endpoint: ServerSockets | ClientSockets, peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the endpoint take an idle connection for a half-open one."""
    with monkeypatch.context() as patch:
        patch.setattr(sockets_module, "CHECK_S", 0.0)
        patch.setattr(connection_module, "SILENT_S", 0.1)
        until(lambda: not endpoint.recv(0.01) and peer not in endpoint._connections, "the connection is ended")


def test_a_server_that_cannot_be_reached_costs_one_attempt_however_many_requests_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attempts = []

    def connect(*_: object) -> None:
        attempts.append(1)
        raise TimeoutError("timed out")

    with closing(ServerSockets("127.0.0.1", security())) as server:
        client = ClientSockets("worker", [server.address], security())
        client.disconnect(0)
        monkeypatch.setattr(sockets_module, "connect", connect)
        for _ in range(50):
            client.send(0, [b"request"])
        assert len(attempts) == 1
        monkeypatch.undo()
        client.send(0, [b"too early"])
        client._retry_at.clear()  # a while later
        client.send(0, [b"later"])
        assert receive(server)[1] == [b"later"]
        client.close()


def test_a_server_that_cannot_be_reached_at_the_start_is_named() -> None:
    with pytest.raises(JobError, match=r"server 0 cannot be reached at tcp://127\.0\.0\.1:1"):
        ClientSockets("worker", ["tcp://127.0.0.1:1"], security())
