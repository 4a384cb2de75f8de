"""A contender that consists of processes: they are started together, run steps on command, and are always cleaned up.

Commands and answers are lines on pipes (`protocol`). The end of a process is detected through its pidfd, in the same
wait as answers: a dead server is an error at once and not after a timeout. Everything else that a process prints goes
to its log file; an error shows the end of that file. `launch/supervision/processes.py` starts, kills and reaps the
processes.
"""

from __future__ import annotations

import os
import selectors
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from socket import socket
from typing import TypeVar

from echelon.bench.harness.protocol import QUIT, Answer, Ready, Times, decode_answer, run_command
from echelon.bench.harness.remote import first_line
from echelon.bench.harness.turns import Contender
from echelon.environment import Job
from echelon.errors import JobError
from echelon.launch.supervision.processes import ChildProcess
from echelon.transport.listening import LOOPBACK, listen

AnswerKind = TypeVar("AnswerKind", Ready, Times)

LAST_LINES = 12


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """How to start one process. A driven process gets each `run K` and answers; the others only serve.

    `job`: the process's place in an Echelon job, whose port is chosen when the contender starts.
    """

    label: str
    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    driven: bool = False
    job: Job | None = None
    pass_fds: tuple[int, ...] = ()
    command: Sequence[str] = ()  # if given, it starts the process on another host

    def at(self, listener: socket) -> ProcessSpec:
        """Return the spec with the variables of its job. The scheduler inherits the listening socket."""
        if self.job is None:
            return self
        host, port = listener.getsockname()[:2]
        job = replace(self.job, scheduler_host=host, scheduler_port=port)
        env = {**job.to_environment(), **self.env}
        if job.role != "scheduler":
            return replace(self, env=env)
        return replace(self, env={**env, "ECHELON_LISTEN_FD": str(listener.fileno())}, pass_fds=(listener.fileno(),))


class ContenderProcess(ChildProcess):
    """A running process of a contender, with its log file and its last answer."""

    def __init__(self, spec: ProcessSpec, log_path: Path) -> None:
        self.spec = spec
        self.log_path = log_path
        self._answer: Answer | None = None
        self._rest = b""
        self._log = log_path.open("ab", buffering=0)
        try:
            super().__init__(
                spec.label,
                spec.command or spec.argv,
                {} if spec.command else spec.env,
                stdin=subprocess.PIPE if spec.driven or spec.command else subprocess.DEVNULL,
                stdout=subprocess.PIPE if spec.driven else self._log,
                stderr=self._log,
                pass_fds=spec.pass_fds,
            )
        except BaseException:
            self._log.close()
            raise
        if spec.command and self.stdin is not None:
            self.stdin.write(first_line(spec.argv, spec.env))

    def send(self, line: str) -> None:
        """Send a line to a driven process. If the process is dead, the next wait reports it."""
        self._answer = None
        try:
            if self.stdin is not None:
                self.stdin.write(line.encode())
        except BrokenPipeError:
            pass

    def receive(self) -> bool:
        """Read output: keep the last answer and write other lines to the log. Return False at the end of the output."""
        assert self.stdout is not None
        data = os.read(self.stdout.fileno(), 1 << 16)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            answer = decode_answer(line.decode(errors="replace"))
            if answer is None:
                self._log.write(line + b"\n")
            else:
                self._answer = answer
        return bool(data)

    def answer(self, kind: type[AnswerKind]) -> AnswerKind | None:
        """Return the answer to the last line sent, if it has arrived and is of this kind."""
        return self._answer if isinstance(self._answer, kind) else None

    def exit_status(self) -> int | None:
        """Return the exit status as a shell shows it (128 + signal), or None while the process runs."""
        code = self.exit_code()
        return 128 - code if code is not None and code < 0 else code

    def last_lines(self) -> str:
        """Return the end of the log, indented below the name of the process."""
        text = (self.log_path.read_bytes() + self._rest).decode(errors="replace")
        lines = text.splitlines()[-LAST_LINES:]
        return "\n".join([f"last lines of {self.spec.label}:", *(f"  {line}" for line in lines or ["(none)"])])

    def close(self) -> None:
        """Kill the whole session, wait for it, and close everything."""
        super().close()
        self._log.close()


class ProcessContender(Contender):
    """Runs its specs as one job. The times of the first driven process are the contender's times."""

    def __init__(
        self,
        name: str,
        specs: Sequence[ProcessSpec],
        log_dir: Path,
        *,
        start_timeout_s: float = 120.0,
        step_timeout_s: float = 15.0,
        stop_timeout_s: float = 20.0,
        address: str = LOOPBACK,
    ) -> None:
        """`address`: where the scheduler of an Echelon job listens."""
        super().__init__(name)
        if not any(spec.driven for spec in specs):
            raise ValueError(f"contender {name!r} has no driven process among its {len(specs)}")
        self._specs = specs
        self._address = address
        self._log_dir = log_dir
        self._start_timeout_s = start_timeout_s
        self._step_timeout_s = step_timeout_s
        self._stop_timeout_s = stop_timeout_s
        self._members: list[ContenderProcess] = []
        self.answers: list[Times] = []  # of the last round, one per driven process

    @property
    def pids(self) -> list[int]:
        """The processes that are running."""
        return [member.pid for member in self._members]

    def start(self) -> None:
        """Start every process and wait until every driven one is ready."""
        try:
            with listen(self._address) as listener:
                for spec in self._specs:
                    log_path = self._log_dir / f"{self.name} {spec.label}.log"
                    self._members.append(ContenderProcess(spec.at(listener), log_path))
            self._collect(Ready, "get ready", self._start_timeout_s)
        except BaseException:
            self.abort()
            raise

    def run_round(self, num_steps: int) -> list[float]:
        """Let all driven processes run the steps together. Return when each has answered, so that all are idle."""
        try:
            for member in self._driven():
                member.send(run_command(num_steps))
            timeout_s = self._step_timeout_s * (num_steps + 1)
            self.answers = self._collect(Times, f"do {num_steps} steps", timeout_s)
            times = self.answers[0]
            if len(times.step_s) != num_steps:
                raise JobError(f"{self.name}: asked for {num_steps} steps, but it returned {len(times.step_s)} times")
        except BaseException:
            self.abort()
            raise
        return list(times.step_s)

    def stop(self) -> None:
        """Let the job end by itself, then kill what is left. A late end or a failing exit status raises JobError."""
        try:
            for member in self._driven():
                member.send(QUIT)
            self._wait(lambda: len(self._dead()) == len(self._members), self._stop_timeout_s)
            bad = [member for member in self._members if member.exit_status() != 0]
            if bad:
                raise self._failure("did not end normally after 'quit'", bad)
        finally:
            self.abort()

    def abort(self) -> None:
        """Kill all processes and wait for them."""
        with ExitStack() as undo:  # an error with one process must not keep the others alive
            while self._members:
                undo.callback(self._members.pop().close)

    def _driven(self) -> list[ContenderProcess]:
        return [member for member in self._members if member.spec.driven]

    def _dead(self) -> list[ContenderProcess]:
        return [member for member in self._members if member.exit_status() is not None]

    def _collect(self, kind: type[AnswerKind], doing: str, timeout_s: float) -> list[AnswerKind]:
        """Return one answer of that kind from each driven process."""

        def unanswered() -> list[ContenderProcess]:
            return [member for member in self._driven() if member.answer(kind) is None]

        self._wait(lambda: not unanswered() or self._dead() != [], timeout_s)
        if unanswered() and self._dead():
            raise self._failure(f"could not {doing}", self._dead())
        if unanswered():
            silent = ", ".join(member.spec.label for member in unanswered())
            raise self._failure(f"did not {doing} within {timeout_s:g} s; no answer from {silent}", self._members)
        return [answer for member in self._driven() if (answer := member.answer(kind)) is not None]

    def _wait(self, done: Callable[[], bool], timeout_s: float) -> None:
        """Handle output and ends of processes until `done()` is true or the time is up."""
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            for member in self._members:
                selector.register(member.pidfd, selectors.EVENT_READ)
                if member.stdout is not None:
                    selector.register(member.stdout, selectors.EVENT_READ, member)
            while not done():
                events = selector.select(max(0.0, deadline - time.monotonic()))
                if not events:
                    return
                for key, _ in events:
                    if key.data is None or not key.data.receive():
                        selector.unregister(key.fileobj)

    def _failure(self, what: str, members: Sequence[ContenderProcess]) -> JobError:
        """Return an error with the exit statuses and the last lines of the given processes."""
        ends = [(member.spec.label, member.exit_status()) for member in members]
        statuses = "".join(f"; {label} ended with status {status}" for label, status in ends if status is not None)
        return JobError("\n".join([f"{self.name} {what}{statuses}", *(member.last_lines() for member in members)]))
