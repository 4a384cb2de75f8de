"""A process of the job that an agent has started on another machine, as the launcher sees it."""

from __future__ import annotations

import select
import signal
import time
from collections.abc import Callable

from echelon.errors import JobError
from echelon.launch.agents.messages import (
    ALIVE_S,
    LOST_S,
    Alive,
    Bound,
    CannotStart,
    Ended,
    FromAgent,
    Hello,
    Output,
    Release,
    Signal,
    Started,
    ToAgent,
    decode_from_agent,
    encode,
    explain,
)
from echelon.launch.agents.streams import Stream
from echelon.launch.plan import Address
from echelon.launch.supervision.processes import how_ended
from echelon.transport.framing import FrameReader

CANNOT_RUN, LOST = 127, 255  # exit codes, as shells and ssh have them
READS_AT_ONCE = 8
KILLED_S = 5.0  # to confirm that a process was killed


class RemoteProcess:
    """A process behind an agent. It has no stream until its agent has connected.

    `hello`, `bound` and `pid` are what the agent has said so far. `on_joined` gets notes (`launch.joining`).
    `has_connected`: it has had a stream.
    """

    def __init__(self, name: str, host: str, stream: Stream | None = None) -> None:
        self.name, self.host = name, host
        self.hello: Hello | None = None
        self.bound: Address | None = None
        self.pid: int | None = None
        self.has_reported_end = False  # its agent has said how it ended; otherwise that is not certain
        self.on_joined: Callable[[list[str]], None] = lambda lines: None
        self._stream = stream
        self.has_connected = stream is not None
        self._reader = FrameReader(decode_from_agent)
        self._output = bytearray()
        self._code: int | None = None
        self._how = ""
        self._cpu_ticks = 0
        self._last_received = self._last_sent = time.monotonic()

    @property
    def where(self) -> str:
        """Its number and its host."""
        return f"on {self.host}" if self.pid is None else f"pid {self.pid} on {self.host}"

    def connect(self, stream: Stream, host: str | None = None) -> None:
        """Use the stream of the agent that runs this process. `host`: where it runs, if the launcher did not choose."""
        self._stream, self.has_connected = stream, True
        self.host = host or self.host
        self._last_received = time.monotonic()

    def send(self, message: ToAgent) -> None:
        """Send a message to the agent."""
        if self._stream is not None:
            self._last_sent = time.monotonic()
            self._stream.write(encode(message))

    def tick(self) -> None:
        """Send what is due, and notice an agent that has disappeared. To be called at least once per second."""
        now = time.monotonic()
        if self._stream is None:
            return
        if now - self._last_sent >= ALIVE_S:
            self.send(Alive())
        self._stream.flush()
        if self._code is None and now - self._last_received > LOST_S:
            self.fail(f"was lost: no message from {self.host} for {now - self._last_received:.0f} s", LOST)

    def fail(self, how: str, code: int = CANNOT_RUN) -> None:
        """Record that the process has ended for a reason that is known here."""
        if self._code is None:
            self._code, self._how = code, how

    def fileno(self) -> int | None:
        """Return the stream's file."""
        return None if self._stream is None else self._stream.fileno()

    def read_output(self) -> bytes | None:
        """Read the agent's messages, and return the output among them."""
        self._read()
        if self._output:
            data = bytes(self._output)
            self._output.clear()
            return data
        return None if self._code is None else b""

    def exit_code(self) -> int | None:
        """Return the exit code, or None while the process runs. That of a process that was lost is 255."""
        return self._code

    def how_ended(self) -> str:
        """Say how it ended."""
        return self._how

    def send_signal(self, number: int) -> None:
        """Send a signal to the process, or forget about a process that has not been started yet."""
        if self._code is not None:
            return
        if self.pid is None and number in (signal.SIGTERM, signal.SIGINT, signal.SIGKILL):
            self.fail("was stopped before it started", -number)
        else:
            self.send(Signal(number))

    def reap(self) -> int:
        """Kill the process if it runs, and return its exit code."""
        if self._code is None:
            self.send_signal(signal.SIGKILL)
            deadline = time.monotonic() + KILLED_S
            while self._code is None and self._stream is not None and time.monotonic() < deadline:
                select.select([self._stream], [], [], 0.1)
                self._read()
            self.fail("was killed", -signal.SIGKILL)
        assert self._code is not None
        return self._code

    def close(self) -> None:
        """Kill the process if it runs, and end its agent."""
        self.reap()
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def restarted(self) -> RemoteProcess:
        """Return the next process of the same agent, which has reported the end of this one."""
        other = RemoteProcess(self.name, self.host, self._stream)
        other.hello, other.bound, other._reader = self.hello, self.bound, self._reader
        self._stream = None
        return other

    def release(self) -> None:
        """Let the agent end, because its process is not started again."""
        self.send(Release())

    def cpu_ticks(self) -> int:
        """Return the processor time that the process has used, as its agent said last."""
        return self._cpu_ticks

    def _read(self) -> None:
        """Handle messages that have arrived, but not more at once than leaves time for other processes."""
        for _ in range(READS_AT_ONCE):
            if self._stream is None or self._code is not None or (data := self._stream.read()) is None:
                return
            if not data:
                self.fail(f"{'was lost' if self.hello else 'cannot start'}: {self._stream.why_ended()}", LOST)
                return
            self._last_received = time.monotonic()
            try:
                for message in self._reader.feed(data):
                    self._handle(message)
            except JobError as error:
                self.fail(f"cannot run on {self.host}: {explain(error)}")

    def _handle(self, message: FromAgent) -> None:
        match message:
            case Hello():
                self.hello = message
            case Bound(host, port):
                self.bound = Address(host, port)
            case Started(pid):
                self.pid = pid
            case Output(data):
                self._output += data
            case Alive(ticks, joined):
                self._cpu_ticks = ticks
                if joined:
                    self.on_joined(joined)
            case CannotStart(reason):
                self.fail(f"cannot start: {reason}")
            case Ended(code):
                self.has_reported_end = True
                self.fail(how_ended(code), code)
