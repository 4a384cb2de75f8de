"""The plan of a job: which process runs on which host, with which command and environment. Pure.

A launcher makes a plan from a `Request`, `--dry-run` prints it, and the launcher starts it. Some ports are chosen when
the job starts, by the machine that listens at them. `Plan.complete` fills them in.
"""

from __future__ import annotations

import itertools
import shlex
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from echelon.cluster.messages import SERVER, WORKER
from echelon.environment import Job
from echelon.errors import UsageError
from echelon.launch.hosts import Host

SCHEDULER = "scheduler"
FREE_PORT = "<free port>"
UNKNOWN_ADDRESS = "<address of {}>"


class Address(NamedTuple):
    """Where a process listens."""

    host: str
    port: int


class Addresses(NamedTuple):
    """Where the processes of a job find each other. `rendezvous`: worker 0, for stores without servers."""

    scheduler: Address
    rendezvous: Address


@dataclass(frozen=True)
class Request:
    """What the user asks a launcher for.

    `job` describes the whole job. `variables` are set for every process, `variables_of` for those of one role.
    `shared_folder` must be the same folder on all hosts and here. `options` are the launcher's own flags.
    """

    job: Job
    command: Sequence[str]
    hosts: tuple[Host, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    variables_of: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    sync_dst_dir: str | None = None
    shared_folder: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PlannedProcess:
    """A process of the job. `host` None: the machine of the launcher. `listens`: it inherits a listening socket."""

    role: str
    rank: int
    host: Host | None
    arguments: Sequence[str]
    job: Job  # as this process sees it
    variables: Mapping[str, str]
    listens: bool = False
    local_workers: int = 1  # workers on its host, which share the cores

    @property
    def name(self) -> str:
        """Its role and rank."""
        return f"{self.role} {self.rank}"

    @property
    def environment(self) -> dict[str, str]:
        """The variables that the job and the user set for it."""
        return {**self.variables, **self.job.to_environment()}


@dataclass(frozen=True)
class Plan:
    """All processes of a job: the scheduler if there are servers, the servers, the workers."""

    request: Request
    processes: tuple[PlannedProcess, ...]

    @property
    def job(self) -> Job:
        """The whole job."""
        return self.request.job

    def of_role(self, role: str) -> list[PlannedProcess]:
        """Return the processes of a role, by rank."""
        return [process for process in self.processes if process.role == role]

    def hosts(self) -> list[Host]:
        """Return the hosts that run a process, in the order of the first one."""
        return list(dict.fromkeys(process.host for process in self.processes if process.host is not None))

    def worker_hosts(self) -> dict[int, str]:
        """Return the host of each worker, as groups files name it."""
        return {process.rank: str(process.host or self.job.scheduler_host) for process in self.of_role(WORKER)}

    def with_credentials(self, credentials: str) -> Plan:
        """Return the plan of a job with this secret."""
        return self.with_settings(credentials=credentials)

    def with_settings(self, **settings: str | None) -> Plan:
        """Return the plan of the same job with other values of these fields of `Job`, for all processes."""

        def give(job: Job) -> Job:
            return replace(job, **settings)  # type: ignore[arg-type]

        processes = tuple(replace(process, job=give(process.job)) for process in self.processes)
        return replace(self, request=replace(self.request, job=give(self.job)), processes=processes)

    def complete(self, process: PlannedProcess, addresses: Addresses) -> PlannedProcess:
        """Return a process of this plan with the addresses of its job."""
        first = addresses.scheduler if self.job.num_servers else addresses.rendezvous
        job = replace(process.job, scheduler_host=first.host, scheduler_port=first.port)
        if self.job.num_servers:
            job = replace(job, rendezvous_host=addresses.rendezvous.host, rendezvous_port=addresses.rendezvous.port)
        return replace(process, job=job)


def make_plan(request: Request, *, scheduler_host: Host | None = None, python: str = sys.executable) -> Plan:
    """Assign every process of a job to a host.

    Servers, then workers, go to the slots of the hosts in turn, so that ranks follow the order of the hosts file.
    Without hosts all run on the launcher's machine. `python` runs the scheduler and the servers.
    """
    check(request.job)
    job, slots = request.job, itertools.cycle(_slots(request.hosts))
    roles = [(SERVER, rank) for rank in range(job.num_servers)] + [(WORKER, rank) for rank in range(job.num_workers)]
    placed = [(role, rank, next(slots)) for role, rank in roles]
    num_workers = Counter(host for role, _, host in placed if role == WORKER)

    def process(role: str, rank: int, host: Host | None) -> PlannedProcess:
        arguments = request.command if role == WORKER else [python, "-m", f"echelon.{role}"]
        variables = {**request.variables, **request.variables_of.get(role, {})}
        listens = role == SCHEDULER or (role, rank) == (WORKER, 0)
        return PlannedProcess(
            role, rank, host, arguments, job.as_role(role, rank), variables, listens, num_workers[host]
        )

    scheduler = [process(SCHEDULER, 0, scheduler_host)] if job.num_servers else []
    return Plan(request, (*scheduler, *itertools.starmap(process, placed)))


def without_restarts(request: Request) -> Request:
    """Return the request of a launcher that cannot restart single processes, so that no process waits for that."""
    return replace(request, job=replace(request.job, max_restarts=0))


def check(job: Job) -> None:
    """Raise UsageError for impossible numbers of processes."""
    if job.num_workers < 1:
        raise UsageError(f"a job needs at least one worker (-n), not {job.num_workers}")
    if job.num_servers < 0:
        raise UsageError(f"the number of servers (-s) cannot be {job.num_servers}")
    if job.max_restarts < 0:
        raise UsageError(f"--max-restarts must be 0 or more, not {job.max_restarts}")
    _check_elastic(job)
    if job.replicas not in (0, 1):
        raise UsageError(f"--replicas must be 0 or 1, not {job.replicas}")
    if job.replicas and job.num_servers < 2:
        raise UsageError(
            f"--replicas {job.replicas} needs at least 2 servers, because the second copy of a slice is on another "
            f"server; this job has {job.num_servers} (-s)"
        )


def _check_elastic(job: Job) -> None:
    """Raise UsageError for numbers of workers between which the job cannot continue."""
    most = job.num_workers if job.max_workers is None else job.max_workers
    if most < job.num_workers:
        raise UsageError(f"--max-workers is {most}, but the job starts with {job.num_workers} workers (-n)")
    if not 1 <= job.min_workers <= job.num_workers:
        raise UsageError(f"--min-workers must be from 1 to {job.num_workers} (-n), not {job.min_workers}")
    for flag, changed in (("--min-workers", job.min_workers > 1), ("--max-workers", most > job.num_workers)):
        if changed and not job.num_servers:
            raise UsageError(
                f"{flag} needs servers (-s 1 or more): a job without servers cannot continue when a worker leaves or "
                "joins"
            )


def describe(plan: Plan) -> str:
    """Return a plan as text: for each process its host, its command and what the job sets in its environment.

    Credentials are not shown.
    """
    return "\n".join(itertools.chain.from_iterable(_describe_process(plan, process) for process in plan.processes))


def shown_environment(plan: Plan, process: PlannedProcess) -> dict[str, str]:
    """Return the environment of a process as a dry run shows it: with placeholders for what is known later."""
    job = replace(process.job, credentials=None)
    variables = {**process.variables, **job.to_environment()}
    listener = plan.processes[0] if plan.job.num_servers else plan.of_role(WORKER)[0]
    if not plan.job.scheduler_port:
        host = listener.host or "this machine"
        variables |= {"DMLC_PS_ROOT_URI": UNKNOWN_ADDRESS.format(host), "DMLC_PS_ROOT_PORT": FREE_PORT}
    return variables


def _describe_process(plan: Plan, process: PlannedProcess) -> Iterator[str]:
    yield f"{process.name} on {process.host or 'this machine'}: {shlex.join(process.arguments)}"
    variables = shown_environment(plan, process)
    yield "    " + " ".join(
        f"{name}={value if value.startswith('<') else shlex.quote(value)}" for name, value in sorted(variables.items())
    )


def _slots(hosts: Sequence[Host]) -> list[Host | None]:
    return [host for host in hosts for _ in range(host.slots)] or [None]
