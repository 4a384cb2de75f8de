"""The bytes of a connection, plain or over TLS 1.3. `admission` creates channels whose peers have proved themselves.

A channel never blocks. Over TLS, bytes may be readable although no selector reports it, so read until BlockingIOError,
or as long as `pending()` is not 0. After BlockingIOError, `sendmsg` must be called with the same bytes again, because
TLS may have encrypted and sent a part of them. One thread may read while another one writes.
"""

from __future__ import annotations

import select
import socket
import ssl
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

from echelon.transport.admission.handshake import OTHER_CREDENTIALS, HandshakeError

_TLS_SEND_BYTES = 256 << 10  # encrypted in one call, which holds the lock of the channel


class Channel(Protocol):
    """The bytes of a connection. Errors are BlockingIOError and other OSErrors; receiving 0 bytes means the end."""

    @property
    def socket(self) -> socket.socket:
        """The socket below, for addresses and options."""
        ...

    def fileno(self) -> int:
        """Return the number that selectors use."""
        ...

    def recv_into(self, view: memoryview) -> int:
        """Receive bytes into `view` and return their number."""
        ...

    def sendmsg(self, buffers: Sequence[memoryview]) -> int:
        """Send bytes from the beginning of `buffers` and return their number."""
        ...

    def pending(self) -> int:
        """Return how many bytes can be read although no selector reports them."""
        ...

    def shutdown(self) -> None:
        """End the connection, so that a thread that waits for it wakes up. It still has to be closed."""
        ...

    def close(self) -> None:
        """Close the connection."""
        ...


def send_all(channel: Channel, data: bytes, timeout_s: float) -> None:
    """Send all of `data`; wait up to `timeout_s` for the other side to read."""
    deadline = time.monotonic() + timeout_s
    left = memoryview(data)
    poll = select.poll()
    poll.register(channel.fileno(), select.POLLOUT)
    while left:
        try:
            left = left[channel.sendmsg([left]) :]
        except BlockingIOError:
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1e3):
                raise TimeoutError(f"the other side has read nothing for {timeout_s:g} s") from None


class PlainChannel:
    """A channel without encryption."""

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        self.socket = connected
        self.fileno = connected.fileno
        self.close = connected.close

    def recv_into(self, view: memoryview) -> int:
        """Receive bytes into `view` and return their number."""
        return self.socket.recv_into(view)

    def sendmsg(self, buffers: Sequence[memoryview]) -> int:
        """Send bytes from the beginning of `buffers` and return their number."""
        return self.socket.sendmsg(buffers)

    def pending(self) -> int:
        """Return 0: all bytes are in the kernel."""
        return 0

    def shutdown(self) -> None:
        """End the connection, so that a thread that waits for it wakes up."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)


class TlsChannel:
    """A channel over TLS. Its lock is needed because OpenSSL must not read and write at the same time."""

    def __init__(
        self, connected: socket.socket, context: ssl.SSLContext, certificate: bytes, server_side: bool
    ) -> None:
        connected.setblocking(False)
        self.socket = context.wrap_socket(connected, server_side=server_side, do_handshake_on_connect=False)
        self.fileno = self.socket.fileno
        self.pending = self.socket.pending
        self.close = self.socket.close
        self._certificate = certificate
        self._lock = threading.Lock()
        self._refused: memoryview | None = None  # what has to be sent again

    def handshake(self) -> None:
        """Continue the TLS handshake. Raises BlockingIOError if it is not complete, SSLError or HandshakeError."""
        try:
            self.socket.do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None
        if self.socket.getpeercert(binary_form=True) != self._certificate:
            raise HandshakeError(OTHER_CREDENTIALS)

    def recv_into(self, view: memoryview) -> int:
        """Receive bytes into `view`, at most those of one TLS record, and return their number."""
        with self._lock:
            try:
                return self.socket.recv_into(view)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                raise BlockingIOError from None

    def sendmsg(self, buffers: Sequence[memoryview]) -> int:
        """Send bytes from the beginning of `buffers` and return their number."""
        chunk = self._refused if self._refused is not None else _first_bytes(buffers)
        with self._lock:
            try:
                sent = self.socket.send(chunk)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                self._refused = chunk
                raise BlockingIOError from None
        self._refused = None
        return sent

    def shutdown(self) -> None:
        """End the connection, so that a thread that waits for it wakes up."""
        with suppress(OSError):
            socket.socket.shutdown(self.socket, socket.SHUT_RDWR)  # SSLSocket's own forgets that there was TLS


def _first_bytes(buffers: Sequence[memoryview]) -> memoryview:
    """Return the first bytes of `buffers`: a part of the first one, or several small ones together."""
    first = buffers[0]
    if len(first) >= _TLS_SEND_BYTES or len(buffers) == 1:
        return first[:_TLS_SEND_BYTES]
    size = 0
    for count, buffer in enumerate(buffers):  # noqa: B007  (used after the loop)
        if size + len(buffer) > _TLS_SEND_BYTES:
            break
        size += len(buffer)
    else:
        count = len(buffers)
    return memoryview(b"".join(buffers[:count]))
