"""The local launcher: runs a scheduler, servers and workers as processes of this machine."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from echelon.cluster.messages import WORKER, WorkerExited
from echelon.environment import Job
from echelon.errors import UsageError
from echelon.launch.devices import library_variables
from echelon.launch.joining import Joining
from echelon.launch.processes import LOOPBACK, listen_on_loopback
from echelon.launch.supervise import Command, OnLine, Supervisor, print_line
from echelon.transport.control import frame
from echelon.transport.registration import interface_address


def run(
    job: Job,
    command: Sequence[str],
    *,
    on_line: OnLine = print_line,
    on_tick: Callable[[], None] = lambda: None,
    shown: bool = False,
) -> int:
    """Run `command` as every worker of `job`, and return the first failing exit status, or 0.

    `shown`: the user has seen all lines of the workers, so an error does not repeat the last ones.
    """
    check(job)
    with ExitStack() as stack:
        listener = stack.enter_context(listen_on_loopback())
        port = listener.getsockname()[1]
        # In a job with servers the scheduler has that port. A store without servers needs another one.
        rendezvous = stack.enter_context(listen_on_loopback()) if job.num_servers else listener
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="echelon-")))
        joining = Joining(folder / "joined", job.num_workers)

        def report_end(name: str, how: str, failed: bool) -> None:
            role, rank = name.split()
            if role == WORKER and not failed:
                joining.worker_ended(int(rank))
            if role == WORKER and job.num_servers:
                _send_to_scheduler(port, WorkerExited(int(rank), how, failed))

        def tick() -> None:
            for one in {listener, rendezvous}:  # the processes that inherited them have started
                one.close()
            if missing := joining.missing():
                supervisor.fail(f"{WORKER} {missing[0]}", missing[1])
            on_tick()

        own = replace(job, joined_file=str(joining.path))
        commands = [replace(one, shown=shown) for one in _commands(own, command, listener, rendezvous)]
        supervisor = Supervisor(on_line, tick, report_end)
        status = supervisor.run(commands)
        if not status and (warning := joining.warning()):
            print(f"echelon: warning: {warning}", file=sys.stderr, flush=True)
        return status


def check(job: Job) -> None:
    """Raise UsageError for an invalid job configuration."""
    if job.num_workers < 1:
        raise UsageError(f"a job needs at least one worker (-n), not {job.num_workers}")
    if job.num_servers < 0:
        raise UsageError(f"the number of servers (-s) cannot be {job.num_servers}")
    hosts_of(job)


def hosts_of(job: Job) -> dict[int, str]:
    """Return the host of each worker, as groups files name it."""
    host = job.host or (interface_address(job.interface) if job.interface else LOOPBACK)
    return dict.fromkeys(range(job.num_workers), host)


def _send_to_scheduler(port: int, message: WorkerExited) -> None:
    """Report the end of a worker. Only the launcher can detect that a worker ended before it registered."""
    try:
        with socket.create_connection((LOOPBACK, port), timeout=1.0) as connection:
            connection.sendall(frame(message))
    except OSError:
        pass  # the scheduler has ended, too


def _commands(job: Job, command: Sequence[str], listener: socket.socket, rendezvous: socket.socket) -> list[Command]:
    """Return the commands of all processes. Worker 0 hosts the rendezvous of stores without servers."""
    port = listener.getsockname()[1]
    rendezvous_port = rendezvous.getsockname()[1] if job.num_servers else None

    def process(role: str, rank: int, arguments: Sequence[str], inherits: socket.socket | None = None) -> Command:
        own = replace(job, role=role, rank=rank, scheduler_host=LOOPBACK, scheduler_port=port)
        environment = replace(own, rendezvous_port=rendezvous_port).to_environment()
        if inherits is not None:
            environment["ECHELON_LISTEN_FD"] = str(inherits.fileno())
        if role == WORKER:
            environment |= library_variables(job, job.num_workers, one_machine=True)
        return Command(
            f"{role} {rank}",
            arguments,
            environment,
            essential=role != WORKER,
            pass_fds=(inherits.fileno(),) if inherits is not None else (),
            needed=not job.num_servers,
        )

    workers = [process(WORKER, rank, command, None if rank else rendezvous) for rank in range(job.num_workers)]
    if not job.num_servers:
        return workers
    python = sys.executable
    scheduler = process("scheduler", 0, [python, "-m", "echelon.scheduler"], listener)
    servers = [process("server", rank, [python, "-m", "echelon.server"]) for rank in range(job.num_servers)]
    return [scheduler, *servers, *workers]
