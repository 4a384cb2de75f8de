"""Opening and accepting connections that prove the job's credentials. The shell around `handshake`.

A client calls `connect`, which blocks until the connection is proved. A process that listens has an `Admission`, which
registers itself and the connections that are not proved yet with the process's selector:

    admission = Admission(listener, security, selector, Strangers("scheduler"))
    for key, _ in selector.select(timeout):
        if isinstance(key.data, Admission | Unproven):
            channel = admission.advance(key.data)
            if channel is not None:  # proved, and not registered with the selector any more
                selector.register(channel, selectors.EVENT_READ, …)
    admission.expire()  # at least every second

Bytes of messages may follow the handshake at once: read a new channel without waiting for the selector.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import secrets
import select
import selectors
import socket
import ssl
import sys
import time
from contextlib import ExitStack, suppress

from echelon.environment import CREDENTIALS, CREDENTIALS_FILE
from echelon.errors import JobError
from echelon.observe.events import EventLog
from echelon.transport.admission.channel import Channel, PlainChannel, TlsChannel
from echelon.transport.admission.credentials import Security
from echelon.transport.admission.handshake import (
    NONCE_BYTES,
    OTHER_CREDENTIALS,
    ClientHandshake,
    HandshakeError,
    Mode,
    ServerHandshake,
    State,
    Verdict,
)
from echelon.transport.liveness import send_probes

HANDSHAKE_S = 10.0
MAX_UNPROVEN = 256
REPORT_S = 10.0
_OUT_OF_FILES = (errno.EMFILE, errno.ENFILE)


class ConnectionRefused(JobError):
    """The other side is not of this job, or it does not take this process for one of its job. Retrying is useless."""

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason or message  # without advice


class Unproven:
    """A connection during its handshake."""

    def __init__(
        self, connected: socket.socket, handshake: ClientHandshake | ServerHandshake, security: Security
    ) -> None:
        connected.setblocking(False)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        send_probes(connected)
        self.deadline = time.monotonic() + HANDSHAKE_S
        self.peer = str(connected.getpeername()[0])
        self._handshake = handshake
        self._security = security
        self._channel: PlainChannel | TlsChannel = PlainChannel(connected)
        self._outgoing = memoryview(handshake.hello if isinstance(handshake, ClientHandshake) else b"")
        self._incoming = b""

    def fileno(self) -> int:
        """Return the number that selectors use."""
        return self._channel.fileno()

    def advance(self) -> Channel | None:
        """Continue the handshake; return the channel if it is complete, or None if the other side has to act.

        Raises HandshakeError, and OSError if the connection breaks.
        """
        try:
            while True:
                while self._outgoing:
                    self._outgoing = self._outgoing[self._channel.sendmsg([self._outgoing]) :]
                if self._handshake.state is State.DONE:
                    return self._channel
                if self._handshake.state is State.TLS:
                    self._start_tls().handshake()
                    self._outgoing = memoryview(self._handshake.tls_complete())
                else:
                    self._receive()
        except BlockingIOError:
            return None
        except ssl.SSLError as error:
            raise HandshakeError(f"{OTHER_CREDENTIALS} (TLS: {error.reason or error})") from error
        except HandshakeError as error:
            with suppress(OSError):
                self._channel.socket.send(error.answer)
            raise

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    def _start_tls(self) -> TlsChannel:
        if not isinstance(self._channel, TlsChannel):
            security, is_server = self._security, isinstance(self._handshake, ServerHandshake)
            assert security.credentials is not None
            context = security.server_context if is_server else security.client_context
            self._channel = TlsChannel(self._channel.socket, context, security.credentials.certificate, is_server)
        return self._channel

    def _receive(self) -> None:
        part = bytearray(self._handshake.needed - len(self._incoming))
        count = self._channel.recv_into(memoryview(part))
        if not count:
            raise ConnectionResetError("it closed the connection before it had proved the credentials of the job")
        self._incoming += part[:count]
        if len(self._incoming) == self._handshake.needed:
            self._outgoing = memoryview(self._handshake.receive(self._incoming))
            self._incoming = b""


def connect(address: tuple[str, int], security: Security, timeout_s: float) -> Channel:
    """Return a proved connection to a process of the job.

    Raises ConnectionRefused if the process there is not of this job, and OSError if it cannot be reached.
    """
    try:
        try:
            return _connect(address, security, timeout_s, allow_local=True)
        except _NotOnOneMachine:  # as the server sees it, for example through a forwarded port
            return _connect(address, security, timeout_s, allow_local=False)
    except HandshakeError as error:
        raise ConnectionRefused(_explain(address, error), str(error)) from error


class _NotOnOneMachine(HandshakeError):
    """The server does not accept that both sides are on one machine."""


def _connect(address: tuple[str, int], security: Security, timeout_s: float, *, allow_local: bool) -> Channel:
    with ExitStack() as undo:
        connected = undo.enter_context(socket.create_connection(address, timeout_s))
        own, peer = connected.getsockname()[:2], connected.getpeername()[:2]
        mode = choose_mode(security, own[0], peer[0], allow_local=allow_local)
        handshake = ClientHandshake(mode, security.secret, f"{own} {peer}", secrets.token_bytes(NONCE_BYTES))
        unproven = Unproven(connected, handshake, security)
        undo.callback(unproven.close)
        try:
            channel = _complete(unproven, min(timeout_s, HANDSHAKE_S))
        except HandshakeError as error:
            if mode is Mode.LOCAL and error.verdict is Verdict.MODE_REFUSED:
                raise _NotOnOneMachine(str(error)) from error
            raise
        undo.pop_all()
        return channel


def _complete(unproven: Unproven, timeout_s: float) -> Channel:
    deadline = time.monotonic() + timeout_s
    poll = select.poll()
    poll.register(unproven.fileno(), select.POLLIN)
    while (channel := unproven.advance()) is None:
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1e3):
            raise TimeoutError(f"it accepts connections, but did not answer within {timeout_s:g} s")
    return channel


def _explain(address: tuple[str, int], error: HandshakeError) -> str:
    advice = ""
    if OTHER_CREDENTIALS in str(error):
        advice = (
            "; all processes of a job need the same credentials: start them with one launcher, or copy "
            f"~/.config/echelon/credentials to every machine, or set {CREDENTIALS_FILE} or {CREDENTIALS}"
        )
    return f"no connection to {address[0]}:{address[1]}: {error}{advice}"


def choose_mode(security: Security, own: str, peer: str, *, allow_local: bool = True) -> Mode:
    """Return the mode of a connection that this process opens, given the IP addresses of its two ends."""
    if security.policy == "none":
        return Mode.NONE
    if allow_local and on_one_machine(own, peer):
        return Mode.LOCAL
    return Mode.PROOF if security.policy == "proof" else Mode.TLS


def allowed_modes(security: Security, own: str, peer: str) -> frozenset[Mode]:
    """Return the modes in which this process accepts a connection, given the IP addresses of its two ends."""
    if security.policy == "none":
        return frozenset([Mode.NONE])
    modes = {Mode.TLS}
    if on_one_machine(own, peer):
        modes.add(Mode.LOCAL)
    if security.policy == "proof":
        modes.add(Mode.PROOF)
    return frozenset(modes)


def on_one_machine(own: str, peer: str) -> bool:
    """Return whether the two ends of a connection are on one machine, given their IP addresses."""
    return own == peer or (ipaddress.ip_address(own).is_loopback and ipaddress.ip_address(peer).is_loopback)


class Strangers:
    """Counts the connections that a process has refused, and reports the first one. `who` names the process."""

    def __init__(self, who: str, events: EventLog | None = None) -> None:
        self.who = who
        self.events = events
        self.count = 0
        self._next_event = 0.0

    def add(self, address: str, reason: str) -> None:
        """Count a refused connection."""
        self.count += 1
        if self.count == 1:
            print(
                f"{self.who} refused a connection from {address}: {reason} (others are only counted)",
                file=sys.stderr,
                flush=True,
            )
        now = time.monotonic()
        if self.events is not None and now >= self._next_event:
            self._next_event = now + REPORT_S
            self.events.write("stranger", address=address, reason=reason, count=self.count)


class Admission:
    """Accepts the connections of a listener, and passes on those that prove the credentials of the job.

    At most MAX_UNPROVEN connections wait for their proof; beyond that, the oldest one is closed.
    """

    def __init__(
        self, listener: socket.socket, security: Security, selector: selectors.BaseSelector, strangers: Strangers
    ) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._security = security
        self._selector = selector
        self._unproven: dict[Unproven, None] = {}  # the oldest first
        self._spare_file = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self.strangers = strangers
        selector.register(listener, selectors.EVENT_READ, self)

    @property
    def num_unproven(self) -> int:
        """How many connections have not proved the credentials yet."""
        return len(self._unproven)

    def advance(self, source: Admission | Unproven) -> Channel | None:
        """Handle what the selector reports: accept a connection, or continue a handshake. Return a proved channel."""
        unproven = self._accept() if isinstance(source, Admission) else source
        if unproven is None or unproven not in self._unproven:  # closed meanwhile
            return None
        try:
            channel = unproven.advance()
        except HandshakeError as error:
            self._refuse(unproven, str(error))
        except OSError:  # it has given up, for example because this process was not ready to answer in time
            self._forget(unproven)
            unproven.close()
        else:
            if channel is not None:
                self._forget(unproven)
            return channel
        return None

    def expire(self) -> None:
        """Refuse the connections that have not proved the credentials in time."""
        now = time.monotonic()
        for unproven in [one for one in self._unproven if one.deadline < now]:
            self._refuse(unproven, f"it did not prove the credentials of the job within {HANDSHAKE_S:g} s")

    def close(self) -> None:
        """Close the listener and all connections that are not proved."""
        for unproven in list(self._unproven):
            self._forget(unproven)
            unproven.close()
        self._selector.unregister(self._listener)
        self._listener.close()
        os.close(self._spare_file)

    def _accept(self) -> Unproven | None:
        try:
            connected = self._listener.accept()[0]
        except OSError as error:
            if error.errno in _OUT_OF_FILES:
                self._make_room()
            return None  # or the client has closed the connection again
        try:
            own, peer = connected.getsockname()[:2], connected.getpeername()[:2]
            modes = allowed_modes(self._security, own[0], peer[0])
            nonce = secrets.token_bytes(NONCE_BYTES)
            unproven = Unproven(
                connected, ServerHandshake(modes, self._security.secret, f"{peer} {own}", nonce), self._security
            )
        except OSError:
            connected.close()
            return None
        if len(self._unproven) >= MAX_UNPROVEN:
            self._refuse_oldest(f"{MAX_UNPROVEN} newer connections wait for their proof, too")
        self._unproven[unproven] = None
        self._selector.register(unproven, selectors.EVENT_READ, unproven)
        return unproven

    def _make_room(self) -> None:
        """Without a file number for the next connection: close the oldest unproven one, or else the next one itself."""
        if self._unproven:
            self._refuse_oldest("this process has too many open files")
            return
        os.close(self._spare_file)
        try:
            connected, address = self._listener.accept()
            connected.close()
            self.strangers.add(str(address[0]), "this process has too many open files (ulimit -n)")
        except OSError:
            pass
        finally:
            self._spare_file = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _refuse_oldest(self, reason: str) -> None:
        self._refuse(next(iter(self._unproven)), reason)

    def _refuse(self, unproven: Unproven, reason: str) -> None:
        self._forget(unproven)
        unproven.close()
        self.strangers.add(unproven.peer, reason)

    def _forget(self, unproven: Unproven) -> None:
        del self._unproven[unproven]
        self._selector.unregister(unproven)
