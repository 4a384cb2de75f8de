"""The processes that a supervisor runs: what to start, and what it knows of each of them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from echelon.launch.supervision.processes import ChildProcess, RunningProcess
from echelon.launch.supervision.restarts import Restart

LAST_LINES = 20
MAX_LINE_BYTES = 1 << 20  # a longer line is shown in parts, because all of it would be kept in memory

OnLine = Callable[[str, str], None]  # gets a process's name and a line of its output
Start = Callable[["Command"], RunningProcess]
OnEnd = Callable[[str, str, bool], None]  # gets a process's name, how it ended, and whether it failed


@dataclass(frozen=True, slots=True)
class Command:
    """A process to start.

    `essential`: a server or the scheduler, without which the job ends. `judge`: the scheduler, whose exit status says
    whether the result of the job is whole. `replicated`: a server whose slices another server has, too. `needed`: a
    worker without which the other workers cannot continue. `shown`: its whole output is shown already, so an error does
    not repeat its last line. `hidden`: its output is not shown, only its last lines if it fails.
    """

    name: str
    arguments: Sequence[str]
    environment: Mapping[str, str]
    essential: bool
    pass_fds: tuple[int, ...] = ()
    needed: bool = False
    shown: bool = False
    hidden: bool = False
    judge: bool = False
    replicated: bool = False


@dataclass(slots=True, eq=False)
class Child:
    """A process of a supervisor. A restarted process is a new child."""

    command: Command
    process: RunningProcess
    output_fd: int | None = None  # where its output is read, from when it is known until it has ended
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES))
    partial: bytes = b""  # the beginning of a line whose end has not arrived
    ended: bool = False  # for good
    restart: Restart | None = None  # it has failed and is started again at that time
    replaces: Child | None = None  # the failed process whose place it takes, until it has joined the job
    killed: bool = False
    ended_before_failure: bool = False  # with status 0, before the first process failed
    output_ended: float = math.inf  # the time when its output ended, which may be before its end is detected

    @property
    def name(self) -> str:
        """Its role and rank."""
        return self.command.name

    @property
    def who(self) -> str:
        """Its name and where it runs."""
        return f"{self.name} ({self.process.where})"

    @property
    def last_line(self) -> str:
        """The last line of its output that is not blank, or ""."""
        return next((line for line in reversed(self.lines) if line.strip()), "")

    @property
    def is_running(self) -> bool:
        """Whether the process itself runs; the loop may not have handled its end yet."""
        return self.process.exit_code() is None

    def split_lines(self, data: bytes) -> list[str]:
        """Return the lines that are complete with these bytes of its output, and keep the rest."""
        *whole, rest = (self.partial + data).split(b"\n")
        cut = len(rest) // MAX_LINE_BYTES * MAX_LINE_BYTES
        whole += [rest[at : at + MAX_LINE_BYTES] for at in range(0, cut, MAX_LINE_BYTES)]
        self.partial = rest[cut:]
        texts = [raw.decode(errors="replace").rstrip("\r") for raw in whole]
        self.lines.extend(texts)
        return texts


def print_line(name: str, text: str) -> None:
    """Print a line of a process, preceded by its name."""
    print(f"[{name}] {text}", flush=True)


def start_child(command: Command) -> RunningProcess:
    """Start a command as a child of this process."""
    return ChildProcess(command.name, command.arguments, command.environment, pass_fds=command.pass_fds)
