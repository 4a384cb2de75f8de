"""Endpoints on plain TCP sockets: messages of frames, sent from where they lie and received where they belong.

A message is a count of frames, their sizes, and their bytes. `send` hands the kernel what it takes at once; the rest
leaves from a thread that is started when it is first needed. What arrives is read inside `recv`, by the caller. A
`placer` may say where an incoming message's frames go: bytes then go from the kernel to their final place, with no
copy between.

A connection that breaks is made again by the client's next `send`; what was lost is the caller's to repeat.
"""

from __future__ import annotations

import itertools
import os
import secrets
import select
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from echelon.errors import JobError
from echelon.transport.interface import Buffer, Peer, Placer

BUFFER_BYTES = 4 << 20
CONNECT_S = 30.0
LINGER_S = 2.0
MAX_FRAMES = 1 << 20
MAX_HEAD = 64 << 20
MAX_BYTES = 1 << 38
_MOST_AT_ONCE = 256  # frames in one call of sendmsg; the kernel allows 1024
_COUNT = struct.Struct("!I")


class _Broken(Exception):
    """The connection has ended, or its bytes make no sense."""


class _Connection:
    """One socket and the two half-done messages on it."""

    def __init__(self, connected: socket.socket) -> None:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            connected.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
        connected.setblocking(False)
        self.socket = connected
        self.name: Peer | None = None  # until a client has said who it is
        self.closed = False
        self._outgoing: deque[memoryview] = deque()
        self._out = threading.Lock()
        self._start()

    def _start(self) -> None:
        self._sizes: list[int] | None = None
        self._frames: list[memoryview] = []
        self._target = memoryview(bytearray(_COUNT.size))
        self._filled = 0

    # --- out

    def send(self, frames: Sequence[Buffer]) -> bool:
        """Put a message in line and send what the kernel takes now. False: something is left for `flush`."""
        views = [memoryview(frame) for frame in frames]
        head = struct.pack(f"!I{len(views)}Q", len(views), *(view.nbytes for view in views))
        with self._out:
            waiting = bool(self._outgoing)
            self._outgoing.append(memoryview(head))
            self._outgoing.extend(view.cast("B") for view in views if view.nbytes)
            return False if waiting else self._flush()

    def flush(self) -> bool:
        """Send what the kernel takes now; whether nothing is left."""
        with self._out:
            return self._flush()

    def _flush(self) -> bool:
        while self._outgoing and not self.closed:
            try:
                sent = self.socket.sendmsg(list(itertools.islice(self._outgoing, _MOST_AT_ONCE)))
            except BlockingIOError:
                return False
            except OSError as error:
                self._outgoing.clear()
                raise _Broken(str(error)) from error
            while sent:
                first = self._outgoing[0]
                if sent < len(first):
                    self._outgoing[0] = first[sent:]
                    break
                sent -= len(first)
                self._outgoing.popleft()
        return True

    def close(self, linger_s: float = 0.0) -> None:
        """Close; what is under way has a moment to leave."""
        with self._out:
            try:
                self.socket.settimeout(linger_s)
                while linger_s and self._outgoing and not self.closed:
                    self.socket.sendall(self._outgoing.popleft())
            except OSError:
                pass
            self.closed = True
            self._outgoing.clear()
            self.socket.close()

    # --- in

    def read(self, placer: Placer | None) -> list[memoryview] | None:
        """Read on; the frames of a message when it is complete."""
        while True:
            if self._filled == len(self._target) and (done := self._advance(placer)) is not None:
                self._start()
                return done
            if self._filled == len(self._target):
                continue
            try:
                count = self.socket.recv_into(self._target[self._filled :])
            except BlockingIOError:
                return None
            except OSError as error:
                raise _Broken(str(error)) from error
            if not count:
                raise _Broken("the other side closed the connection")
            self._filled += count

    def _advance(self, placer: Placer | None) -> list[memoryview] | None:
        """The current target is full: go to the next; all frames if there is none."""
        if self._sizes is None:
            if len(self._target) == _COUNT.size and not self._frames:
                (count,) = _COUNT.unpack(self._target)
                if not 0 < count <= MAX_FRAMES:
                    raise _Broken(f"a message of {count} frames")
                self._frames = [memoryview(b"")]  # marks that the sizes come next
                self._aim(memoryview(bytearray(8 * count)))
                return None
            self._sizes = list(struct.unpack(f"!{len(self._target) // 8}Q", self._target))
            if self._sizes[0] > MAX_HEAD or sum(self._sizes) > MAX_BYTES:
                raise _Broken(f"a message of {sum(self._sizes)} bytes")
            self._frames = []
            self._places = [memoryview(bytearray(self._sizes[0]))]
        else:
            self._frames.append(self._target)
            if len(self._frames) == 1:
                self._places += self._placed(placer)
        if len(self._frames) == len(self._sizes):
            return self._frames
        self._aim(self._places[len(self._frames)])
        return None

    def _placed(self, placer: Placer | None) -> list[memoryview]:
        assert self._sizes is not None
        sizes = self._sizes[1:]
        chosen = placer(self._frames[0], sizes) if placer is not None and sizes else None
        if chosen is not None and [len(place) for place in chosen] == sizes:
            return list(chosen)
        return [np.empty(size, np.uint8).data for size in sizes]  # not zeroed, unlike a bytearray

    def _aim(self, target: memoryview) -> None:
        self._target, self._filled = target, 0


class _Flusher:
    """A thread that sends what did not leave at once, on any connection."""

    def __init__(self) -> None:
        self._waiting: set[_Connection] = set()
        self._lock = threading.Lock()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="echelon-flush", daemon=True)
        self._thread.start()

    def add(self, connection: _Connection) -> None:
        """Take over a connection until all of its messages have left."""
        with self._lock:
            self._waiting.add(connection)
        os.eventfd_write(self._wake, 1)

    def stop(self) -> None:
        """End the thread."""
        self._stopping = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        os.close(self._wake)

    def _run(self) -> None:
        while not self._stopping:
            with self._lock:
                waiting = {c.socket.fileno(): c for c in self._waiting if not c.closed}
            poll = select.poll()
            poll.register(self._wake, select.POLLIN)
            for number in waiting:
                poll.register(number, select.POLLOUT)
            for number, _ in poll.poll():
                if number == self._wake:
                    os.eventfd_read(self._wake)
                else:
                    self._flush(waiting[number])

    def _flush(self, connection: _Connection) -> None:
        try:
            done = connection.flush()
        except _Broken:  # its reader will see that too
            done = True
        if done:
            with self._lock:
                self._waiting.discard(connection)


class _Sockets:
    """A set of connections and an eventfd that wakes whoever waits for them."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector.register(self._wake, selectors.EVENT_READ, None)
        self._messages: deque[tuple[Peer, list[memoryview]]] = deque()
        self._flusher: _Flusher | None = None
        self.placer: Placer | None = None

    def recv(self, timeout_s: float) -> tuple[Peer, list[memoryview]] | None:
        """The next message, or None when the time is up or `wake` was called."""
        deadline = time.monotonic() + timeout_s
        while not self._messages:
            ready = self._selector.select(max(0.0, deadline - time.monotonic()))
            woken = False
            for key, _ in ready:
                if key.data is None:
                    woken = self._awake()
                else:
                    self._serve(key.data)
            if not self._messages and (woken or not ready or time.monotonic() >= deadline):
                return None
        return self._messages.popleft()

    def wake(self) -> None:
        """Make a waiting recv return None."""
        os.eventfd_write(self._wake, 1)

    def _awake(self) -> bool:
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            return False
        return True

    def _serve(self, source: Any) -> None:
        """A socket has something to read."""
        connection: _Connection = source
        try:
            while (frames := connection.read(self.placer)) is not None:
                self._take(connection, frames)
        except _Broken:
            self._drop(connection)

    def _take(self, connection: _Connection, frames: list[memoryview]) -> None:
        assert connection.name is not None
        self._messages.append((connection.name, frames))

    def _add(self, connection: _Connection) -> None:
        self._selector.register(connection.socket, selectors.EVENT_READ, connection)

    def _send(self, connection: _Connection, frames: Sequence[Buffer]) -> None:
        if not connection.send(frames):
            self._flusher = self._flusher or _Flusher()
            self._flusher.add(connection)

    def _drop(self, connection: _Connection) -> None:
        self._selector.unregister(connection.socket)
        connection.close()

    def _close(self, connections: Sequence[_Connection]) -> None:
        if self._flusher is not None:
            self._flusher.stop()
        for connection in connections:
            connection.close(LINGER_S)
        self._selector.close()
        os.close(self._wake)
        self._messages.clear()


class ServerSockets(_Sockets):
    """A server's end: a listening socket and a connection a client."""

    def __init__(self, host: str) -> None:
        super().__init__()
        self._listener = socket.create_server(("", 0), backlog=128)
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, self._listener)
        self._clients: dict[Peer, _Connection] = {}
        self._strangers: list[_Connection] = []
        self.address = f"tcp://{host}:{self._listener.getsockname()[1]}"

    def send(self, peer: Peer, frames: Sequence[Buffer]) -> None:
        """Answer a client; one that is gone is not told."""
        connection = self._clients.get(peer)
        if connection is not None:
            try:
                self._send(connection, frames)
            except _Broken:
                self._drop(connection)

    def close(self) -> None:
        """Let everything go."""
        self._listener.close()
        self._close([*self._clients.values(), *self._strangers])

    def _serve(self, source: Any) -> None:
        if source is not self._listener:
            super()._serve(source)
            return
        try:
            connection = _Connection(self._listener.accept()[0])
        except OSError:
            return  # it changed its mind
        self._strangers.append(connection)
        self._add(connection)

    def _take(self, connection: _Connection, frames: list[memoryview]) -> None:
        if connection.name is not None:
            super()._take(connection, frames)
            return
        connection.name = bytes(frames[0])  # a client's first message is its name
        self._strangers.remove(connection)
        self._clients[connection.name] = connection

    def _drop(self, connection: _Connection) -> None:
        if connection in self._strangers:
            self._strangers.remove(connection)
        elif connection.name is not None and self._clients.get(connection.name) is connection:
            del self._clients[connection.name]
        super()._drop(connection)


class ClientSockets(_Sockets):
    """A client's end; its name is made unique so that a reborn process is not taken for the dead one."""

    address = ""

    def __init__(self, name: str, addresses: Sequence[str]) -> None:
        super().__init__()
        self._name = f"{name}.{secrets.token_hex(4)}".encode()
        self._addresses = list(addresses)
        self._servers: dict[Peer, _Connection] = {}
        for server, address in enumerate(addresses):
            try:
                self._connect(server, CONNECT_S)
            except (OSError, _Broken) as error:
                self.close()
                raise JobError(f"server {server} cannot be reached at {address}: {error}") from error

    def send(self, peer: Peer, frames: Sequence[Buffer]) -> None:
        """Send a request to a server; if it cannot be reached now, the message is lost and may be repeated."""
        try:
            if peer not in self._servers:
                self._connect(peer, 1.0)
            self._send(self._servers[peer], frames)
        except _Broken:
            self._drop(self._servers[peer])
        except OSError:
            pass

    def close(self) -> None:
        """Let everything go."""
        self._close(list(self._servers.values()))

    def _connect(self, server: Peer, timeout_s: float) -> None:
        assert isinstance(server, int)
        host, _, port = self._addresses[server].removeprefix("tcp://").rpartition(":")
        connection = _Connection(socket.create_connection((host, int(port)), timeout_s))
        connection.name = server
        self._servers[server] = connection
        self._add(connection)
        self._send(connection, [self._name])

    def _drop(self, connection: _Connection) -> None:
        if connection.name is not None and self._servers.get(connection.name) is connection:
            del self._servers[connection.name]
        super()._drop(connection)
