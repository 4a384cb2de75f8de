"""Running a planned job under the supervisor: what all launchers share, once they can start processes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from types import MappingProxyType
from typing import Protocol

from echelon.cluster.messages import WORKER, WorkerExited
from echelon.launch.interface import Output
from echelon.launch.joining import Joining
from echelon.launch.plan import Plan, PlannedProcess
from echelon.launch.processes import RunningProcess
from echelon.launch.supervise import Command, Supervisor, start_child
from echelon.observe.events import append_event
from echelon.observe.machine import command_line, commit, machine, own_version
from echelon.observe.resource_events import ResourceEvents
from echelon.transport.credentials import with_credentials


class Backend(Protocol):
    """Starts the processes of a plan."""

    def start(self, planned: PlannedProcess) -> RunningProcess:
        """Start a process, or begin to."""
        ...

    def turn(self) -> None:
        """Do what is due. Called several times per second."""
        ...

    def on_joined(self, handler: Callable[[list[str]], None]) -> None:
        """Pass lines of the file of joined workers to a handler."""
        ...

    def report_exit(self, exited: WorkerExited) -> None:
        """Tell the scheduler that a worker's process has ended."""
        ...


def protect(plan: Plan) -> Plan:
    """Return a plan whose job has a secret of its own, unless it runs without protection or the user gave a secret."""
    credentials = with_credentials(plan.job).credentials
    return plan if credentials is None else plan.with_credentials(credentials)


def run_job(
    plan: Plan,
    output: Output,
    backend: Backend,
    helpers: Sequence[Command] = (),
    watched: Mapping[int, Callable[[], None]] = MappingProxyType({}),
    *,
    workers_elsewhere: bool = False,
) -> int:
    """Run a plan to its end, and return 0, the first failing exit status, or 128 + the number of a signal.

    `helpers` are programs of this machine that run as long as the job. `watched` maps files of the launcher, such as
    that of a hub, to what is called whenever they are readable. `workers_elsewhere`: the plan is one node's part of the
    job, so its servers continue after its worker, unless that one has ended before it joined the job.
    """
    _record_job(plan)
    resources = ResourceEvents(None if plan.hosts() else plan.job.run_dir)
    planned = {process.name: process for process in plan.processes}
    joining = Joining(plan.job.num_workers)
    backend.on_joined(joining.add_lines)

    def start(command: Command) -> RunningProcess:
        process = planned.get(command.name)
        return backend.start(process) if process else start_child(command)

    def report_end(name: str, how: str, failed: bool) -> None:
        process = planned.get(name)
        if process is None or process.role != WORKER:
            return
        if not failed:
            joining.worker_ended(process.rank)
        if plan.job.num_servers:
            backend.report_exit(WorkerExited(process.rank, how, failed))

    def tick() -> None:
        backend.turn()
        if missing := joining.missing():
            supervisor.fail(f"{WORKER} {missing[0]}", missing[1])
        resources.tick()
        output.on_tick()

    def needed_elsewhere() -> bool:
        backend.turn()  # read who has joined
        return workers_elsewhere and joining.has_joined

    supervisor = Supervisor(output.on_line, tick, report_end, start, needed_elsewhere=needed_elsewhere)
    for fileno, on_readable in watched.items():
        supervisor.watch(fileno, on_readable)
    commands = [_command(plan, process, shown=output.shown) for process in plan.processes]
    with closing(resources):
        status = supervisor.run([*commands, *helpers])
    if not status and (warning := joining.warning()):
        print(f"echelon: warning: {warning}", file=sys.stderr, flush=True)
    return status


def _record_job(plan: Plan) -> None:
    """Write to the event log of the run what is started, by which command, and on which machine."""
    if plan.job.run_dir is not None:
        append_event(
            plan.job.run_dir,
            "launcher",
            0,
            "job",
            num_workers=plan.job.num_workers,
            num_servers=plan.job.num_servers,
            num_machines=len(set(plan.worker_hosts().values())),
            command=command_line(),
            machine=machine(),
            commit=commit(),
            version=own_version(),
        )


def _command(plan: Plan, process: PlannedProcess, *, shown: bool) -> Command:
    """Return what the supervisor knows about a process."""
    is_worker = process.role == WORKER
    return Command(
        process.name,
        process.arguments,
        {},
        essential=not is_worker,
        needed=is_worker and not plan.job.num_servers,
        shown=shown,
    )
