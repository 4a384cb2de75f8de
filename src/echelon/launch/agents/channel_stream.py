"""A byte stream between a launcher and an agent over a connection that has proved the credentials of the job."""

from __future__ import annotations

from echelon.launch.supervision.processes import READ_BYTES
from echelon.transport.admission.channel import Channel

_SEND_BYTES = 1 << 16


class ChannelStream:
    """A channel as a stream of `streams.Stream`."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._returned = b""
        self._unsent = bytearray()
        self._why_ended = "its agent has disconnected"

    def fileno(self) -> int:
        """Return the connection's number."""
        return self._channel.fileno()

    def peer(self) -> str:
        """Return the address of the other side."""
        return str(self._channel.socket.getpeername()[0])

    def read(self) -> bytes | None:
        """Return bytes that have arrived, None if there are none, or b"" if the other side has ended."""
        if self._returned:
            data, self._returned = self._returned, b""
            return data
        buffer = bytearray(READ_BYTES)
        try:
            return bytes(buffer[: self._channel.recv_into(memoryview(buffer))])
        except BlockingIOError:
            return None
        except OSError as error:
            self._why_ended = f"the connection to its agent broke: {error}"
            return b""

    def unread(self, data: bytes) -> None:
        """Let `read` return these bytes again."""
        self._returned = data + self._returned

    def write(self, data: bytes) -> None:
        """Send bytes, or keep them for later."""
        self._unsent += data
        self.flush()

    def flush(self) -> None:
        """Send what is left of earlier calls of `write`."""
        try:
            while self._unsent:  # after BlockingIOError the same bytes come first again, as a channel requires
                del self._unsent[: self._channel.sendmsg([memoryview(bytes(self._unsent[:_SEND_BYTES]))])]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent.clear()  # `read` finds the reason

    @property
    def unsent(self) -> int:
        """How many bytes wait to be sent."""
        return len(self._unsent)

    def why_ended(self) -> str:
        """Say why the other side has ended."""
        return self._why_ended

    def close(self) -> None:
        """Close the connection. A second call does nothing."""
        self._channel.close()
