"""Making a store by name: of servers, of collectives, or both; and what a process does whose role is to serve."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from echelon.cluster.shares import parse_groups
from echelon.environment import Job
from echelon.errors import UsageError
from echelon.kvstore.collective.process_group import Group
from echelon.kvstore.collective.rendezvous import Meeting
from echelon.kvstore.collective.store import SHARDED, CollectiveStore
from echelon.kvstore.groups import read_groups
from echelon.kvstore.multi_device import MultiDeviceStore
from echelon.kvstore.servers.client import Client
from echelon.kvstore.servers.session import Joined
from echelon.kvstore.servers.store import ServerStore
from echelon.kvstore.store import KVStore
from echelon.observe.events import EventLog
from echelon.schemes import SCHEMES, rules_for
from echelon.suggestions import unknown_name
from echelon.transport import by_name
from echelon.transport.interface import Transport

GROUPS_FILE = "groups"  # read from the working directory when nothing else is said, as MXNet-G does
ONE_WORKER = ("local", "device", "nccl_allreduce", SHARDED)  # collectives between the devices of a worker
ALL_WORKERS = ("dist_device_sync", "dist_sync_device")  # and between those of all workers
NAMES = (*ONE_WORKER, *SCHEMES, *ALL_WORKERS)
Groups = str | Path | Sequence[Iterable[int]]


def create(
    name: str = "local",
    *,
    staleness: int | None = None,
    groups: Groups | None = None,
    check_finite: bool = False,
    transport: str | None = None,
    device: torch.device | str = "cpu",
    job: Job | None = None,
) -> KVStore:
    """The store `name`. Arguments outrank what the launcher's environment says.

    `device` is where a store without servers keeps its values: NCCL moves them between GPUs, Gloo between CPUs.

    In a process whose `DMLC_ROLE` is server or scheduler this call serves until the job ends and then exits: the same
    script can be started in every role.
    """
    check_name(name)
    job = job or Job.from_environment()
    if transport is not None:
        job = replace(job, transport=transport)
    if job.role != "worker":
        serve_and_exit(job)
    if is_collective(name, job):
        return _collective(name, job, torch.device(device), check_finite, staleness, groups)
    if not job.distributed:
        raise UsageError(
            f"{name} needs a scheduler and servers: start this program with 'echelon launch -n WORKERS -s SERVERS "
            "python …', or set DMLC_PS_ROOT_URI, DMLC_PS_ROOT_PORT, DMLC_NUM_WORKER and DMLC_NUM_SERVER"
        )
    if job.num_servers < 1:
        raise UsageError(f"{name} needs at least one server; the job has {job.num_servers} (launch with -s 1 or more)")
    if has_devices(job):
        return _with_devices(name, job, torch.device(device), check_finite, staleness, groups)
    return join(name, job, by_name(job.transport), staleness=staleness, groups=groups, check_finite=check_finite)


def is_collective(name: str, job: Job | None = None) -> bool:
    """Whether a store of this name, in this job, is one without servers."""
    if name == "dist_sync":
        job = job or Job.from_environment()
        return job.distributed and job.num_servers == 0
    return name in ONE_WORKER or name in ALL_WORKERS


def has_devices(job: Job | None = None) -> bool:
    """Whether a worker of this job is several processes, one a device."""
    return (job or Job.from_environment()).num_devices > 1


def join(
    name: str,
    job: Job,
    transport: Transport,
    *,
    staleness: int | None = None,
    groups: Groups | None = None,
    check_finite: bool = False,
) -> ServerStore:
    """Join a job as a worker over a given transport."""
    if name in ("dist_ssync", "dist_gsync") and staleness is None:
        staleness = job.staleness
    if groups is None and name == "dist_gsync":
        groups = job.groups or (GROUPS_FILE if Path(GROUPS_FILE).is_file() else None)
    # What can be wrong is said before anybody waits for this worker; who is in which group is known after.
    rules_for(name, staleness, [[0]] if isinstance(groups, str | Path) else groups)
    session = Joined(job, transport)
    with ExitStack() as undo:
        undo.callback(session.abandon)
        events = EventLog.open(job.run_dir, "worker", session.rank)
        undo.callback(events.close)
        endpoint = transport.connect(f"worker-{session.rank}", [server.address for server in session.servers])
        undo.callback(endpoint.close)
        undo.callback(session.abandon)  # undone before the endpoint, which its thread wakes
        session.on_news = endpoint.wake
        listed = _groups(groups, session.hosts)
        rules_for(name, staleness, listed)
        client = Client(endpoint, session, events, job.stall_seconds, job.timeout_s)
        store = ServerStore(
            name,
            session,
            client,
            len(session.servers),
            transport,
            events,
            scheme=name,
            staleness=staleness,
            groups=listed,
            check_finite=check_finite,
        )
        undo.pop_all()
    _call_at_exit(store, lambda failed: session.abandon() if failed else store.close())
    return store


def check_name(name: str) -> None:
    """An unknown store is an error that lists the names, never a silent local run."""
    if not isinstance(name, str):
        raise UsageError(f"a store is named by a string, not {name!r}")
    if name not in NAMES:
        raise unknown_name("store", name, NAMES)


def serve_and_exit(job: Job) -> None:
    """Be the scheduler or a server until the job ends."""
    if job.role == "scheduler":
        from echelon.scheduler import serve as serve_scheduler

        sys.exit(serve_scheduler(job))
    from echelon.server.serve import serve as serve_server

    sys.exit(serve_server(job, by_name(job.transport)))


def _collective(
    name: str, job: Job, device: torch.device, check_finite: bool, staleness: int | None, groups: Groups | None
) -> CollectiveStore:
    if staleness is not None or groups is not None:
        given = "staleness" if staleness is not None else "groups"
        raise UsageError(f"{name} has no {given}: its workers go in lock-step")
    if name not in ONE_WORKER and not job.distributed:
        raise UsageError(
            f"{name} needs a job: start this program with 'echelon launch -n WORKERS -s 0 python …', with torchrun, or "
            "set DMLC_PS_ROOT_URI, DMLC_PS_ROOT_PORT, DMLC_NUM_WORKER and ECHELON_RANK"
        )
    group = Group(device, meeting_of(name, job))
    store = CollectiveStore(name, group, EventLog.open(job.run_dir, "worker", group.rank), check_finite=check_finite)
    _call_at_exit(store, lambda failed: store.close(failed=failed))
    return store


def _with_devices(
    name: str, job: Job, device: torch.device, check_finite: bool, staleness: int | None, groups: Groups | None
) -> MultiDeviceStore:
    """A worker whose devices meet first; then device 0 joins the job for all of them."""
    if job.device_port is None:
        raise UsageError(
            f"{name}: the {job.num_devices} devices of a worker need a port of their machine to meet at; set "
            "ECHELON_DEVICE_PORT, for each worker another"
        )
    group = Group(device, meeting_of("device", job))
    with ExitStack() as undo:
        undo.callback(group.close, failed=True)
        served = None
        if job.device_index == 0:
            transport = by_name(job.transport)
            served = join(name, job, transport, staleness=staleness, groups=groups, check_finite=check_finite)
        store = MultiDeviceStore(name, group, served, check_finite=check_finite)
        undo.pop_all()
    _call_at_exit(store, lambda failed: store.close(failed=failed))
    return store


def meeting_of(name: str, job: Job) -> Meeting | None:
    """Where the group of a store without servers meets: a worker's own devices, or everybody's. None: it is alone."""
    devices, everybody = job.num_devices, name not in ONE_WORKER
    workers = range(job.num_workers) if everybody else [job.rank or 0]
    if len(workers) * devices == 1:
        return None
    if job.rank is None and everybody:
        raise UsageError(f"{name}: this worker does not know its rank; set ECHELON_RANK, 0 to {job.num_workers - 1}")
    own_meeting = not everybody and job.device_port is not None
    if job.num_workers > 1 and not everybody and not own_meeting:
        raise UsageError(
            f"{name} is for the devices of one worker, and this job has {job.num_workers} workers: use dist_device_sync"
        )
    port = job.device_port if own_meeting else job.scheduler_port
    if not port:
        raise UsageError(f"{name}: {devices} devices need a port to meet at; set ECHELON_DEVICE_PORT")
    suffix = [f", device {index}" for index in range(devices)] if devices > 1 else [""]
    return Meeting(
        rank=(job.rank or 0) * devices * everybody + job.device_index,
        size=len(workers) * devices,
        host="127.0.0.1" if own_meeting else job.scheduler_host,
        port=port,
        names=[f"worker {worker}{device}" for worker in workers for device in suffix],
        listen_fd=job.device_fd if own_meeting else job.listen_fd,
        hosted=job.meeting_hosted and not own_meeting,
        timeout_s=job.timeout_s,
        stall_seconds=job.stall_seconds,
    )


def _groups(groups: Groups | None, hosts: dict[int, str]) -> list[list[int]] | None:
    if groups is None:
        return None
    if isinstance(groups, str | Path):
        return read_groups(groups, hosts)
    text = "\n".join(" ".join(str(rank) for rank in group) for group in groups)
    return [list(group) for group in parse_groups(text, hosts)]


def _call_at_exit(store: ServerStore | CollectiveStore | MultiDeviceStore, end: Callable[[bool], None]) -> None:
    """A script that ends well leaves in order; one that ends by an exception is seen to die."""

    def at_exit() -> None:
        end(getattr(sys, "last_value", None) is not None)

    atexit.register(at_exit)
    store.on_closed = partial(atexit.unregister, at_exit)
