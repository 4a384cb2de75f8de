"""A contender made of processes: started together, told over pipes when to run, and gone afterwards, whatever happens.

Every process leads a group of its own, and the group is killed before its leader is reaped, so that its number cannot
have passed to somebody else. Deaths are seen through pidfds in the same wait as answers: a dead server is an error at
once, not after a deadline. The lines are those of `protocol`; everything else a process prints goes to its log, whose
end is part of each error.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TypeVar

from echelon.bench.harness.protocol import QUIT, Answer, Ready, Times, decode_answer, run_command
from echelon.bench.harness.turns import Contender
from echelon.errors import JobError

AnswerKind = TypeVar("AnswerKind", Ready, Times)

LAST_LINES = 12
KILL_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """How to start one process. A driven one is told each `run K` and answers; the others only serve."""

    label: str
    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    driven: bool = False


class Member:
    """One running process of a contender, with its pipes, its log and its answers so far."""

    def __init__(self, spec: ProcessSpec, log_path: Path) -> None:
        self.spec = spec
        self.log_path = log_path
        self._answer: Answer | None = None
        self._rest = b""
        self._log = log_path.open("ab", buffering=0)
        try:
            self._popen = subprocess.Popen(
                spec.argv,
                env={**os.environ, **spec.env},
                stdin=subprocess.PIPE if spec.driven else subprocess.DEVNULL,
                stdout=subprocess.PIPE if spec.driven else self._log,
                stderr=self._log,
                bufsize=0,
                start_new_session=True,
            )
        except OSError as error:
            self._log.close()
            raise JobError(f"{spec.label}: {spec.argv[0]} could not be started: {error.strerror}") from error
        self.pidfd = os.pidfd_open(self._popen.pid)

    @property
    def pid(self) -> int:
        """The process, and its group."""
        return self._popen.pid

    @property
    def stdout(self) -> IO[bytes] | None:
        """Where a driven process answers."""
        return self._popen.stdout

    def send(self, line: str) -> None:
        """Tell a driven process something. If it is dead, the next wait says so better than a broken pipe."""
        self._answer = None
        try:
            if self._popen.stdin is not None:
                self._popen.stdin.write(line.encode())
        except BrokenPipeError:
            pass

    def receive(self) -> bool:
        """Take what it printed: answers apart, the rest to its log. False at the end of the stream."""
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
        """What it answered to the last line sent, if that has come and is of the kind asked for."""
        return self._answer if isinstance(self._answer, kind) else None

    def exit_status(self) -> int | None:
        """How it ended, as a shell would say it; None while it lives. Does not reap it."""
        found = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is None:
            return None
        return found.si_status if found.si_code == os.CLD_EXITED else 128 + found.si_status

    def last_lines(self) -> str:
        """The end of its log, indented below its name."""
        text = (self.log_path.read_bytes() + self._rest).decode(errors="replace")
        lines = text.splitlines()[-LAST_LINES:]
        return "\n".join([f"last lines of {self.spec.label}:", *(f"  {line}" for line in lines or ["(none)"])])

    def kill(self) -> None:
        """End the whole group, wait for it, close everything."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._popen.wait(KILL_TIMEOUT_S)
        for stream in (self._popen.stdin, self._popen.stdout, self._log):
            if stream is not None:
                stream.close()
        os.close(self.pidfd)


class ProcessContender(Contender):
    """Runs its specs as one job. The first driven process is the driver: the times it answers are the contender's."""

    def __init__(
        self,
        name: str,
        specs: Sequence[ProcessSpec],
        log_dir: Path,
        *,
        start_timeout_s: float = 120.0,
        step_timeout_s: float = 15.0,
        stop_timeout_s: float = 20.0,
    ) -> None:
        super().__init__(name)
        if not any(spec.driven for spec in specs):
            raise ValueError(f"contender {name!r} has no driven process among its {len(specs)}")
        self._specs = specs
        self._log_dir = log_dir
        self._start_timeout_s = start_timeout_s
        self._step_timeout_s = step_timeout_s
        self._stop_timeout_s = stop_timeout_s
        self._members: list[Member] = []
        self.answers: list[Times] = []  # to the last round, the driver's first

    @property
    def pids(self) -> list[int]:
        """The processes that run now."""
        return [member.pid for member in self._members]

    def start(self) -> None:
        """Start every process and wait until every driven one is ready."""
        try:
            for spec in self._specs:
                log_path = self._log_dir / f"{self.name} {spec.label}.log"
                self._members.append(Member(spec, log_path))
            self._collect(Ready, "get ready", self._start_timeout_s)
        except BaseException:
            self.abort()
            raise

    def run_round(self, num_steps: int) -> list[float]:
        """Have all driven processes do the steps together. Returns once each has answered, so that all of them idle."""
        try:
            for member in self._driven():
                member.send(run_command(num_steps))
            timeout_s = self._step_timeout_s * (num_steps + 1)
            self.answers = self._collect(Times, f"do {num_steps} steps", timeout_s)
            times = self.answers[0]
            if len(times.step_s) != num_steps:
                raise JobError(f"{self.name}: asked for {num_steps} steps, its driver timed {len(times.step_s)}")
        except BaseException:
            self.abort()
            raise
        return list(times.step_s)

    def stop(self) -> None:
        """Let the job end by itself, then make sure. An ending late or with an error is one, once all are gone."""
        try:
            for member in self._driven():
                member.send(QUIT)
            self._wait(lambda: len(self._dead()) == len(self._members), self._stop_timeout_s)
            bad = [member for member in self._members if member.exit_status() != 0]
            if bad:
                raise self._failure("did not end well after 'quit'", bad)
        finally:
            self.abort()

    def abort(self) -> None:
        """Kill every group and wait for it."""
        with ExitStack() as every_one:  # one that cannot be killed does not save the others
            while self._members:
                every_one.callback(self._members.pop().kill)

    def _driven(self) -> list[Member]:
        return [member for member in self._members if member.spec.driven]

    def _dead(self) -> list[Member]:
        return [member for member in self._members if member.exit_status() is not None]

    def _collect(self, kind: type[AnswerKind], doing: str, timeout_s: float) -> list[AnswerKind]:
        """One answer of that kind from each driven process, the driver's first."""

        def unanswered() -> list[Member]:
            return [member for member in self._driven() if member.answer(kind) is None]

        self._wait(lambda: not unanswered() or self._dead() != [], timeout_s)
        if unanswered() and self._dead():
            raise self._failure(f"could not {doing}", self._dead())
        if unanswered():
            silent = ", ".join(member.spec.label for member in unanswered())
            raise self._failure(f"did not {doing} within {timeout_s:g} s; no answer from {silent}", self._members)
        return [answer for member in self._driven() if (answer := member.answer(kind)) is not None]

    def _wait(self, done: Callable[[], bool], timeout_s: float) -> None:
        """Take in output and deaths until `done` or the deadline."""
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

    def _failure(self, what: str, members: Sequence[Member]) -> JobError:
        """An error that says who ended how, and what each of them said last."""
        ends = [(member.spec.label, member.exit_status()) for member in members]
        statuses = "".join(f"; {label} ended with status {status}" for label, status in ends if status is not None)
        return JobError("\n".join([f"{self.name} {what}{statuses}", *(member.last_lines() for member in members)]))
