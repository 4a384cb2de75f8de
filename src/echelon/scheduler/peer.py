"""One connection of the scheduler: bounded in what it keeps, in what it sends, and in how fast it may send."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from echelon.cluster.messages import FromProcess, Halt, StoreClosed, StoreEnding, decode_from_process
from echelon.errors import JobError
from echelon.transport.admission.channel import Channel
from echelon.transport.framing import FrameReader

MAX_FRAME = 256 << 10  # of messages to the scheduler; a process that returns lists the members, 90 bytes each
READ_BYTES = 16 << 10
TURN_MESSAGES = 100  # that are handled before other connections have their turn
RATE = 10_000.0  # units that a connection may spend per second; `cost` says what a message costs
BURST = 20_000.0
REST_S = 0.05  # at least, once a connection has spent its units
MEMBER_QUEUE = 4 << 20  # bytes that may wait for a process of the job
OTHER_QUEUE = 64 << 10
_FORWARDED = (Halt, StoreClosed, StoreEnding)  # one worker alone makes the scheduler send these to all
_buffer = memoryview(bytearray(READ_BYTES))  # one is enough: its bytes are copied at once


class PeerError(JobError):
    """Why a connection has to end."""


def cost(message: FromProcess, num_bytes: int) -> float:
    """Return what a message costs its sender, by its size and by the work of the processes that receive it."""
    return (1 + num_bytes / 256) * (20 if isinstance(message, _FORWARDED) else 1)


class Peer:
    """A connection, the bytes of incomplete messages, and the messages that wait to be sent."""

    def __init__(self, number: int, channel: Channel, now: float) -> None:
        self.number = number
        self.channel = channel
        self.joined = False  # it is or was a process of the job
        self.watched = 0  # the events that the selector reports
        self.resumes_at: float | None = None  # when to read again; None: when the selector reports bytes
        self._reader = FrameReader(decode_from_process, MAX_FRAME)
        self._outgoing: deque[memoryview] = deque()
        self._num_queued = 0
        self._stuck_since: float | None = None  # since when no queued byte could be sent
        self._last_received = now
        self._units = BURST
        self._units_at = now

    @property
    def has_output(self) -> bool:
        """Whether messages wait to be sent."""
        return bool(self._outgoing)

    def receive(self, now: float) -> Iterator[FromProcess]:
        """Yield the messages of this turn, and set when the next turn is. Raises Malformed, PeerError and OSError."""
        self._units = min(BURST, self._units + (now - self._units_at) * RATE)
        self._units_at = now
        for _ in range(TURN_MESSAGES):
            if self._units <= 0:
                break
            while (message := self._reader.next()) is None:
                if not self._read(now):
                    self.resumes_at = None
                    return
            self._units -= cost(message, self._reader.num_bytes)
            yield message
        self.resumes_at = now if self._units > 0 else now + max(REST_S, -self._units / RATE)

    def _read(self, now: float) -> bool:
        """Read some bytes. Return False if none has arrived."""
        try:
            count = self.channel.recv_into(_buffer)
        except BlockingIOError:
            return False
        if not count:
            raise PeerError("its connection closed")
        self._last_received = now
        self._reader.add(_buffer[:count])
        return True

    def queue(self, data: bytes, now: float) -> None:
        """Send a message, or keep it until the other side reads. Raises PeerError and OSError."""
        self._outgoing.append(memoryview(data))
        self._num_queued += len(data)
        self.flush(now)
        if self._num_queued > (MEMBER_QUEUE if self.joined else OTHER_QUEUE):
            raise PeerError(f"it does not read: {self._num_queued} bytes wait for it")

    def flush(self, now: float) -> None:
        """Send what the kernel accepts now. Raises OSError."""
        while self._outgoing:
            try:
                sent = self.channel.sendmsg([self._outgoing[0]])
            except BlockingIOError:
                self._stuck_since = self._stuck_since or now
                return
            self._num_queued -= sent
            self._stuck_since = None
            if sent == len(self._outgoing[0]):
                self._outgoing.popleft()
            else:
                self._outgoing[0] = self._outgoing[0][sent:]

    def dead_because(self, now: float, timeout_s: float) -> str | None:
        """Return why the process counts as dead, or None. While the scheduler itself does not read, it is alive."""
        silent = now - self._last_received
        if silent > timeout_s and self.resumes_at is None:
            return f"no message for {silent:.1f} s"
        if self._stuck_since is not None and now - self._stuck_since > timeout_s:
            return f"it has not read the scheduler's messages for {now - self._stuck_since:.1f} s"
        return None
