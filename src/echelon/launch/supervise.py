"""Running the processes of a job: start them, label their output, forward signals, leave none behind.

The processes may run anywhere (`processes.RunningProcess`). One thread runs one loop. A job with servers survives the
death of a worker, but not that of a server or the scheduler. Workers may continue after the servers have ended, for
example to evaluate, but an idle one is killed. Ctrl-C and SIGTERM are forwarded to the workers, which get time to save
a checkpoint; a second one kills everything at once.
"""

from __future__ import annotations

import math
import os
import selectors
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

from echelon.launch.last_lines import LastLines, advice_for, is_short_error
from echelon.launch.processes import ChildProcess, RunningProcess

GRACE_S = 5.0  # to end, for processes that are stopped because another one failed
SAVING_S = 30.0  # to end, for workers that get a signal: enough for a step and a checkpoint, as in Slurm and Kubernetes
ABANDONED_S = 2.0  # to end, for servers and the scheduler of a job that was stopped or failed: nothing is lost
IDLE_S = 60.0  # without CPU time, for workers after the servers have ended: they may wait for a slow disk, not forever
TICK_S = 0.2
LAST_LINES = 20
READS_AT_ONCE = 8  # of a process that prints faster than its lines are shown
MAX_LINE_BYTES = 1 << 20  # a longer line is shown in parts, because all of it would be kept in memory

OnLine = Callable[[str, str], None]  # gets a process's name and a line of its output
Start = Callable[["Command"], RunningProcess]
OnEnd = Callable[[str, str, bool], None]  # gets a process's name, how it ended, and whether it failed


@dataclass(frozen=True, slots=True)
class Command:
    """A process to start.

    `essential`: a server or the scheduler, without which the job ends. `needed`: a worker without which the other
    workers cannot continue. `shown`: its whole output is shown already, so an error does not repeat its last line.
    `hidden`: its output is not shown, only its last lines if it fails.
    """

    name: str
    arguments: Sequence[str]
    environment: Mapping[str, str]
    essential: bool
    pass_fds: tuple[int, ...] = ()
    needed: bool = False
    shown: bool = False
    hidden: bool = False


@dataclass(slots=True, eq=False)
class _Child:
    command: Command
    process: RunningProcess
    output_fd: int | None = None  # where its output is read, from when it is known until it has ended
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES))
    partial: bytes = b""  # the beginning of a line whose end has not arrived
    ended: bool = False
    killed: bool = False
    ended_before_failure: bool = False  # with status 0, before the first process failed
    output_ended: float = math.inf  # the time when its output ended, which may be before its end is detected

    @property
    def name(self) -> str:
        return self.command.name

    @property
    def is_running(self) -> bool:
        """Whether the process itself runs; the loop may not have handled its end yet."""
        return self.process.exit_code() is None


def print_line(name: str, text: str) -> None:
    """Print a line of a process, preceded by its name."""
    print(f"[{name}] {text}", flush=True)


def start_child(command: Command) -> RunningProcess:
    """Start a command as a child of this process."""
    return ChildProcess(command.name, command.arguments, command.environment, pass_fds=command.pass_fds)


class Supervisor:
    """Starts commands and runs until all of them have ended."""

    def __init__(
        self,
        on_line: OnLine = print_line,
        on_tick: Callable[[], None] = lambda: None,
        on_end: OnEnd = lambda name, how, failed: None,
        start: Start = start_child,
        *,
        needed_elsewhere: Callable[[], bool] = lambda: False,
    ) -> None:
        self._start_process = start
        self._needed_elsewhere = needed_elsewhere  # whether workers of other machines need the servers of this one
        self._output = LastLines(on_line)
        self._on_tick = on_tick
        self._on_end = on_end
        self._children: list[_Child] = []
        self._selector = selectors.DefaultSelector()
        self._status = 0
        self._reason = ""
        self._failed: _Child | None = None  # the first process that failed by itself
        self._deadline = math.inf
        self._cpu_ticks, self._last_active = 0, math.inf  # of the workers, since the servers have ended
        self._stopping = False
        self._interrupted = False
        self._signals: deque[int] = deque()

    def run(self, commands: Sequence[Command]) -> int:
        """Run to the end. Return 0 or the first failing exit status, which is 128 + signal for a killed process."""
        with self._collecting_signals():
            try:
                for command in commands:
                    self._start(command)
                while not all(child.ended for child in self._children):
                    self._turn()
                self._read_remaining_output()
            except BrokenPipeError:
                self._handle_closed_output()
            finally:
                self._kill_all()
        if self._status:
            print(f"echelon: {self._reason}{self._why()}{self._ended_before()}", file=sys.stderr, flush=True)
        return self._status

    def watch(self, fileno: int, on_readable: Callable[[], None]) -> None:
        """Call a function whenever a file of the launcher is readable."""
        self._selector.register(fileno, selectors.EVENT_READ, on_readable)

    def _start(self, command: Command) -> None:
        self._children.append(_Child(command, self._start_process(command)))

    def _turn(self) -> None:
        self._on_tick()
        self._watch_new_outputs()
        for key, _ in self._selector.select(TICK_S):
            self._read(key.data) if isinstance(key.data, _Child) else key.data()
        while self._signals:
            self._forward_signal(self._signals.popleft())
        ended = self._ended()
        for child in sorted(ended, key=self._cause_first):
            self._handle_end(child)
        self._output.release_overdue(time.monotonic())
        if ended and self._only_essentials_left() and (self._stopping or not self._needed_elsewhere()):
            self._limit_time(ABANDONED_S if self._status else 2 * GRACE_S)
        if self._only_workers_left():
            self._check_for_idle_workers(time.monotonic())
        if time.monotonic() >= self._deadline:
            self._kill_late_children()

    def _watch_new_outputs(self) -> None:
        """Begin to read the output of processes; that of a process elsewhere is known when its host answers."""
        for child in self._children:
            if child.output_fd is None and child.output_ended == math.inf:
                child.output_fd = child.process.fileno()
                if child.output_fd is not None:
                    self._selector.register(child.output_fd, selectors.EVENT_READ, child)

    def _ended(self) -> list[_Child]:
        """Return the processes whose end can be handled: all that ended, but those whose cause has not ended yet."""
        left = [child for child in self._children if not child.ended]
        ended = [child for child in left if not child.is_running]
        running, now = [child.name for child in left if child not in ended], time.monotonic()
        return [child for child in ended if not self._output.waits_for_cause(child.name, running, now)]

    def _cause_first(self, child: _Child) -> tuple[bool, float]:
        """Sort key for processes that ended in the same turn: a killed one, then the first to fail, is the cause."""
        began = self._output.since(child.name)
        return child.process.reap() >= 0, child.output_ended if began is None else began

    def _handle_end(self, child: _Child) -> None:
        child.ended = True
        code = child.process.reap()
        self._read(child)
        how = child.process.how_ended()
        is_cause = bool(code) and not self._status
        if is_cause:
            self._fail(128 - code if code < 0 else code, child, how)
            self._failed = child if code > 0 else None
            self._note_those_that_ended_before()
            if code < 0 and (child.command.essential or child.command.needed):
                self._output.take(child.name, how, time.monotonic())  # it left no line; those of the others follow
        self._output.release(child.name, is_cause=is_cause)
        if code and (child.command.essential or child.command.needed) and not self._stopping:
            self._stop(signal.SIGTERM, self._children, GRACE_S)
        self._on_end(child.name, how, code != 0)

    def _note_those_that_ended_before(self) -> None:
        for other in self._children:
            other.ended_before_failure = other.ended and not other.command.essential and other.process.reap() == 0

    def _why(self) -> str:
        """Return what the process that failed printed last, and advice. All lines, if the user has not seen them."""
        child = self._failed
        if child is None or not child.lines:
            return ""
        lines = list(child.lines)
        advice = advice_for(lines)
        if child.command.hidden:
            return "; its last lines:\n" + "\n".join(f"    {line}" for line in lines) + advice
        if child.command.shown or self._output.ends_with_error(child.name, lines[-1]):
            return advice
        return f"; its last line: {next((line for line in reversed(lines) if line.strip()), '')}{advice}"

    def _ended_before(self) -> str:
        """Name the workers without which the failed one could not continue, and which had ended before it."""
        child = self._failed
        if child is None or not child.command.needed or not (child.lines and is_short_error(child.lines[-1])):
            return ""
        early = [other for other in self._children if other.ended_before_failure]
        return "".join(f"; {other.name} ({other.process.where}) had exited before, with status 0" for other in early)

    def fail(self, name: str, why: str) -> None:
        """End the job, because the named process ended in a way that the others cannot continue after."""
        child = next(child for child in self._children if child.name == name)
        if not self._status:
            self._fail(1, child, why)
            self._stop(signal.SIGTERM, self._children, GRACE_S)

    def _fail(self, status: int, child: _Child, how: str) -> None:
        self._status = status
        self._reason = f"{child.name} ({child.process.where}) {how}"

    def _kill_late_children(self) -> None:
        for child in self._children:
            if child.ended or child.killed:
                continue
            idle = not (child.command.essential or self._stopping) and self._last_active < math.inf
            if not self._status and idle:
                self._fail(1, child, f"used no CPU time for {IDLE_S:g} s after the servers had ended, and was killed")
            elif not self._status:
                self._fail(1, child, f"had not ended {2 * GRACE_S:g} s after the last worker")
            elif idle or (self._interrupted and not child.command.essential):
                self._reason += f"; {child.name} ({child.process.where}) had not ended and was killed"
            child.process.send_signal(signal.SIGKILL)
            child.killed = True

    def _only_essentials_left(self) -> bool:
        return all(child.ended for child in self._children if not child.command.essential)

    def _only_workers_left(self) -> bool:
        servers = [child.ended for child in self._children if child.command.essential]
        return bool(servers) and all(servers)

    def _check_for_idle_workers(self, now: float) -> None:
        """After the servers have ended, a worker may still evaluate or write; a stopped one would never end."""
        ticks = sum(child.process.cpu_ticks() for child in self._children if not child.ended)
        if ticks != self._cpu_ticks or self._last_active == math.inf:
            self._cpu_ticks, self._last_active = ticks, now
        elif now - self._last_active >= IDLE_S:
            self._limit_time(0.0)

    def _stop(self, number: int, children: Sequence[_Child], within_s: float) -> None:
        self._stopping = True
        self._limit_time(within_s)
        for child in children:
            child.process.send_signal(number)

    def _limit_time(self, seconds: float) -> None:
        self._deadline = min(self._deadline, time.monotonic() + seconds)

    def _forward_signal(self, number: int) -> None:
        """Send the signal to the workers, which may save a checkpoint. The servers end when the workers have ended."""
        name = signal.Signals(number).name
        if self._interrupted:
            self._reason += f", and again by {name}"
            self._limit_time(0.0)
            return
        self._interrupted = True
        self._status = self._status or 128 + number
        self._reason = self._reason or f"stopped by {name}"
        self._stop(number, [child for child in self._children if not child.command.essential], SAVING_S)

    def _read(self, child: _Child) -> None:
        """Take output of a process that has arrived, but not more at once than leaves time for signals."""
        for _ in range(READS_AT_ONCE):
            if child.output_ended < math.inf or (data := child.process.read_output()) is None:
                return
            if not data:
                if child.output_fd is not None:
                    self._selector.unregister(child.output_fd)
                child.output_ended = time.monotonic()
                data = b"\n" if child.partial else b""
            self._take(child, data)

    def _take(self, child: _Child, data: bytes) -> None:
        *whole, rest = (child.partial + data).split(b"\n")
        cut = len(rest) // MAX_LINE_BYTES * MAX_LINE_BYTES
        whole += [rest[at : at + MAX_LINE_BYTES] for at in range(0, cut, MAX_LINE_BYTES)]
        child.partial = rest[cut:]
        for raw in whole:
            text = raw.decode(errors="replace").rstrip("\r")
            child.lines.append(text)
            if not child.command.hidden:
                self._output.take(child.name, text, time.monotonic())

    def _handle_closed_output(self) -> None:
        """Nobody reads this process's output any more, as after `… | head -1`: end everything and print nothing."""
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        self._status = 128 + signal.SIGPIPE
        self._reason = "stopped, because nobody reads its output any more"

    def _read_remaining_output(self) -> None:
        deadline = time.monotonic() + 1.0
        while any(c.output_ended == math.inf for c in self._children) and time.monotonic() < deadline:
            for key, _ in self._selector.select(0.05):
                self._read(key.data) if isinstance(key.data, _Child) else key.data()
        self._output.release_overdue(math.inf)
        self._on_tick()

    def _kill_all(self) -> None:
        for child in self._children:  # all at once: each end on another machine takes time to be confirmed
            if child.is_running:
                child.process.send_signal(signal.SIGKILL)
        for child in self._children:
            child.process.close()
        self._selector.close()

    @contextmanager
    def _collecting_signals(self) -> Iterator[None]:
        """Collect SIGINT and SIGTERM for the loop, which forwards them."""

        def collect(number: int, frame: FrameType | None) -> None:
            self._signals.append(number)

        before = {number: signal.signal(number, collect) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
