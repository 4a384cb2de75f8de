"""Control connections: length-prefixed messages over TCP, and a connection that ends when its process does.

The kernel closes a killed process's sockets, so the scheduler learns of a death at once and without false alarms;
heartbeats only serve for machines that vanish without a word.
"""

from __future__ import annotations

import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator

from echelon.cluster.messages import ControlMessage, Heartbeat, Malformed, decode_control, encode
from echelon.errors import JobError

HEARTBEAT_S = 1.0
MAX_FRAME = 16 << 20
_LENGTH = struct.Struct("!I")


class FrameReader:
    """Cuts a byte stream into messages, whatever the chunks it comes in."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[ControlMessage]:
        """Take bytes in; give the messages they complete. Raises Malformed at the first bad one."""
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > MAX_FRAME:
                raise Malformed(f"a control frame of {length} bytes; at most {MAX_FRAME} are allowed")
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
            yield decode_control(body)


def frame(message: ControlMessage) -> bytes:
    """A message with its length in front."""
    body = encode(message)
    return _LENGTH.pack(len(body)) + body


def connect(host: str, port: int, deadline_s: float, who: str, stall_seconds: float) -> socket.socket:
    """Connect to the scheduler, which may not be up yet; `who` says every `stall_seconds` that it waits."""
    began = time.monotonic()
    end, tell = began + deadline_s, began + stall_seconds
    while True:
        try:
            connection = socket.create_connection((host, port), timeout=max(0.1, min(5.0, end - time.monotonic())))
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connection
        except OSError as error:
            if time.monotonic() > end:
                raise JobError(
                    f"no scheduler at {host}:{port} after {deadline_s:g} s ({error}); is it started, and are "
                    "DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT right?"
                ) from error
            if time.monotonic() > tell:
                tell += stall_seconds
                waited = time.monotonic() - began
                what = f"{who} has waited {waited:.1f} s for the scheduler at {host}:{port} ({error})"
                print(f"{what}, and waits up to {deadline_s:g} s (ECHELON_TIMEOUT)", file=sys.stderr, flush=True)
            time.sleep(0.05)


class ControlClient:
    """One process's connection to the scheduler. A thread reads it, beats the heart and hands messages on."""

    def __init__(self, connection: socket.socket, on_message: Callable[[ControlMessage], None]) -> None:
        self._socket = connection
        self._on_message = on_message
        self._lock = threading.Lock()
        self._closed = False
        self.lost: str | None = None
        connection.settimeout(HEARTBEAT_S)
        self._thread = threading.Thread(target=self._read, name="echelon-control", daemon=True)
        self._thread.start()

    def send(self, message: ControlMessage) -> None:
        """Send a message; a broken connection is noticed by the reader."""
        with self._lock:
            try:
                self._socket.sendall(frame(message))
            except OSError as error:
                self.lost = self.lost or f"the scheduler is gone: {error}"

    def close(self) -> None:
        """Close the connection and end the thread."""
        self._closed = True
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._socket.close()

    def _read(self) -> None:
        reader = FrameReader()
        try:
            while not self._closed:
                try:
                    data = self._socket.recv(65536)
                except TimeoutError:
                    self.send(Heartbeat())
                    continue
                if not data:
                    break
                for message in reader.feed(data):
                    self._on_message(message)
                self._beat_if_due()
        except (OSError, Malformed) as error:
            self.lost = self.lost or f"the scheduler is gone: {error}"
        if not self._closed:
            self.lost = self.lost or "the scheduler is gone: its connection closed"
            self._on_message(Heartbeat())  # wakes whoever waits, to find `lost`

    _last_beat = 0.0

    def _beat_if_due(self) -> None:
        now = time.monotonic()
        if now - self._last_beat >= HEARTBEAT_S:
            self._last_beat = now
            self.send(Heartbeat())
