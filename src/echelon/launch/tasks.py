"""Running a job whose agents are the tasks of one program of this machine, such as mpirun.

The program starts the tasks, wherever it does, and the agents connect to the launcher's hub. What the program prints is
shown under its name. If it ends before all agents have connected, the job cannot start.
"""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from echelon.environment import CREDENTIALS
from echelon.launch.coordinate import START_S, AgentBackend
from echelon.launch.hub import Hub
from echelon.launch.interface import Output
from echelon.launch.plan import Plan
from echelon.launch.processes import ChildProcess, how_ended
from echelon.launch.run import run_job
from echelon.launch.supervise import OnLine
from echelon.transport.credentials import Security

END_S = 5.0  # for the program to end after its tasks, or after SIGTERM
_KEPT_LINES = 100


@dataclass(frozen=True)
class TaskProgram:
    """A program that starts the tasks. `advice` gets its last lines and returns what to do about them, or "".

    `environment` has the credentials: the program must pass on those variables without showing them.
    """

    name: str
    arguments: Sequence[str]
    environment: Mapping[str, str]
    advice: Callable[[Sequence[str]], str] = lambda lines: ""


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
        stack.callback(starter.close)
        backend = _TaskBackend(plan, hub, starter, folder, start_s)
        return run_job(plan, output, backend, watched={hub.fileno(): hub.turn})


class _TaskBackend(AgentBackend):
    """Starts the program in the first turn, when all processes are known to the hub."""

    def __init__(self, plan: Plan, hub: Hub, starter: _Starter, folder: str | None, start_s: float) -> None:
        super().__init__(plan, hub.connect, folder=folder, start_s=start_s, address=hub.address[0])
        self._hub, self._starter = hub, starter

    def turn(self) -> None:
        """Watch the program, and start processes whose agents have connected."""
        self._hub.turn()
        why = self._starter.turn()
        if why:
            for process in self._hub.missing:
                process.fail(why)
        super().turn()


class _Starter:
    """The program that starts the tasks, as a child of this process."""

    def __init__(self, program: TaskProgram, on_line: OnLine) -> None:
        self._program, self._on_line = program, on_line
        self._secret = program.environment.get(CREDENTIALS) or "\0"  # a verbose program may print it
        self._process: ChildProcess | None = None
        self._partial = b""
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)

    def turn(self) -> str:
        """Start the program, show what it prints, and return how it ended, or "" while it runs."""
        if self._process is None:
            program = self._program
            self._process = ChildProcess(program.name, program.arguments, program.environment)
            self._process.fileno()  # from now on, reading its output does not block
        code = self._process.exit_code()
        self._show_lines()
        return "" if code is None else self._explain(code)

    def close(self) -> None:
        """End the program. Its tasks have ended or been told to; it ends by itself, or is asked to, or is killed."""
        if self._process is None:
            return
        if not self._wait():
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
                self._lines.append(line)
                if line:
                    self._on_line(self._program.name, line)

    def _explain(self, code: int) -> str:
        advice = self._program.advice(list(self._lines))
        return f"cannot run: {self._program.name} {how_ended(code)} before its agent had connected" + (
            f"; {advice}" if advice else ", for the reason that its lines above give" if self._lines else ""
        )
