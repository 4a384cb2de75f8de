"""Running a planned job under the supervisor: what all launchers share, once they can start processes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from types import MappingProxyType
from typing import Protocol

from echelon.cluster.messages import SERVER, WORKER, WorkerExited
from echelon.errors import USAGE
from echelon.launch.interface import Output
from echelon.launch.join_line import JoinLine
from echelon.launch.joining import Joining
from echelon.launch.plan import SCHEDULER, Address, Plan, PlannedProcess
from echelon.launch.supervision.children import Command, start_child
from echelon.launch.supervision.processes import RunningProcess
from echelon.launch.supervision.restarts import Restart, Restarts, is_replaceable
from echelon.launch.supervision.supervise import Supervisor
from echelon.launch.supervision.verdict import Verdict
from echelon.observe.events import append_event
from echelon.observe.machine import command_line, commit, machine, own_version
from echelon.observe.resource_events import ResourceEvents
from echelon.transport.admission.credentials import with_credentials


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

    def can_restart(self, planned: PlannedProcess) -> bool:
        """Return whether a process that has ended can be started again where it ran."""
        ...

    def restart(self, planned: PlannedProcess) -> RunningProcess:
        """Start a process that has ended again, or begin to. The scheduler listens at the same address as before."""
        ...

    def release(self, planned: PlannedProcess) -> None:
        """Give up what is kept for a restart of a process, which has ended for good."""
        ...

    def scheduler_address(self) -> Address | None:
        """Return where workers that join the running job reach the scheduler, once that is known."""
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
    joins: bool = False,
) -> int:
    """Run a plan to its end, and return 0, the first failing exit status, or 128 + the number of a signal.

    `helpers` are programs of this machine that run as long as the job. `watched` maps files of the launcher, such as
    that of a hub, to what is called whenever they are readable. `workers_elsewhere`: the plan is one node's part of the
    job, so its servers continue after its worker, unless that one has ended before it joined the job. `joins`: the plan
    has workers that join a job of another launcher.
    """
    if not joins:
        _record_job(plan)
    job = _Job(plan, output, backend, workers_elsewhere=workers_elsewhere, joins=joins)
    return job.run(helpers, watched)


class _Job:
    """One run of a plan: what the supervisor starts, asks and reports, answered from the notes of the processes."""

    def __init__(self, plan: Plan, output: Output, backend: Backend, *, workers_elsewhere: bool, joins: bool) -> None:
        self._plan, self._output, self._backend = plan, output, backend
        self._workers_elsewhere, self._joins = workers_elsewhere, joins
        self._planned = {process.name: process for process in plan.processes}
        self._joining = Joining(plan.job.num_workers)
        self._join_line = JoinLine(plan)
        self._resources = ResourceEvents(None if plan.hosts() else plan.job.run_dir)
        self._supervisor = Supervisor(
            output.on_line,
            self._tick,
            self._report_end,
            self._start,
            needed_elsewhere=self._is_needed_elsewhere,
            has_ledger=lambda: self._joining.has_ledger,
            restarter=_JobRestarts(plan, backend, self._joining),
            verdict=self._verdict,
        )
        backend.on_joined(self._joining.add_lines)

    def run(self, helpers: Sequence[Command], watched: Mapping[int, Callable[[], None]]) -> int:
        """Run to the end, and return the exit status."""
        for fileno, on_readable in watched.items():
            self._supervisor.watch(fileno, on_readable)
        commands = [_command(self._plan, process, shown=self._output.shown) for process in self._plan.processes]
        with closing(self._resources), closing(self._join_line):
            try:
                status = self._supervisor.run([*commands, *helpers])
            finally:
                for process in self._plan.processes:
                    self._backend.release(process)
        if not status and (warning := self._joining.warning()):
            _say(f"warning: {warning}")
        return status

    def _start(self, command: Command) -> RunningProcess:
        process = self._planned.get(command.name)
        return self._backend.start(process) if process else start_child(command)

    def _report_end(self, name: str, how: str, failed: bool) -> None:
        process = self._planned.get(name)
        if process is None:
            return
        self._backend.release(process)
        if process.role != WORKER:
            return
        if not failed:
            self._joining.worker_ended(process.rank)
        if self._plan.job.num_servers:
            self._backend.report_exit(WorkerExited(process.rank, how, failed))

    def _tick(self) -> None:
        self._backend.turn()
        self._pass_on_notes()
        self._resources.tick()
        self._output.on_tick()

    def _pass_on_notes(self) -> None:
        """Pass missing and lost processes to the supervisor, and print once how workers can join."""
        joining = self._joining
        if missing := joining.missing():
            self._supervisor.fail(f"{WORKER} {missing[0]}", missing[1])
        for name, pid in joining.take_lost().items():
            self._supervisor.set_lost(name, pid)
        can_join = joining.has_started and not self._joins
        if can_join and (line := self._join_line.take(self._backend.scheduler_address())):
            _say(line)

    def _is_needed_elsewhere(self) -> bool:
        """Return whether workers of other launchers need the servers of this one."""
        self._backend.turn()  # read who has joined
        job, joining = self._plan.job, self._joining
        can_join = (job.max_workers or 0) > job.num_workers  # these may train on without those of this launcher
        return joining.has_joined and (self._workers_elsewhere or (can_join and not joining.is_over))

    def _verdict(self) -> Verdict | None:
        self._backend.turn()  # read the newest notes
        return self._joining.verdict


class _JobRestarts:
    """Restarts the processes of a plan where they ran, as far as the state of the job permits."""

    def __init__(self, plan: Plan, backend: Backend, joining: Joining) -> None:
        self._planned = {process.name: process for process in plan.processes}
        self._run_dir = plan.job.run_dir
        self._backend, self._joining = backend, joining
        self._restarts = Restarts(plan.job.max_restarts if plan.job.num_servers else 0)

    def plan(self, name: str, code: int, now: float) -> Restart | None:
        """Return when a process that ended with `code` is started again; None: not at all."""
        process, joining = self._planned.get(name), self._joining
        if process is None or not self._backend.can_restart(process):
            return None
        if process.job.joins and code == USAGE:
            return None  # the job would refuse it again
        self._backend.turn()  # read the newest notes
        if name in joining.refused or not is_replaceable(
            process.role,
            code,
            has_started=joining.has_started,
            has_ledger=joining.has_ledger,
            is_over=joining.is_over,
        ):
            return None
        return self._restarts.next(name, now)

    def ends_job(self, name: str) -> bool:
        """Return whether the failure of a process would repeat, so that the job ends."""
        joining = self._joining
        return name in joining.refused and joining.has_started and joining.has_ledger and not joining.is_over

    def start(self, name: str, number: int) -> RunningProcess:
        """Start a process for the `number`-th time again."""
        process = self._planned[name]
        if self._run_dir is not None:
            append_event(self._run_dir, "launcher", 0, "restart", process=name, number=number)
        return self._backend.restart(replace(process, job=replace(process.job, restarts=number)))


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
        judge=process.role == SCHEDULER,
        replicated=process.role == SERVER and plan.job.replicas > 0,
    )


def _say(text: str) -> None:
    print(f"echelon: {text}", file=sys.stderr, flush=True)
