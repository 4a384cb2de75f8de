"""The transport over TCP: a server's endpoint accepts clients, a client's endpoint connects to all servers.

`send` gives the kernel what it accepts at once; a thread, started when it is first needed, sends the rest. Messages are
received inside `recv`, on the caller's thread (`connection.py`). The client's next `send` restores a broken connection;
the caller retries lost messages.

Both sides of a connection have proved the job's credentials before its first message (`admission.py`). In that message
the client says its own name and which server it wants. A client that connects again says the same name, and its new
connection takes the place of the old one.
"""

from __future__ import annotations

import os
import secrets
import select
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from echelon.environment import Job
from echelon.errors import JobError
from echelon.transport.admission.admission import ConnectionRefused, Strangers, connect
from echelon.transport.admission.admission_thread import AdmissionThread
from echelon.transport.admission.channel import Channel
from echelon.transport.admission.credentials import Security
from echelon.transport.connection import MAX_HEAD, MAX_NAME, Connection, ConnectionBroken
from echelon.transport.interface import (
    CONNECT_S,
    Block,
    Buffer,
    Endpoint,
    FramesDeferred,
    FramesRefused,
    Peer,
    Placer,
    Traffic,
    private_memory,
)
from echelon.transport.listening import listen
from echelon.transport.outbox import Precedence

RECONNECT_S = 1.0  # for an attempt to connect again, and after one that failed, before the next one
LINGER_S = 2.0
STALLED_S = 60.0  # after which a server ends a connection that is stuck in the middle of a message
CHECK_S = 1.0  # how often an endpoint looks for such connections, and for half-open ones
MAX_WAITING_BYTES = 64 << 20  # of answers to one client: a server reads no requests of a client that has more,
RESUME_BYTES = 32 << 20  # until it has read so many that this is left
_TURN_MESSAGES = 64  # read from one connection before the others have their turn


class _Flusher:
    """A thread that sends, on any connection, what the kernel did not accept at once."""

    def __init__(self, on_drained: Callable[[], None]) -> None:
        """`on_drained` is called when few bytes are left of a connection that was paused."""
        self._on_drained = on_drained
        self._waiting: set[Connection] = set()
        self._lock = threading.Lock()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="echelon-flush", daemon=True)
        self._thread.start()

    def add(self, connection: Connection) -> None:
        """Send the waiting messages of a connection until none is left."""
        with self._lock:
            self._waiting.add(connection)
        os.eventfd_write(self._wake, 1)

    def stop(self) -> None:
        """Stop the thread."""
        self._stopping = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        os.close(self._wake)

    def _run(self) -> None:
        while not self._stopping:
            with self._lock:
                self._waiting = {connection for connection in self._waiting if not connection.closed}
                waiting = {connection.fileno(): connection for connection in self._waiting}
            poll = select.poll()
            poll.register(self._wake, select.POLLIN)
            for number in waiting:
                poll.register(number, select.POLLOUT)
            for number, _ in poll.poll():
                if number == self._wake:
                    os.eventfd_read(self._wake)
                else:
                    self._flush(waiting[number])

    def _flush(self, connection: Connection) -> None:
        try:
            done = connection.flush()
        except ConnectionBroken:  # the reader of this connection gets the error, too
            done = True
        if connection.is_paused and connection.waiting_bytes <= RESUME_BYTES:
            self._on_drained()
        if done:
            with self._lock:
                self._waiting.discard(connection)


class _Sockets:
    """A set of connections, and an eventfd that wakes the thread that waits for them."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector.register(self._wake, selectors.EVENT_READ, None)
        self._messages: deque[tuple[Peer, list[memoryview]]] = deque()
        self._unread: list[Connection] = []  # whose turn ended before all of their bytes were read
        self._connections: dict[Peer, Connection] = {}  # by name
        self._flusher: _Flusher | None = None
        self._checked_at = 0.0  # when the connections were last checked
        self.placer: Placer | None = None
        self.traffic = Traffic()
        self.broken: set[Peer] = set()

    def recv(self, timeout_s: float) -> tuple[Peer, list[memoryview]] | None:
        """Return the next message, or None when the time is up, `wake` was called, or a connection broke."""
        now, num_broken = time.monotonic(), len(self.broken)
        deadline = now + timeout_s
        if now - self._checked_at >= CHECK_S:
            self._check_connections(now)
        while not self._messages:
            unread, self._unread = self._unread, []
            ready = self._selector.select(0.0 if unread else max(0.0, deadline - time.monotonic()))
            woken = False
            for source in {id(one): one for one in (*(key.data for key, _ in ready), *unread)}.values():
                if source is None:
                    woken = self._clear_wake()
                else:
                    self._read(source)
            is_over = woken or len(self.broken) > num_broken or not (ready or unread) or time.monotonic() >= deadline
            if not self._messages and is_over:
                return None
        peer, frames = self._messages.popleft()
        self.traffic.queued -= sum(map(len, frames))
        return peer, frames

    def wake(self) -> None:
        """Make a waiting `recv` return None."""
        os.eventfd_write(self._wake, 1)

    def _check_connections(self, now: float) -> None:
        """End the connections over which nothing can arrive any more."""
        self._checked_at = now
        for connection in list(self._connections.values()):
            if connection.is_half_open():
                self._drop(connection)

    def _clear_wake(self) -> bool:
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            return False
        return True

    def _read(self, source: Any) -> None:
        """Read the complete messages of a connection, as many as fit one turn."""
        connection: Connection = source
        if connection.closed:
            return  # it was dropped while it waited for its turn
        try:
            for _ in range(_TURN_MESSAGES):
                frames = connection.read(self.placer)
                if frames is None:
                    break
                self._receive(connection, frames)
                if connection.num_received == 1:
                    break  # the caller may have to know the first message to place the frames of the next one
            if frames is not None or connection.reader.interrupted:
                self._unread.append(connection)
        except FramesDeferred:
            self._defer(connection)
        except (ConnectionBroken, FramesRefused):
            self._drop(connection)

    def _defer(self, connection: Connection) -> None:
        raise NotImplementedError  # only the placers of servers defer

    def _receive(self, connection: Connection, frames: list[memoryview]) -> None:
        assert connection.name is not None
        connection.num_received += 1
        self._messages.append((connection.name, frames))
        self.traffic.queued += sum(map(len, frames))

    def _add(self, connection: Connection) -> None:
        self._selector.register(connection, selectors.EVENT_READ, connection)

    def _send(self, connection: Connection, frames: Sequence[Buffer], precedence: Precedence | None = None) -> None:
        if not connection.send(frames, precedence):
            self._flusher = self._flusher or _Flusher(self.wake)
            self._flusher.add(connection)

    def disconnect(self, peer: Peer) -> None:
        """End the connection of a peer, if there is one."""
        connection = self._connections.get(peer)
        if connection is not None:
            self._drop(connection)

    def _drop(self, connection: Connection) -> None:
        if not connection.closed:
            if connection.name is not None and self._connections.get(connection.name) is connection:
                del self._connections[connection.name]
            self._selector.unregister(connection)
            connection.close()

    def _close(self, connections: Sequence[Connection]) -> None:
        if self._flusher is not None:
            self._flusher.stop()
        deadline = time.monotonic() + LINGER_S
        for connection in connections:
            connection.close(max(0.0, deadline - time.monotonic()))
        self._selector.close()
        os.close(self._wake)
        self._messages.clear()


class ServerSockets(_Sockets):
    """A server's endpoint: a listening socket and one connection per client."""

    def __init__(self, host: str, security: Security) -> None:
        super().__init__()
        listener = listen(host)
        self.address = f"tcp://{host}:{listener.getsockname()[1]}"
        self.strangers = Strangers(f"the server at {self.address}")
        self._admission = AdmissionThread(listener, security, self.strangers)
        self._selector.register(self._admission, selectors.EVENT_READ, self._admission)
        self._unnamed: list[Connection] = []  # clients that have not sent their name yet
        self._paused: list[Connection] = []  # that are not read, because they do not read their answers
        self._deferred: list[Connection] = []  # that are not read, because there is no room for their next frames

    def recv(self, timeout_s: float) -> tuple[Peer, list[memoryview]] | None:
        """Return the next message, or None when the time is up or `wake` was called."""
        if self._paused:
            self._resume_drained()
        if self._deferred:
            self._retry_deferred()
        return super().recv(timeout_s)

    def send(self, peer: Peer, frames: Sequence[Buffer], precedence: Precedence | None = None) -> None:
        """Answer a client. A message to a client that has disconnected is dropped."""
        connection = self._connections.get(peer)
        if connection is not None:
            try:
                self._send(connection, frames, precedence)
            except ConnectionBroken:
                self._drop(connection)

    def redirect(self, peer: Peer, address: str) -> None:
        """Do nothing: clients connect to servers."""

    def close(self) -> None:
        """Close all connections."""
        self._admission.close()
        self._close([*self._connections.values(), *self._unnamed])

    def _read(self, source: Any) -> None:
        if source is self._admission:
            for channel in self._admission.take():
                self._admit(channel)
        elif source.waiting_bytes > MAX_WAITING_BYTES:
            self._pause(source)
        else:
            super()._read(source)

    def _admit(self, channel: Channel) -> None:
        """Read a connection that has proved the credentials of the job. The selector may not report its first bytes."""
        connection = Connection(channel, self.traffic)
        connection.reader.max_head = MAX_NAME
        self._unnamed.append(connection)
        self._add(connection)
        super()._read(connection)

    def _check_connections(self, now: float) -> None:
        """End half-open connections, and those that are stuck in the middle of a message."""
        was_busy = now - self._checked_at > STALLED_S / 2
        super()._check_connections(now)
        for connection in [*self._connections.values(), *self._unnamed]:
            if was_busy:  # this process has not read for a while, so the other side may have made progress
                connection.received_at = connection.sent_at = now
            elif connection.is_stalled(now, STALLED_S):
                self._drop(connection)

    def _pause(self, connection: Connection) -> None:
        """Read no more requests of a client that does not read its answers."""
        if not connection.is_paused:
            connection.is_paused = True
            self._selector.unregister(connection)
            self._paused.append(connection)

    def _resume_drained(self) -> None:
        for connection in [one for one in self._paused if one.waiting_bytes <= RESUME_BYTES]:
            self._resume(connection)
            self._unread.append(connection)

    def _defer(self, connection: Connection) -> None:
        """Do not read a connection until its placer has room for the frames of its next message."""
        if not connection.is_paused:
            connection.is_paused = True
            self._selector.unregister(connection)
        if connection not in self._deferred:
            self._deferred.append(connection)

    def _retry_deferred(self) -> None:
        waiting, self._deferred = self._deferred, []
        for connection in waiting:
            if connection.closed:
                continue
            if connection.waiting_bytes > MAX_WAITING_BYTES:
                self._deferred.append(connection)
                continue
            super()._read(connection)
            if not connection.closed and connection not in self._deferred:
                connection.is_paused = False
                self._add(connection)

    def _resume(self, connection: Connection) -> None:
        connection.is_paused = False
        self._paused.remove(connection)
        self._add(connection)

    def _receive(self, connection: Connection, frames: list[memoryview]) -> None:
        if connection.name is not None:
            super()._receive(connection, frames)
            return
        name, _, wanted = bytes(frames[0]).partition(b" ")
        if wanted.decode(errors="replace") != self.address:
            raise ConnectionBroken(f"this is the server at {self.address}, not {wanted!r}")
        connection.name = name
        connection.reader.max_head = MAX_HEAD
        self._unnamed.remove(connection)
        if before := self._connections.get(connection.name):
            self._drop(before)  # the client has connected again
        self._connections[connection.name] = connection

    def _drop(self, connection: Connection) -> None:
        if connection in self._unnamed:
            self._unnamed.remove(connection)
        if connection in self._paused:
            self._resume(connection)
        elif connection.is_paused and not connection.closed:  # deferred
            connection.is_paused = False
            self._add(connection)
        super()._drop(connection)


class ClientSockets(_Sockets):
    """A client's endpoint. Its name has a random part, so that no other process can take its place."""

    address = ""

    def __init__(self, name: str, addresses: Sequence[str], security: Security, wait_s: float = CONNECT_S) -> None:
        """Connect to all servers; with `wait_s` 0, to each one when a message is sent to it."""
        super().__init__()
        self._name = f"{name}.{secrets.token_hex(16)}"
        self._security = security
        self._addresses = list(addresses)
        self._retry_at: dict[Peer, float] = {}  # when to try to connect again to a server that could not be reached
        for server, address in enumerate(addresses if wait_s else ()):
            try:
                self._connect(server, wait_s)
            except (OSError, ConnectionBroken, ConnectionRefused) as error:
                self.close()
                raise JobError(f"server {server} cannot be reached at {address}: {error}") from error

    def send(self, peer: Peer, frames: Sequence[Buffer], precedence: Precedence | None = None) -> None:
        """Send a request to a server. If the server cannot be reached now, the message is lost; the caller retries."""
        try:
            if peer not in self._connections and not self._reconnect(peer):
                return
            self._send(self._connections[peer], frames, precedence)
        except ConnectionBroken:
            self._drop(self._connections[peer])
        except OSError:
            pass

    def redirect(self, peer: Peer, address: str) -> None:
        """Find a server at another address from now on."""
        assert isinstance(peer, int)
        self.disconnect(peer)
        self._addresses[peer] = address
        self._retry_at.pop(peer, None)
        self.broken.discard(peer)

    def _reconnect(self, peer: Peer) -> bool:
        """Try to connect again, unless that has failed just now: a caller with many requests must not try for each."""
        if time.monotonic() < self._retry_at.get(peer, 0.0):
            return False
        try:
            self._connect(peer, RECONNECT_S)
        except OSError:
            self._retry_at[peer] = time.monotonic() + RECONNECT_S
            raise
        return True

    def close(self) -> None:
        """Close all connections."""
        self._close(list(self._connections.values()))

    def _drop(self, connection: Connection) -> None:
        if not connection.closed and connection.name is not None:
            self.broken.add(connection.name)
        super()._drop(connection)

    def _connect(self, server: Peer, timeout_s: float) -> None:
        assert isinstance(server, int)
        host, _, port = self._addresses[server].removeprefix("tcp://").rpartition(":")
        connection = Connection(connect((host, int(port)), self._security, timeout_s), self.traffic)
        connection.name = server
        self._connections[server] = connection
        self._add(connection)
        self._send(connection, [f"{self._name}.{server} {self._addresses[server]}".encode()])


class TcpTransport:
    """The transport across machines: everything is sent as frames.

    Without `security`, connections are protected as the job says that the environment describes.
    """

    name = "tcp"

    def __init__(self, security: Security | None = None) -> None:
        self._given_security = security

    @property
    def _security(self) -> Security:
        return self._given_security or Security.of(Job.from_environment())

    def serve(self, host: str) -> Endpoint:
        """Return a server's endpoint."""
        return ServerSockets(host, self._security)

    def connect(self, name: str, addresses: Sequence[str], wait_s: float = CONNECT_S) -> Endpoint:
        """Return a client's endpoint."""
        return ClientSockets(name, addresses, self._security, wait_s)

    def allocate(self, num_bytes: int) -> Block:
        """Return zeroed private memory."""
        return Block(private_memory(num_bytes))

    def attach(self, descriptor: str) -> memoryview | None:
        """Return None: private memory cannot be attached."""
        return None
