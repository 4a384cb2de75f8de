"""Running a job whose agents are the tasks of one program of this machine, such as mpirun.

The program starts the tasks, wherever it does, and the agents connect to the launcher's hub. What the program prints is
shown under its name. If it ends before all agents have connected, the job cannot start.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from echelon.environment import CREDENTIALS, variable
from echelon.launch.agents.coordinate import START_S, AgentBackend
from echelon.launch.agents.hub import Hub
from echelon.launch.interface import Output
from echelon.launch.plan import SCHEDULER, Plan
from echelon.launch.run import run_job
from echelon.launch.ssh.client import package_folder
from echelon.launch.supervision.children import OnLine
from echelon.launch.supervision.processes import ChildProcess, how_ended
from echelon.system import PACKAGE
from echelon.transport.admission.credentials import Security

END_S = 3.0  # for the program to end after its tasks, or after SIGTERM
SETTLE_S = 3.0  # after an error of one host, for the agents of the others to connect


class Cause(NamedTuple):
    """Why the tasks of a host cannot run, or those of some host if `host` is None."""

    host: str | None
    text: str


@dataclass(frozen=True)
class TaskProgram:
    """A program that starts the tasks. `recognize` returns the cause if a line that it prints is a known error.

    `environment` has the credentials: the program must pass on those variables without showing them.
    """

    name: str
    arguments: Sequence[str]
    environment: Mapping[str, str]
    recognize: Callable[[str], Cause | None] = lambda line: None
    hint: str = "its lines above say why"  # if it ends for a reason that is not known


def find_cause(table: Mapping[str, str], line: str) -> Cause | None:
    """Return what a table says about errors, if a line contains one of its keys."""
    return next((Cause(None, text) for part, text in table.items() if part in line), None)


def num_tasks(plan: Plan) -> int:
    """Return the number of tasks: one per server and worker."""
    return sum(process.role != SCHEDULER for process in plan.processes)


def python_path() -> dict[str, str]:
    """Return the variable that lets hosts find Echelon if it is not installed: at the same path as here."""
    folder = package_folder(PACKAGE, Path.cwd(), None)
    return {"PYTHONPATH": os.pathsep.join(filter(None, [variable("PYTHONPATH"), folder]))} if folder else {}


def run_tasks(
    plan: Plan,
    output: Output,
    address: str,
    program: Callable[[Hub], TaskProgram],
    *,
    folder: str | None = None,
    start_s: float = START_S,
) -> int:
    """Run a plan through the tasks of a program, and return its exit status. `address` is this machine's for them."""
    with ExitStack() as stack:
        hub = Hub(address, Security.of(plan.job))
        stack.callback(hub.close)
        starter = _Starter(program(hub), output.on_line)
        stack.callback(lambda: starter.close(wait=hub.complete))
        backend = _TaskBackend(plan, hub, starter, folder, start_s)
        return run_job(plan, output, backend, watched={hub.fileno(): hub.turn})


class _TaskBackend(AgentBackend):
    """Starts the program in the first turn, when all processes are known to the hub."""

    def __init__(self, plan: Plan, hub: Hub, starter: _Starter, folder: str | None, start_s: float) -> None:
        super().__init__(plan, hub.connect, folder=folder, start_s=start_s, address=hub.address[0])
        self._hub, self._starter = hub, starter

    def turn(self) -> None:
        """Start processes whose agents have connected, and watch the program.

        Failures come last, so that the supervisor handles them before the next turn stops the other processes.
        """
        self._hub.turn()
        super().turn()
        self._starter.turn()
        for process in self._hub.missing:
            if why := self._starter.why_missing(process.host):
                process.fail(why)


class _Starter:
    """The program that starts the tasks, as a child of this process."""

    def __init__(self, program: TaskProgram, on_line: OnLine) -> None:
        self._program, self._on_line = program, on_line
        self._secret = program.environment.get(CREDENTIALS) or "\0"  # a verbose program may print it
        self._process: ChildProcess | None = None
        self._partial = b""
        self._ended = False
        self._lines = 0
        self._causes: list[Cause] = []
        self._settled = math.inf  # when agents that do not suffer from a cause have had time to connect

    def turn(self) -> None:
        """Start the program, and show what it prints."""
        if self._process is None:
            program = self._program
            self._process = ChildProcess(program.name, program.arguments, program.environment)
            self._process.fileno()  # from now on, reading its output does not block
        self._show_lines()
        code = self._process.exit_code()
        if code and not self._ended:
            self._ended = True
            self._on_line(self._program.name, how_ended(code))

    def why_missing(self, host: str) -> str:
        """Return why the agents of a host will not connect, or "" if they may still do so."""
        assert self._process is not None
        name, code = self._program.name, self._process.exit_code()
        ended = "" if code is None else f": {name} {how_ended(code)} before its agent had connected"
        for cause in self._causes:
            if cause.host == host or (cause.host is None and (ended or time.monotonic() > self._settled)):
                return f"cannot run{ended}: {cause.text}"
        if not ended or (self._causes and time.monotonic() < self._settled):  # those of another host come first
            return ""
        return f"cannot run{ended}" + (f"; {self._program.hint}" if self._lines else "")

    def close(self, *, wait: bool) -> None:
        """End the program. `wait`: its tasks have ended, so it ends by itself; otherwise it is told to."""
        if self._process is None:
            return
        if not (wait and self._wait()):
            self._program = replace(self._program, recognize=lambda line: None)
            self._on_line = lambda name, line: None  # it complains about being told to end
            self._process.send_signal(signal.SIGTERM)
            self._wait()
        self._process.close()

    def _wait(self) -> bool:
        assert self._process is not None
        deadline = time.monotonic() + END_S
        while self._process.exit_code() is None:
            self._show_lines()
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        self._show_lines()
        return True

    def _show_lines(self) -> None:
        assert self._process is not None
        while data := self._process.read_output():
            *whole, self._partial = (self._partial + data).split(b"\n")
            for raw in whole:
                line = raw.decode(errors="replace").rstrip().replace(self._secret, "<credentials>")
                if line:
                    self._lines += 1
                    self._on_line(self._program.name, line)
                    self._note_cause(line)

    def _note_cause(self, line: str) -> None:
        if cause := self._program.recognize(line):
            self._causes.append(cause)
            self._settled = min(self._settled, time.monotonic() + SETTLE_S)
