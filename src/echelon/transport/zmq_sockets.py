"""Endpoints on ZeroMQ: a ROUTER for a server, one DEALER a server for a client. Frames go out without a copy."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence

import zmq

from echelon.transport.interface import Buffer, Peer

COPY_BELOW = 4096  # for small frames a copy is cheaper than tracking the buffer


class _Sockets:
    """A poll set of sockets plus an eventfd that wakes it."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._context = context
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poller = zmq.Poller()
        self._poller.register(self._wake, zmq.POLLIN)
        self._sockets: list[zmq.Socket[bytes]] = []

    def _add(self, kind: int) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 1000)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.IPV6, 0)
        self._sockets.append(socket)
        self._poller.register(socket, zmq.POLLIN)
        return socket

    def _ready(self, timeout_s: float) -> list[zmq.Socket[bytes]]:
        found = dict(self._poller.poll(max(0, int(timeout_s * 1000))))
        if self._wake in found:
            try:
                os.eventfd_read(self._wake)
            except BlockingIOError:
                pass
        return [socket for socket in self._sockets if socket in found]

    def wake(self) -> None:
        """Make a waiting recv return None."""
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Close the sockets; messages under way have a second to leave."""
        for socket in self._sockets:
            socket.close()
        self._context.term()
        os.close(self._wake)


def _send(socket: zmq.Socket[bytes], frames: Sequence[Buffer]) -> None:
    last = len(frames) - 1
    for index, frame in enumerate(frames):
        more = zmq.SNDMORE if index < last else 0
        socket.send(frame, more, copy=len(frame) < COPY_BELOW)


class ServerSockets(_Sockets):
    """A server's end."""

    def __init__(self, host: str) -> None:
        super().__init__(zmq.Context())
        self._router = self._add(zmq.ROUTER)
        self._router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        port = self._router.bind_to_random_port("tcp://*")
        self.address = f"tcp://{host}:{port}"

    def send(self, peer: Peer, frames: Sequence[Buffer]) -> None:
        """Answer a client."""
        assert isinstance(peer, bytes)
        _send(self._router, [peer, *frames])

    def recv(self, timeout_s: float) -> tuple[Peer, list[memoryview]] | None:
        """The next request."""
        try:
            parts = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            if not self._ready(timeout_s):
                return None
            parts = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
        return parts[0].bytes, [part.buffer for part in parts[1:]]


class ClientSockets(_Sockets):
    """A client's end; its name is made unique so that a reborn process is not taken for the dead one."""

    address = ""

    def __init__(self, name: str, addresses: Sequence[str]) -> None:
        super().__init__(zmq.Context())
        self._pending: list[int] = []
        for address in addresses:
            dealer = self._add(zmq.DEALER)
            dealer.setsockopt(zmq.IDENTITY, f"{name}.{secrets.token_hex(4)}".encode())
            dealer.connect(address)

    def send(self, peer: Peer, frames: Sequence[Buffer]) -> None:
        """Send a request to a server."""
        assert isinstance(peer, int)
        _send(self._sockets[peer], frames)

    def recv(self, timeout_s: float) -> tuple[Peer, list[memoryview]] | None:
        """The next answer, from whichever server."""
        if not self._pending:
            self._pending = [self._sockets.index(socket) for socket in self._ready(timeout_s)]
        if not self._pending:
            return None
        server = self._pending.pop()
        parts = self._sockets[server].recv_multipart(zmq.NOBLOCK, copy=False)
        return server, [part.buffer for part in parts]
