"""The local launcher: a scheduler, servers and workers as processes of this machine."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

from echelon.cluster.messages import WORKER, WorkerExited
from echelon.environment import Job
from echelon.errors import UsageError
from echelon.launch.devices import threads_and_interface
from echelon.launch.supervise import Command, Line, Supervisor, print_line
from echelon.transport.control import frame
from echelon.transport.registration import interface_address

LOOPBACK = "127.0.0.1"


def run(
    job: Job,
    command: Sequence[str],
    *,
    on_line: Line = print_line,
    on_tick: Callable[[], None] = lambda: None,
    shown: bool = False,
) -> int:
    """Run `command` as every worker of `job`; returns the first failing exit status, or 0.

    `shown`: whoever reads the error has seen all lines, so the last ones need not be told again.
    """
    check(job)
    # The scheduler inherits a bound socket, so no other program can take its port in between.
    with socket.create_server((LOOPBACK, 0), backlog=128) as listener:
        listener.set_inheritable(True)
        port = listener.getsockname()[1]

        def tell_scheduler(name: str, how: str, failed: bool) -> None:
            role, rank = name.split()
            if role == WORKER and job.num_servers:
                _tell(port, WorkerExited(int(rank), how, failed))

        def tick() -> None:
            listener.close()  # who inherited it is started: others would knock here in vain when that one is gone
            on_tick()

        commands = [replace(one, shown=shown) for one in _commands(job, command, port, listener.fileno())]
        return Supervisor(on_line, tick, tell_scheduler).run(commands)


def check(job: Job) -> None:
    """Refuse a job that cannot be."""
    if job.num_workers < 1:
        raise UsageError(f"a job needs at least one worker (-n), not {job.num_workers}")
    if job.num_servers < 0:
        raise UsageError(f"the number of servers (-s) cannot be {job.num_servers}")
    hosts_of(job)


def hosts_of(job: Job) -> dict[int, str]:
    """Where each worker will be, as groups files name it."""
    host = job.host or (interface_address(job.interface) if job.interface else LOOPBACK)
    return dict.fromkeys(range(job.num_workers), host)


def _tell(port: int, message: WorkerExited) -> None:
    """A worker that ends before it registers is news only a launcher has."""
    try:
        with socket.create_connection((LOOPBACK, port), timeout=1.0) as connection:
            connection.sendall(frame(message))
    except OSError:
        pass  # the scheduler is gone, too


def _commands(job: Job, command: Sequence[str], port: int, listener: int) -> list[Command]:
    def process(role: str, rank: int, arguments: Sequence[str], **extra: str) -> Command:
        mine = replace(job, role=role, rank=rank, scheduler_host=LOOPBACK, scheduler_port=port)
        environment = mine.to_environment() | extra
        if role == "worker":
            environment |= threads_and_interface(job, job.num_workers, one_machine=True)
        fds = (listener,) if "ECHELON_LISTEN_FD" in extra else ()
        return Command(f"{role} {rank}", arguments, environment, role != "worker", fds, not job.num_servers)

    if not job.num_servers:  # worker 0 hosts the meeting of stores that have no servers
        first = process("worker", 0, command, ECHELON_LISTEN_FD=str(listener))
        return [first, *(process("worker", rank, command) for rank in range(1, job.num_workers))]
    workers = [process("worker", rank, command) for rank in range(job.num_workers)]
    python = sys.executable
    scheduler = process("scheduler", 0, [python, "-m", "echelon.scheduler"], ECHELON_LISTEN_FD=str(listener))
    servers = [process("server", rank, [python, "-m", "echelon.server"]) for rank in range(job.num_servers)]
    return [scheduler, *servers, *workers]
