"""Creating a store by name: one with servers, one with collectives, or both for a worker with several devices.

In a process whose role is server or scheduler, creating a store runs that role instead.
"""

from __future__ import annotations

import atexit
import logging
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from echelon.cluster.shares import Groups, find_groups, read_groups
from echelon.environment import Job
from echelon.errors import REPEATING, JobError, UsageError
from echelon.kvstore.collective.process_group import ProcessGroup
from echelon.kvstore.collective.rendezvous import rendezvous_of_devices, rendezvous_of_store
from echelon.kvstore.collective.store import CollectiveStore
from echelon.kvstore.multi_device import MultiDeviceStore
from echelon.kvstore.servers.client import Client
from echelon.kvstore.servers.session import SESSIONS, Session
from echelon.kvstore.servers.store import ServerStore
from echelon.kvstore.store import KVStore
from echelon.kvstore.uncaught import PRINTED, print_job_errors_in_one_line
from echelon.kvstore.worker import is_thread, transport_for
from echelon.observe.events import EventLog
from echelon.observe.notes import add_note
from echelon.schemes import check_lr_scale, rules_for, store_kind
from echelon.transport.choose import transport_of
from echelon.transport.interface import Transport
from echelon.transport.registration import announce_servers_unused

log = logging.getLogger(__name__)


def create(
    name: str = "local",
    *,
    staleness: int | None = None,
    groups: Groups | None = None,
    lr_scale: str = "share",
    check_finite: bool = False,
    transport: str | None = None,
    device: torch.device | str = "cpu",
    job: Job | None = None,
) -> KVStore:
    """Return the store `name`. Arguments override what the launcher's environment variables say.

    `lr_scale` is how dist_async and dist_ssync scale the step of a push that says its number of samples, as a Trainer's
    pushes do. "share": by its share of the samples of a round, so that one learning rate serves all schemes. "mxnet":
    not at all.

    Each call creates a store of its own, with its own keys, optimizer, scheme and barriers. All workers of a job create
    their stores in the same order. A process joins the job with its first store, and leaves it when it exits.

    `device` is where a store without servers keeps its values: NCCL moves them between GPUs, Gloo between CPUs.

    In a process whose `DMLC_ROLE` is server or scheduler this call serves until the job ends and then exits. The same
    script can therefore be started in every role.
    """
    store_kind(name)  # an unknown name raises an error in every role
    check_lr_scale(lr_scale)
    job = job or Job.from_environment()
    if transport is not None:
        job = replace(job, transport=transport)
    if job.role != "worker":
        serve_and_exit(job)
    _warn_if_alone(name, job)
    if job.rank is not None:
        add_note(job, f"{job.rank} {name}")
    print_job_errors_in_one_line(joins=job.joins)
    kind = store_class(name, job)
    if kind is CollectiveStore:
        return _create_collective(name, job, torch.device(device), check_finite, staleness, groups)
    if not job.distributed:
        raise UsageError(
            f"{name} needs a scheduler and servers: start this program with 'echelon launch -n WORKERS -s SERVERS "
            "python …', or set DMLC_PS_ROOT_URI, DMLC_PS_ROOT_PORT, DMLC_NUM_WORKER and DMLC_NUM_SERVER"
        )
    if job.num_servers < 1:
        raise UsageError(f"{name} needs at least one server; the job has {job.num_servers} (launch with -s 1 or more)")

    def join_servers() -> ServerStore:
        return join(
            name,
            job,
            transport_for(job),
            staleness=staleness,
            groups=groups,
            lr_scale=lr_scale,
            check_finite=check_finite,
        )

    if kind is MultiDeviceStore:
        return _create_multi_device(name, job, torch.device(device), join_servers, check_finite=check_finite)
    return join_servers()


def _warn_if_alone(name: str, job: Job) -> None:
    """Warn about several workers that train independent models: their results look right, so nothing else shows it."""
    if job.num_workers > 1 and job.rank in (0, None) and job.device_index == 0 and not store_kind(name).spans_workers:
        log.warning(
            "the store %s does not synchronize workers: each of the %d workers of this job trains a model of its own; "
            "to train one model, use a dist_ store, such as dist_sync",
            name,
            job.num_workers,
        )


def store_class(name: str, job: Job) -> type[KVStore]:
    """Return the class of the store `name` in this job."""
    kind = store_kind(name)
    if kind.collective or (job.distributed and kind.is_collective(job.num_servers)):
        return CollectiveStore
    return MultiDeviceStore if job.num_devices > 1 else ServerStore


def join(
    name: str,
    job: Job,
    transport: Transport,
    *,
    staleness: int | None = None,
    groups: Groups | None = None,
    lr_scale: str = "share",
    check_finite: bool = False,
) -> ServerStore:
    """Create a store in a job with servers, over a given transport. The first one of a worker joins the job.

    All workers create their stores in the same order.
    """
    kind = store_kind(name)
    if kind.takes_staleness and staleness is None:
        staleness = job.staleness
    if kind.takes_groups and groups is None:
        groups = find_groups(job.groups)
    # Check the settings before the other workers wait for this one. Host names in groups can only be checked later.
    # A worker that joins a running job takes over what it was not given, so the servers check its settings.
    if not job.joins:
        rules_for(name, staleness, [[0]] if isinstance(groups, str | Path) else groups, lr_scale)
    session, is_new = SESSIONS.join(job, transport)
    if is_new:
        add_note(job, f"{session.rank} joined")
    with ExitStack() as undo:
        if is_new:
            undo.push(partial(_leave_after, session))
        store_session = session.open_store()
        undo.callback(store_session.close)
        events = EventLog.open(job.run_dir, "worker", session.rank)
        undo.callback(events.close)
        endpoint = store_session.connect(transport)
        undo.callback(endpoint.close)
        undo.callback(store_session.close)  # before the endpoint is closed, because the session's thread wakes it
        listed = _listed_groups(groups, session)
        if not session.is_late:
            rules_for(name, staleness, listed, lr_scale)
        client = Client(endpoint, store_session, events, job.stall_seconds, job.timeout_s)
        store = ServerStore(
            name,
            store_session,
            client,
            transport,
            events,
            staleness=staleness,
            groups=listed,
            lr_scale=lr_scale,
            check_finite=check_finite,
        )
        undo.pop_all()
    store.on_ledger = partial(add_note, job, f"{session.rank} ledger")
    if session.rank == 0:
        store.record()
    if is_new:
        session.on_left = _call_at_exit(partial(_end, session, job))
    return store


def _leave_after(session: Session, kind: object, error: BaseException | None, trace: object) -> None:
    """Leave the job because of an error. A job that a worker wanted to join learns why it did not."""
    if session.is_late and isinstance(error, UsageError):
        session.leave(str(error), failed=True)
    else:
        session.abandon()


def _end(session: Session, job: Job, failed: bool) -> None:
    """Leave the job at the exit of this process. One that joined and was refused says why.

    After another error that would repeat, the launcher ends the job.
    """
    if job.joins and PRINTED and not session.broken:
        session.leave(PRINTED[0], failed=True)
        return
    if not failed:
        session.finish()
        return
    error = getattr(sys, "last_value", None)
    if isinstance(error, REPEATING) or isinstance(getattr(error, "__cause__", None), REPEATING):
        add_note(job, f"{session.rank} refused")
    session.abandon()


def _listed_groups(groups: Groups | None, session: Session) -> list[list[int]] | None:
    """Return groups of ranks. A late worker cannot tell them from the hosts of those that live: servers know them.

    Another worker may have left before this one reads the groups; it is in them all the same.
    """
    if groups is None or session.is_late:
        return None if groups is None or isinstance(groups, str | Path) else [list(group) for group in groups]
    return read_groups(groups, session.hosts_at_join)


def serve_and_exit(job: Job) -> None:
    """Run as the scheduler or as a server until the job ends, then exit."""
    if job.role == "scheduler":
        from echelon.scheduler import serve as serve_scheduler

        sys.exit(serve_scheduler(job))
    from echelon.server.serve import serve as serve_server

    sys.exit(serve_server(job, transport_of(job)))


def _create_collective(
    name: str, job: Job, device: torch.device, check_finite: bool, staleness: int | None, groups: Groups | None
) -> CollectiveStore:
    if staleness is not None or groups is not None:
        given = "staleness" if staleness is not None else "groups"
        raise UsageError(f"{name} has no {given}: its workers run in lock-step")
    if store_kind(name).spans_workers and not job.distributed:
        raise UsageError(
            f"{name} needs a job: start this program with 'echelon launch -n WORKERS -s 0 python …', with torchrun, or "
            "set DMLC_PS_ROOT_URI, DMLC_PS_ROOT_PORT, DMLC_NUM_WORKER and ECHELON_RANK"
        )
    if store_kind(name).spans_workers and job.num_workers > 1 and is_thread():
        raise UsageError(
            f"{name} without servers cannot run in threads, because torch.distributed has one rank per process: use "
            "--launcher local, or a store with servers (-s 1 or more), such as dist_sync"
        )
    rendezvous = rendezvous_of_store(name, job)
    if job.distributed and job.num_servers and job.device_index == 0:
        announce_servers_unused(job, name)
    group = ProcessGroup(device, rendezvous)
    store = CollectiveStore(name, group, EventLog.open(job.run_dir, "worker", group.rank), check_finite=check_finite)
    if group.rank == 0:
        store.record()
    store.on_closed = _call_at_exit(lambda failed: store.close(failed=failed))
    return store


def _create_multi_device(
    name: str, job: Job, device: torch.device, join_servers: Callable[[], ServerStore], *, check_finite: bool
) -> MultiDeviceStore:
    """Join the process group of this worker's devices; then device 0 joins the job for all of them."""
    if job.device_port is None:
        raise UsageError(
            f"{name}: the {job.num_devices} devices of a worker need a port on their machine for their rendezvous; set "
            "ECHELON_DEVICE_PORT, a different one for each worker"
        )
    group = ProcessGroup(device, rendezvous_of_devices(name, job))
    with ExitStack() as undo:
        undo.callback(group.close, failed=True)
        server_store = join_servers() if job.device_index == 0 else None
        has_events = bool(job.run_dir)
        store = MultiDeviceStore(name, group, server_store, check_finite=check_finite, job_has_events=has_events)
        undo.pop_all()
    store.on_closed = _call_at_exit(lambda failed: store.close(failed=failed))
    return store


def _call_at_exit(end: Callable[[bool], None]) -> Callable[[], None]:
    """Call `end(failed)` when the interpreter exits. Return a function that cancels this.

    After an uncaught exception `failed` is True, so that the other workers see a death and not a normal end.
    """

    def at_exit() -> None:
        try:
            end(getattr(sys, "last_value", None) is not None)
        except JobError as error:
            if str(error) not in PRINTED:
                print(f"error: {error}", file=sys.stderr, flush=True)

    atexit.register(at_exit)
    print_job_errors_in_one_line()
    return partial(atexit.unregister, at_exit)
