"""The local launcher: runs a scheduler, servers and workers as processes of this machine."""

from __future__ import annotations

import argparse
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from echelon.cluster.messages import WORKER, WorkerExited
from echelon.environment import Job, in_batch_job
from echelon.errors import UsageError
from echelon.launch.devices import library_variables
from echelon.launch.interface import Output
from echelon.launch.joining import JoinedFile
from echelon.launch.local.forked import Preloaded, as_python_program
from echelon.launch.plan import SCHEDULER, Address, Addresses, Plan, PlannedProcess, Request, describe, make_plan
from echelon.launch.report import report_worker_exit
from echelon.launch.run import protect, run_job
from echelon.launch.supervision.children import OnLine, print_line
from echelon.launch.supervision.processes import ChildProcess, RunningProcess
from echelon.transport.listening import LOOPBACK, listen
from echelon.transport.registration import interface_address


class LocalLauncher:
    """Runs all processes on this machine. `address`: where those listen that others connect to first."""

    name = "local"

    def __init__(self, address: str = LOOPBACK) -> None:
        self._address = address

    def add_arguments(self, group: argparse._ArgumentGroup) -> None:
        """Add nothing: the flags of all launchers are enough."""

    def plan(self, request: Request) -> Plan:
        """Put every process on this machine. Workers have the address that groups files name."""
        if request.hosts:
            raise UsageError(
                f"--launcher local starts all processes on this machine, but -H names {len(request.hosts)} hosts: "
                "use --launcher ssh or mpi, or omit -H"
            )
        job = request.job
        host = job.host or (interface_address(job.interface) if job.interface else self._address)
        return make_plan(replace(request, job=replace(job, scheduler_host=host)))

    def describe(self, plan: Plan) -> str:
        """Return the plan as text."""
        return describe(plan)

    def run(self, plan: Plan, output: Output) -> int:
        """Run the job."""
        with ExitStack() as stack:
            listeners = {
                process.name: stack.enter_context(listen(self._address))
                for process in plan.processes
                if process.listens
            }
            first = _address(listeners[f"{WORKER} 0"])
            scheduler = listeners.get(f"{SCHEDULER} 0")
            addresses = Addresses(_address(scheduler) if scheduler else first, first)
            return run_job(plan, output, ChildBackend(plan, listeners, addresses, stack))


def run(job: Job, command: Sequence[str], *, on_line: OnLine = print_line) -> int:
    """Run `command` as every worker of a job on this machine, and return its exit status."""
    launcher = LocalLauncher()
    return launcher.run(protect(launcher.plan(Request(job, command))), Output(on_line))


class ChildBackend:
    """Child processes, of which the scheduler and worker 0 inherit listening sockets.

    `listeners` are those sockets by the name of the process. `one_machine`: the whole job runs on this machine.
    Python programs are forked from one process that has imported torch, if there are at least two of them.
    """

    def __init__(
        self,
        plan: Plan,
        listeners: Mapping[str, socket.socket],
        addresses: Addresses,
        stack: ExitStack,
        *,
        one_machine: bool = True,
    ) -> None:
        self._plan = plan
        self._listeners = listeners
        self._addresses = addresses
        self._one_machine = one_machine
        self._joined = JoinedFile(Path(stack.enter_context(TemporaryDirectory(prefix="echelon-"))) / "joined")
        self._on_joined: Callable[[list[str]], None] = lambda lines: None
        self._restarts = plan.job.num_servers > 0 and plan.job.max_restarts > 0
        self._programs = _forkable(plan)
        self._preloaded: Preloaded | None = None
        if len(self._programs) > 1:
            self._preloaded = Preloaded(self._variables(plan.of_role(WORKER)[0]))
            stack.callback(self._preloaded.close)

    def start(self, planned: PlannedProcess) -> RunningProcess:
        """Start a process."""
        return self._start(planned, self._listeners.get(planned.name))

    def can_restart(self, planned: PlannedProcess) -> bool:
        """Return True: its machine is this one."""
        return True

    def restart(self, planned: PlannedProcess) -> RunningProcess:
        """Start a process again. Worker 0 does not listen again: only workers without servers connect to it."""
        return self._start(planned, self._listeners[planned.name] if planned.role == SCHEDULER else None)

    def release(self, planned: PlannedProcess) -> None:
        """Stop listening for a scheduler that has ended for good."""
        if listener := self._listeners.get(planned.name):
            listener.close()

    def scheduler_address(self) -> Address | None:
        """Return where the scheduler listens."""
        return self._addresses.scheduler

    def _start(self, planned: PlannedProcess, listener: socket.socket | None) -> RunningProcess:
        whole = self._plan.complete(planned, self._addresses)
        environment = {**self._variables(whole), **whole.environment, "ECHELON_JOINED_FILE": str(self._joined.path)}
        shielded = planned.role != WORKER and in_batch_job()
        program = self._programs.get(planned.name)
        if program and self._preloaded and not self._preloaded.failure():
            inherited = None if listener is None else listener.fileno()
            return self._preloaded.start(program, environment, inherited, shielded=shielded)
        fds = [] if listener is None else [listener.fileno()]
        if fds:
            environment["ECHELON_LISTEN_FD"] = str(fds[0])
        return ChildProcess(planned.name, planned.arguments, environment, pass_fds=fds, shielded=shielded)

    def _variables(self, process: PlannedProcess) -> dict[str, str]:
        """Return variables that libraries read when they are imported."""
        if process.role != WORKER:
            return {}
        given, one_machine = process.variables, self._one_machine
        return {
            **library_variables(process.job, process.local_workers, one_machine=one_machine, given=given),
            **given,
        }

    def turn(self) -> None:
        """Close what the children have inherited, and read their notes.

        The socket of the scheduler stays open for a restart, so that connections wait until it listens again.
        """
        for name, listener in self._listeners.items():
            if not (self._restarts and name == f"{SCHEDULER} 0"):
                listener.close()
        if self._preloaded and not self._restarts:
            self._preloaded.no_more()
        if lines := self._joined.new_lines():
            self._on_joined(lines)

    def on_joined(self, handler: Callable[[list[str]], None]) -> None:
        """Pass lines of the file of joined workers to a handler."""
        self._on_joined = handler

    def report_exit(self, exited: WorkerExited) -> None:
        """Tell the scheduler that a worker's process has ended."""
        report_worker_exit(self._plan.complete(self._plan.processes[0], self._addresses).job, exited)


def _forkable(plan: Plan) -> dict[str, list[str]]:
    """Return the Python programs that can be forked, by the name of their process.

    Their own variables must be those of worker 0, with which torch is imported for all of them.
    """
    variables = plan.of_role(WORKER)[0].variables
    found = {
        process.name: as_python_program(process.arguments)
        for process in plan.processes
        if process.role != SCHEDULER and process.variables == variables
    }
    return {name: program for name, program in found.items() if program is not None}


def _address(listener: socket.socket) -> Address:
    return Address(*listener.getsockname()[:2])
