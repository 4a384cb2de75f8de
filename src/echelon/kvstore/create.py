"""Making a store by name, and what happens in a process whose role is to serve."""

from __future__ import annotations

import atexit
import difflib
import sys
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from echelon.cluster.shares import inline_groups, parse_groups
from echelon.environment import Job
from echelon.errors import UsageError
from echelon.kvstore.client import Client
from echelon.kvstore.local import Loopback
from echelon.kvstore.session import Alone, Joined
from echelon.kvstore.store import KVStore
from echelon.observe.events import EventLog
from echelon.schemes import SCHEMES, rules_for
from echelon.transport import by_name
from echelon.transport.in_process import InProcessTransport
from echelon.transport.interface import Transport

GROUPS_FILE = "groups"  # read from the working directory when nothing else is said, as MXNet-G does
LOCAL = ("local", "device")
NAMES = (*LOCAL, *SCHEMES)
Groups = str | Path | Sequence[Iterable[int]]


def create(
    name: str = "local",
    *,
    staleness: int | None = None,
    groups: Groups | None = None,
    check_finite: bool = False,
    transport: str | None = None,
    job: Job | None = None,
) -> KVStore:
    """The store `name`. Arguments outrank what the launcher's environment says.

    In a process whose `DMLC_ROLE` is server or scheduler this call serves until the job ends and then exits: the same
    script can be started in every role.
    """
    check_name(name)
    job = job or Job.from_environment()
    if transport is not None:
        job = replace(job, transport=transport)
    if job.role != "worker":
        serve_and_exit(job)
    if name in LOCAL:
        return _local(name, check_finite)
    if not job.distributed:
        raise UsageError(
            f"{name} needs a scheduler and servers: start this program with 'echelon launch -n WORKERS -s SERVERS "
            "python …', or set DMLC_PS_ROOT_URI, DMLC_PS_ROOT_PORT, DMLC_NUM_WORKER and DMLC_NUM_SERVER"
        )
    if job.num_servers < 1:
        raise UsageError(f"{name} needs at least one server; the job has {job.num_servers} (launch with -s 1 or more)")
    return join(name, job, by_name(job.transport), staleness=staleness, groups=groups, check_finite=check_finite)


def join(
    name: str,
    job: Job,
    transport: Transport,
    *,
    staleness: int | None = None,
    groups: Groups | None = None,
    check_finite: bool = False,
) -> KVStore:
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
        store = KVStore(
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
    at_exit = partial(_at_exit, store, session)
    atexit.register(at_exit)
    store.on_closed = partial(atexit.unregister, at_exit)
    return store


def check_name(name: str) -> None:
    """An unknown store is an error that lists the names, never a silent local run."""
    if not isinstance(name, str):
        raise UsageError(f"a store is named by a string, not {name!r}")
    if name not in NAMES:
        near = difflib.get_close_matches(name, NAMES, 1, 0.5)
        hint = f"did you mean {near[0]!r}? The" if near else "the"
        raise UsageError(f"there is no store {name!r}; {hint} stores are {', '.join(NAMES)}")


def serve_and_exit(job: Job) -> None:
    """Be the scheduler or a server until the job ends."""
    if job.role == "scheduler":
        from echelon.scheduler import serve as serve_scheduler

        sys.exit(serve_scheduler(job))
    from echelon.server.serve import serve as serve_server

    sys.exit(serve_server(job, by_name(job.transport)))


def _local(name: str, check_finite: bool) -> KVStore:
    transport = InProcessTransport()
    session = Alone()
    job = Job.from_environment()
    events = EventLog.open(job.run_dir, "worker", 0)
    client = Client(Loopback(transport), session, events, 60.0, 600.0)
    return KVStore(name, session, client, 1, transport, events, scheme="dist_sync", check_finite=check_finite)


def _groups(groups: Groups | None, hosts: dict[int, str]) -> list[list[int]] | None:
    if groups is None:
        return None
    if isinstance(groups, str | Path):
        if (text := inline_groups(str(groups))) is not None:
            return [list(group) for group in parse_groups(text, hosts, f"groups {str(groups)!r}")]
        path = Path(groups)
        if not path.is_file():
            raise UsageError(f"there is no groups file {path}; write one group a line, hosts or ranks")
        return [list(group) for group in parse_groups(path.read_text(), hosts, str(path))]
    text = "\n".join(" ".join(str(rank) for rank in group) for group in groups)
    return [list(group) for group in parse_groups(text, hosts)]


def _at_exit(store: KVStore, session: Joined) -> None:
    """A script that ends well leaves in order; one that ends by an exception is seen to die."""
    if getattr(sys, "last_value", None) is not None:
        session.abandon()
    else:
        store.close()
