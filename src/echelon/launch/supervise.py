"""Running a job's processes on this machine: start, label their output, pass signals on, leave nothing behind.

One thread, one loop. A child is a session of its own (so that its children die with it) and dies with this process
(PDEATHSIG), kill -9 included. A worker's death is the job's to survive, where there are servers; a server's or the
scheduler's ends it. Workers may work on when the servers have ended, but one that is frozen is not waited for. Ctrl-C
and SIGTERM go to the workers, which have time to save what they have; a second one ends everything at once.
"""

from __future__ import annotations

import ctypes
import math
import os
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import BinaryIO

from echelon.errors import UsageError
from echelon.launch.sessions import work_done

GRACE_S = 5.0  # for those that others' failure ends
SAVING_S = 30.0  # for workers that a signal ends, as Slurm and Kubernetes have it: a step and a checkpoint
IDLE_S = 60.0  # for a worker that does nothing after the servers have ended: it may wait for a slow disk, not for ever
TICK_S = 0.2
LAST_LINES = 20
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)

Line = Callable[[str, str], None]
End = Callable[[str, str, bool], None]  # a process's name, how it ended, whether it failed


@dataclass(frozen=True, slots=True)
class Command:
    """A process to start. `essential`: it serves the workers, and the job cannot go on without it.

    `needed`: it is a worker, and the others cannot go on without it. `shown`: all it says stands where its end is told,
    so its last lines need not be told again.
    """

    name: str
    arguments: Sequence[str]
    environment: Mapping[str, str]
    essential: bool
    pass_fds: tuple[int, ...] = ()
    needed: bool = False
    shown: bool = False


@dataclass(slots=True, eq=False)
class _Child:
    command: Command
    process: subprocess.Popen[bytes]
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES))
    partial: bytes = b""
    ended: bool = False
    killed: bool = False
    fell_silent: float = math.inf  # when its output ended: with the process, or before it is seen to be gone

    def end(self) -> bool:
        """Notice its end; what is left of its session ends with it."""
        pid = self.process.pid
        if self.process.returncode is None and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            os.killpg(pid, signal.SIGKILL)  # not reaped yet, so the number cannot be another's
            self.process.wait()
        return self.process.returncode is not None


def _cause_first(child: _Child) -> tuple[bool, float]:
    """Of those found dead together: one that was killed, else the first to go, had no other's end for a reason."""
    return child.process.returncode >= 0, child.fell_silent


def print_line(name: str, text: str) -> None:
    """A child's line with its name in front."""
    print(f"[{name}] {text}", flush=True)


class Supervisor:
    """Starts commands and watches them to the end."""

    def __init__(
        self,
        on_line: Line = print_line,
        on_tick: Callable[[], None] = lambda: None,
        on_end: End = lambda name, how, failed: None,
    ) -> None:
        self._on_line = on_line
        self._on_tick = on_tick
        self._on_end = on_end
        self._children: list[_Child] = []
        self._selector = selectors.DefaultSelector()
        self._status = 0
        self._reason = ""
        self._deadline = math.inf
        self._work, self._last_work = 0, math.inf  # of the workers, since nobody serves them any more, and when
        self._stopping = False
        self._interrupted = False
        self._signals: deque[int] = deque()

    def run(self, commands: Sequence[Command]) -> int:
        """Run to the end; the first failing exit status (128 + signal for a killed process), or 0."""
        with self._passing_signals():
            try:
                for command in commands:
                    self._start(command)
                while not all(child.ended for child in self._children):
                    self._turn()
                self._read_rest()
            except BrokenPipeError:
                self._unheard()
            finally:
                self._end_all()
        if self._status:
            self._tell_failure()
        return self._status

    def _start(self, command: Command) -> None:
        parent = os.getpid()

        def die_with_parent() -> None:
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:  # it was gone before the call
                os._exit(1)

        try:
            process = subprocess.Popen(
                command.arguments,
                env={**os.environ, **command.environment},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=command.pass_fds,
                preexec_fn=die_with_parent,
            )
        except OSError as error:
            raise UsageError(f"{command.name} cannot run {command.arguments[0]!r}: {error.strerror}") from error
        child = _Child(command, process)
        self._children.append(child)
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        self._selector.register(process.stdout, selectors.EVENT_READ, child)

    def _turn(self) -> None:
        for key, _ in self._selector.select(TICK_S):
            self._read(key.data, key.fileobj)  # type: ignore[arg-type]
        while self._signals:
            self._pass_on(self._signals.popleft())
        fresh = [child for child in self._children if not child.ended and child.end()]
        for child in sorted(fresh, key=_cause_first):
            child.ended = True
            self._ended(child, child.process.returncode)
        if fresh and self._only_essentials_left():
            self._end_within(2 * GRACE_S)
        if self._only_workers_left():
            self._watch_the_left(time.monotonic())
        if time.monotonic() >= self._deadline:
            self._kill_the_late()
        self._on_tick()

    def _ended(self, child: _Child, code: int) -> None:
        assert child.process.stdout is not None
        if not child.process.stdout.closed:
            self._read(child, child.process.stdout)  # type: ignore[arg-type]
        how = f"was killed by signal {-code}" if code < 0 else f"exited with status {code}"
        if code and not self._status:
            self._fail(128 - code if code < 0 else code, child, how)
            if child.lines and code > 0 and not child.command.shown:
                self._reason += "; its last lines:\n" + "\n".join(f"    {line}" for line in child.lines)
        if code and (child.command.essential or child.command.needed) and not self._stopping:
            self._stop(signal.SIGTERM, self._children, GRACE_S)
        self._on_end(child.command.name, how, code != 0)

    def _fail(self, status: int, child: _Child, how: str) -> None:
        self._status = status
        self._reason = f"{child.command.name} (pid {child.process.pid}) {how}"

    def _kill_the_late(self) -> None:
        for child in self._children:
            if child.ended or child.killed:
                continue
            left_by_servers = not (child.command.essential or self._stopping) and self._last_work < math.inf
            if not self._status and left_by_servers:
                self._fail(1, child, f"did nothing for {IDLE_S:g} s after the servers had ended, and was killed")
            elif not self._status:
                self._fail(1, child, f"had not ended {2 * GRACE_S:g} s after the last worker")
            elif left_by_servers or (self._interrupted and not child.command.essential):
                self._reason += f"; {child.command.name} (pid {child.process.pid}) had not ended and was killed"
            os.killpg(child.process.pid, signal.SIGKILL)
            child.killed = True

    def _only_essentials_left(self) -> bool:
        return all(child.ended for child in self._children if not child.command.essential)

    def _only_workers_left(self) -> bool:
        servers = [child.ended for child in self._children if child.command.essential]
        return bool(servers) and all(servers)

    def _watch_the_left(self, now: float) -> None:
        """After the last word to the servers a worker may still evaluate or write; a stopped one would not end."""
        work = sum(work_done(child.process.pid) for child in self._children if not child.ended)
        if work != self._work or self._last_work == math.inf:
            self._work, self._last_work = work, now
        elif now - self._last_work >= IDLE_S:
            self._end_within(0.0)

    def _stop(self, number: int, children: Sequence[_Child], within_s: float) -> None:
        self._stopping = True
        self._end_within(within_s)
        for child in children:
            if child.process.returncode is None:
                os.killpg(child.process.pid, number)

    def _end_within(self, seconds: float) -> None:
        self._deadline = min(self._deadline, time.monotonic() + seconds)

    def _pass_on(self, number: int) -> None:
        """To the workers: they may still want to save something, and when they are gone the others go, too."""
        name = signal.Signals(number).name
        if self._interrupted:
            self._reason += f", and again by {name}"
            self._end_within(0.0)
            return
        self._interrupted = True
        self._status = self._status or 128 + number
        self._reason = self._reason or f"stopped by {name}"
        self._stop(number, [child for child in self._children if not child.command.essential], SAVING_S)

    def _read(self, child: _Child, stream: BinaryIO) -> None:
        data: bytes | None = stream.read()
        if data is None:  # nothing there after all: the stream does not block
            return
        if not data:
            self._selector.unregister(stream)
            stream.close()
            child.fell_silent = time.monotonic()
            data = b"\n" if child.partial else b""
        *whole, child.partial = (child.partial + data).split(b"\n")
        for raw in whole:
            text = raw.decode(errors="replace").rstrip("\r")
            child.lines.append(text)
            self._on_line(child.command.name, text)

    def _unheard(self) -> None:
        """Nobody reads what is printed, as after `… | head -1`: all is ended, and nothing more is printed."""
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        self._status = 128 + signal.SIGPIPE
        self._reason = "stopped, because nobody reads its output any more"

    def _read_rest(self) -> None:
        deadline = time.monotonic() + 1.0
        while self._selector.get_map() and time.monotonic() < deadline:
            for key, _ in self._selector.select(0.05):
                self._read(key.data, key.fileobj)  # type: ignore[arg-type]
        self._on_tick()

    def _end_all(self) -> None:
        for child in self._children:
            if not child.end():
                os.killpg(child.process.pid, signal.SIGKILL)
                child.process.wait()
            if child.process.stdout is not None:
                child.process.stdout.close()
        self._selector.close()

    def _tell_failure(self) -> None:
        print(f"echelon: {self._reason}", file=sys.stderr, flush=True)

    @contextmanager
    def _passing_signals(self) -> Iterator[None]:
        def note(number: int, frame: FrameType | None) -> None:
            self._signals.append(number)

        before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
