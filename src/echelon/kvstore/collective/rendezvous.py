"""Rendezvous of a process group: its members find each other at a TCP store, which rank 0 hosts.

A waiting process prints every `stall_seconds` which members it waits for, and after `timeout_s` it raises an error.
This module does the waiting itself, because torch's own waits cannot be interrupted or observed, and print pages of
warnings when they time out.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_futures
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from echelon.environment import Job
from echelon.errors import JobError, UsageError
from echelon.schemes.stores import store_kind
from echelon.transport.admission.credentials import Security
from echelon.transport.control import Deadline
from echelon.transport.listening import listen

POLL_S = 0.02
CONNECT_S = 5.0


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the members of a process group find each other, and which member this process is."""

    rank: int
    size: int
    host: str
    port: int
    names: Sequence[str]  # of all members, for error messages
    listen_fd: int | None = None  # rank 0's inherited listening socket at this address
    hosted: bool = False  # another process already hosts a store at this address
    timeout_s: float = 600.0
    stall_seconds: float = 10.0
    secret_prefix: str = ""  # of all keys: torch's store admits everybody, and others do not know where to look

    @property
    def name(self) -> str:
        """The name of this process."""
        return self.names[self.rank]

    @property
    def address(self) -> str:
        """Host and port, for messages."""
        return f"{self.host}:{self.port}"

    @property
    def is_host(self) -> bool:
        """Whether this process hosts the store."""
        return self.rank == 0 and not self.hosted


def rendezvous_of_store(name: str, job: Job) -> Rendezvous | None:
    """Return the rendezvous of a store without servers, or None if this process is the only member of its group."""
    if not store_kind(name).spans_workers:
        return rendezvous_of_devices(name, job)
    if job.num_workers * job.num_devices == 1:
        return None
    if job.rank is None:
        raise UsageError(f"{name}: this worker has no rank; set ECHELON_RANK, 0 to {job.num_workers - 1}")
    if job.num_servers and job.rendezvous_port is None:
        raise UsageError(
            f"{name} runs without servers, but the job has {job.num_servers}, and its scheduler listens at "
            f"{job.scheduler_host}:{job.scheduler_port}: set DMLC_NUM_SERVER=0 for the workers and start neither, or "
            "set ECHELON_RENDEZVOUS_PORT to a free port of worker 0's machine, and ECHELON_RENDEZVOUS_HOST to the "
            "address of that machine if it is another one"
        )
    return Rendezvous(
        rank=job.rank * job.num_devices + job.device_index,
        size=job.num_workers * job.num_devices,
        host=job.rendezvous_host or job.scheduler_host,
        port=job.rendezvous_port or job.scheduler_port,
        names=[name for worker in range(job.num_workers) for name in _device_names(worker, job)],
        listen_fd=job.listen_fd,
        hosted=job.rendezvous_hosted,
        timeout_s=job.timeout_s,
        stall_seconds=job.stall_seconds,
        secret_prefix=_secret_prefix(job),
    )


def rendezvous_of_devices(name: str, job: Job) -> Rendezvous | None:
    """Return the rendezvous of this worker's devices, or None if it has only one.

    Their own port is used, if there is one. Otherwise the job's port is free for it, provided the job has one worker.
    """
    if job.num_devices == 1:
        return None
    own = job.device_port is not None
    if job.num_workers > 1 and not own:
        raise UsageError(
            f"{name} is for the devices of one worker, and this job has {job.num_workers} workers: use dist_device_sync"
        )
    port = job.device_port or job.scheduler_port
    if not port:
        raise UsageError(
            f"{name}: the {job.num_devices} devices need a port for their rendezvous; set ECHELON_DEVICE_PORT"
        )
    return Rendezvous(
        rank=job.device_index,
        size=job.num_devices,
        host="127.0.0.1" if own else job.scheduler_host,
        port=port,
        names=_device_names(job.rank or 0, job),
        listen_fd=job.device_fd if own else job.listen_fd,
        hosted=job.rendezvous_hosted and not own,
        timeout_s=job.timeout_s,
        stall_seconds=job.stall_seconds,
        secret_prefix=_secret_prefix(job),
    )


def _secret_prefix(job: Job) -> str:
    """Return a text that only processes of the job know, if a launcher or the user has given them a secret."""
    if not (job.credentials or job.credentials_file):
        return ""
    credentials = Security.of(job).credentials
    return credentials.derive("rendezvous") if credentials else ""


def _device_names(worker: int, job: Job) -> list[str]:
    if job.num_devices == 1:
        return [f"worker {worker}"]
    return [f"worker {worker}, device {index}" for index in range(job.num_devices)]


class Rounds:
    """Counts the rendezvous of this process at each address.

    A member of a later process group may still reach the store of an earlier one, whose host is about to close it.
    Every round has its own key prefix, so that keys of an earlier round are not taken for keys of this one.
    """

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, int]] = Counter()

    def next_prefix(self, rendezvous: Rendezvous) -> str:
        """Return the key prefix of a new round at an address."""
        self._counts[rendezvous.host, rendezvous.port] += 1
        return f"{rendezvous.secret_prefix}rendezvous {self._counts[rendezvous.host, rendezvous.port]}"


ROUNDS = Rounds()


def open_store(rendezvous: Rendezvous, rounds: Rounds = ROUNDS) -> Store:
    """Host the store or connect to it, and wait until all members have arrived."""
    prefix = rounds.next_prefix(rendezvous)
    deadline = Deadline(rendezvous.name, rendezvous.timeout_s, rendezvous.stall_seconds)
    store = _open_round(rendezvous, prefix, deadline)
    keys = {f"here/{rank}": name for rank, name in enumerate(rendezvous.names)}
    try:
        store.set(f"here/{rendezvous.rank}", "")
        _wait_for_keys(rendezvous, store, keys, deadline)
    except JobError:
        raise
    except RuntimeError as error:
        raise _host_disconnected(rendezvous) from error
    return store


def first_sentence(error: RuntimeError) -> str:
    """Return the first sentence of an error from torch, without the source position in front of it."""
    return re.sub(r"^\[\S+\] ", "", str(error)).splitlines()[0].split(". ")[0]


def _open_round(rendezvous: Rendezvous, prefix: str, deadline: Deadline) -> Store:
    """Return the store of this round.

    If the connection breaks, it was to the store of an earlier round whose host is closing it; then connect again.
    """
    while True:
        store = PrefixStore(prefix, _connect(rendezvous, deadline))
        try:
            if rendezvous.rank == 0:
                store.set("open", "")
            _wait_for_keys(rendezvous, store, {"open": rendezvous.names[0]}, deadline)
            return store
        except JobError:
            raise
        except RuntimeError as error:
            if deadline.expired:
                raise _host_disconnected(rendezvous) from error


def _connect(rendezvous: Rendezvous, deadline: Deadline) -> Store:
    """Return a connection to the store. A host that listens but does not answer yet would block torch forever."""
    if not rendezvous.is_host:
        _wait_until_reachable(rendezvous, deadline)
    opening = _call_in_thread(lambda: _create_store(rendezvous, deadline.left_s))
    while not wait_for_futures([opening], POLL_S).done:
        if deadline.expired:
            raise _host_unreachable(rendezvous, f"it listens, but has not answered in {rendezvous.timeout_s:g} s")
        deadline.report(lambda: _describe_host(rendezvous))
    try:
        return opening.result()
    except RuntimeError as error:
        raise _host_unreachable(rendezvous, first_sentence(error)) from error


def _wait_until_reachable(rendezvous: Rendezvous, deadline: Deadline) -> None:
    """Wait until the host listens. Torch would print a warning for every failed attempt."""
    while True:
        try:
            timeout_s = min(CONNECT_S, deadline.left_s)
            socket.create_connection((rendezvous.host, rendezvous.port), timeout_s).close()
            return
        except OSError as error:
            why = str(error)
            if deadline.expired:
                raise _host_unreachable(rendezvous, why) from error
            deadline.report(lambda: f"{_describe_host(rendezvous)} ({why})")  # noqa: B023  (called at once)
        time.sleep(POLL_S)


def _create_store(rendezvous: Rendezvous, timeout_s: float) -> Store:
    fd: dict[str, Any] = {}
    if rendezvous.is_host and rendezvous.listen_fd is not None:
        fd["master_listen_fd"] = _duplicate_socket(rendezvous.listen_fd)
    elif rendezvous.is_host and _is_ip_address(rendezvous.host):  # otherwise torch would listen at all addresses
        fd["master_listen_fd"] = _listen(rendezvous).detach()
    timeout = timedelta(seconds=timeout_s)
    return TCPStore(rendezvous.host, rendezvous.port, None, rendezvous.is_host, timeout, wait_for_workers=False, **fd)


def _listen(rendezvous: Rendezvous) -> socket.socket:
    try:
        return listen(rendezvous.host, rendezvous.port)
    except OSError as error:
        raise RuntimeError(os.strerror(error.errno or 0)) from error


def _is_ip_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _wait_for_keys(rendezvous: Rendezvous, store: Store, keys: Mapping[str, str], deadline: Deadline) -> None:
    """Wait until every key is in the store. `keys` maps each key to the name of the member that sets it."""

    def missing() -> str:
        return ", ".join(name for key, name in keys.items() if not store.check([key]))

    while not store.check(list(keys)):
        if deadline.expired:
            raise JobError(
                f"{rendezvous.name}: {missing()} did not arrive at {rendezvous.address} in {rendezvous.timeout_s:g} s"
            )
        deadline.report(lambda: f"{missing()} to arrive at {rendezvous.address}")
        time.sleep(POLL_S)


def _call_in_thread(function: Callable[[], Store]) -> Future[Store]:
    """Call a function in a daemon thread, which does not keep the process from exiting."""
    future: Future[Store] = Future()

    def body() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=body, name="echelon-rendezvous", daemon=True).start()
    return future


def _describe_host(rendezvous: Rendezvous) -> str:
    return f"{rendezvous.names[0]}, which hosts the rendezvous at {rendezvous.address}"


def _host_unreachable(rendezvous: Rendezvous, why: str) -> JobError:
    if rendezvous.is_host:
        return JobError(f"{rendezvous.name}: this process cannot listen at {rendezvous.address} ({why})")
    return JobError(f"{rendezvous.name}: cannot connect to {_describe_host(rendezvous)} ({why})")


def _host_disconnected(rendezvous: Rendezvous) -> JobError:
    return JobError(f"{rendezvous.name}: {_describe_host(rendezvous)}, has disconnected")


def _duplicate_socket(fd: int) -> int:
    """Return a copy of an inherited socket. Torch closes the copy; the original is used by the next rendezvous."""
    with socket.socket(fileno=fd) as inherited:
        copy = inherited.dup()
        inherited.detach()
    return copy.detach()
