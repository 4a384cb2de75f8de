"""The agent: starts one process of a job for a launcher on another machine. `python -m echelon.launch.agents.agent`.

It reads messages from its standard input and writes messages to its standard output (`messages`); the launcher has
started it over ssh or the like. When the process has ended, the launcher may start it again. When the launcher ends,
dies or is silent too long, the agent kills its process.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from echelon.cluster.messages import WORKER, WorkerExited
from echelon.environment import Job
from echelon.errors import EchelonError, JobError, UsageError
from echelon.launch.addresses import announced_address, interface_towards
from echelon.launch.agents.messages import (
    ALIVE_S,
    LOST_S,
    Alive,
    Bind,
    Bound,
    CannotStart,
    Ended,
    FromAgent,
    Hello,
    Output,
    Release,
    ReportExit,
    Signal,
    Start,
    Started,
    ToAgent,
    decode_to_agent,
    encode,
)
from echelon.launch.agents.streams import PipeStream, Stream
from echelon.launch.devices import library_variables
from echelon.launch.joining import JoinedFile
from echelon.launch.plan import SCHEDULER
from echelon.launch.report import report_worker_exit
from echelon.launch.shared_folder import check_mark
from echelon.launch.supervision.processes import READ_BYTES, ChildProcess
from echelon.system import code_digest
from echelon.transport.framing import FrameReader
from echelon.transport.listening import listen

MAX_UNSENT = 1 << 18  # bytes that wait to be sent; with more, the process waits
UNSENT_S = 0.005  # between two attempts to send them
DRAIN_S = 10.0  # for a launcher to take some of the last bytes; one that is gone takes none
MAX_PIPE_BYTES = 1 << 20


class Agent:
    """One agent: its stream to the launcher, and its process once that is started."""

    def __init__(self, stream: Stream, folder: Path, task: int | None = None) -> None:
        """`folder` is for files of the process, `task` the number that the system that started the agent gave it."""
        self._stream = stream
        self._is_task = task is not None
        self._joined = JoinedFile(folder / "joined")
        self._reader = FrameReader(decode_to_agent)
        self._selector = selectors.DefaultSelector()
        self._listener: socket.socket | None = None
        self._process: ChildProcess | None = None
        self._job: Job | None = None
        self._ended = False
        self._output_fd: int | None = None  # while the output is read
        self._output_ended = False
        self._last_received = self._last_sent = time.monotonic()
        self._send(Hello(socket.gethostname(), os.getpid(), code_digest(), task))

    def run(self) -> int:
        """Serve the launcher until it needs this agent no longer, or has ended."""
        self._selector.register(self._stream.fileno(), selectors.EVENT_READ, self._read_launcher)
        try:
            while not self._ended:
                for key, _ in self._selector.select(UNSENT_S if self._stream.unsent else ALIVE_S / 2):
                    key.data()
                self._tick()
            self._drain()
        finally:
            if self._process is not None:
                self._process.close()
            if self._listener is not None:
                self._listener.close()
            self._selector.close()
        return 0

    def handle_signal(self, number: int) -> None:
        """Pass a signal of the system that started this agent on to the process, or end if there is none.

        A server gets none, because it ends when the workers have ended.
        """
        if self._process is None:
            self._ended = True
        elif self._job is not None and self._job.role == WORKER:
            self._process.send_signal(number)

    def _send(self, message: FromAgent) -> None:
        self._last_sent = time.monotonic()
        self._stream.write(encode(message))

    def _tick(self) -> None:
        self._stream.flush()
        self._watch_output(self._stream.unsent < MAX_UNSENT)
        now, notes = time.monotonic(), self._joined.new_lines()
        if notes or now - self._last_sent >= ALIVE_S:
            self._send_alive(notes)
        if now - self._last_received > LOST_S:
            print(f"agent: no message from the launcher for {LOST_S:g} s; its process is killed", file=sys.stderr)
            self._ended = True

    def _send_alive(self, notes: list[str]) -> None:
        self._send(Alive(self._process.cpu_ticks() if self._process else 0, notes))

    def _drain(self) -> None:
        """Send what is left, as long as the launcher takes it."""
        left, deadline = self._stream.unsent, time.monotonic() + DRAIN_S
        while self._stream.unsent and time.monotonic() < deadline:
            time.sleep(UNSENT_S)
            self._stream.flush()
            if self._stream.unsent < left:
                left, deadline = self._stream.unsent, time.monotonic() + DRAIN_S

    def _read_launcher(self) -> None:
        while (data := self._stream.read()) is not None:
            if not data:
                self._ended = True
                return
            self._last_received = time.monotonic()
            try:
                for message in self._reader.feed(data):
                    self._handle(message)
            except (EchelonError, OSError, ValueError) as error:  # ValueError: a name with bytes that none can have
                self._send(CannotStart(str(error)))
                self._ended = True

    def _handle(self, message: ToAgent) -> None:
        match message:
            case Bind(interface, name, peers):
                self._listener = listen(announced_address(interface, name, peers))
                host, port = self._listener.getsockname()[:2]
                self._send(Bound(host, port))
            case Start():
                self._start(message)
            case Signal(number):
                if self._process is not None:
                    self._process.send_signal(number)
            case Release():
                self._ended = True
            case ReportExit(rank, how, failed):
                if self._job is not None:
                    report_worker_exit(self._job, WorkerExited(rank, how, failed))
            case Alive():
                pass

    def _start(self, start: Start) -> None:
        if start.folder is not None:
            try:
                os.chdir(start.folder)
            except OSError as error:
                raise UsageError(
                    f"the folder {start.folder} cannot be used: {error.strerror}; create it there, or let "
                    "--sync-dst-dir copy this one"
                ) from error
        check_mark(start.mark)
        self._job = Job.from_environment(start.environment)
        environment = {**self._variables(start), **start.environment, "ECHELON_JOINED_FILE": str(self._joined.path)}
        fds: tuple[int, ...] = ()
        if self._listener is not None:
            fds = (self._listener.fileno(),)
            environment["ECHELON_LISTEN_FD"] = str(self._listener.fileno())
        shielded = self._is_task and self._job.role != WORKER
        self._process = process = ChildProcess(
            start.name, start.arguments, environment, pass_fds=fds, shielded=shielded
        )
        if self._listener is not None and not (self._job.role == SCHEDULER and self._job.max_restarts):
            self._listener.close()  # that of a scheduler stays open, so that connections wait until it is restarted
            self._listener = None
        self._output_ended = False
        self._send(Started(process.pid))
        self._watch_output(True)
        self._selector.register(process.pidfd, selectors.EVENT_READ, self._handle_end)

    def _variables(self, start: Start) -> dict[str, str]:
        """Return variables for libraries: the threads that this machine has for its workers, and the interface."""
        assert self._job is not None
        if self._job.role != WORKER:
            return {}
        interface = self._job.interface or interface_towards(self._job.rendezvous_host or self._job.scheduler_host)
        job = replace(self._job, interface=interface)
        return library_variables(job, start.local_workers, one_machine=False, given=start.environment)

    def _read_output(self) -> None:
        if self._process is None:
            return  # the same turn of the selector has handled its end, which has read the rest
        data = self._process.read_output()
        if data:
            self._send(Output(data))
        elif data == b"":
            self._watch_output(False)
            self._output_ended = True

    def _watch_output(self, wanted: bool) -> None:
        """Read the output, or let the process wait until the launcher has taken what was sent."""
        if self._process is None or self._output_ended or wanted == (self._output_fd is not None):
            return
        if self._output_fd is not None:
            self._selector.unregister(self._output_fd)
            self._output_fd = None
        else:
            self._output_fd = self._process.fileno()
            assert self._output_fd is not None
            self._selector.register(self._output_fd, selectors.EVENT_READ, self._read_output)

    def _handle_end(self) -> None:
        assert self._process is not None
        code = self._process.reap()
        for _ in range(MAX_PIPE_BYTES // READ_BYTES):  # what the pipe holds; a process that escaped may still write
            if not self._output_ended:
                self._read_output()
        self._send_alive(self._joined.new_lines())
        self._send(Ended(code))
        self._watch_output(False)
        self._selector.unregister(self._process.pidfd)
        self._process.close()
        self._process = None


def main() -> int:
    """Run an agent over this process's standard input and output."""
    # Nothing but messages may go to the launcher: what else this process prints goes to its standard error.
    messages = os.dup(1)
    os.dup2(2, 1)
    return serve(PipeStream(os.dup(0), messages))


def serve(stream: Stream, task: int | None = None) -> int:
    """Run an agent over a stream to its launcher, and return the agent's own exit status."""
    with TemporaryDirectory(prefix="echelon-agent-") as folder:
        agent = Agent(stream, Path(folder), task)
        # The launcher decides what Ctrl-C means. Ignored or blocked signals, as under nohup or Ray, would be inherited.
        signal.signal(signal.SIGINT, lambda number, _: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
        signal.signal(signal.SIGTERM, lambda number, _: agent.handle_signal(number))
        signal.signal(signal.SIGHUP, lambda number, _: sys.exit(128 + number))
        try:
            return agent.run()
        except JobError as error:
            print(f"agent: {error}", file=sys.stderr)
            return 1


if __name__ == "__main__":
    sys.exit(main())
