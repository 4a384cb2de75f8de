"""The in-process launcher: runs a whole job as threads of this process, for tests and debuggers."""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from echelon.cluster.shares import Groups
from echelon.environment import Job, job_of_thread
from echelon.kvstore import KVStore, create
from echelon.kvstore.servers.session import SESSIONS
from echelon.kvstore.worker import thread_is_worker
from echelon.scheduler import serve as serve_scheduler
from echelon.server.serve import serve as serve_server
from echelon.transport.admission.credentials import with_credentials
from echelon.transport.in_process import InProcessTransport
from echelon.transport.interface import Transport
from echelon.transport.listening import LOOPBACK, listen

T = TypeVar("T")


def run(
    program: Callable[[KVStore], T],
    store: str,
    *,
    num_workers: int = 2,
    num_servers: int = 2,
    staleness: int | None = None,
    groups: Groups | None = None,
    lr_scale: str = "share",
    transport: Transport | None = None,
    check_finite: bool = False,
    allow_optimizers: str | None = None,
    timeout_s: float = 60.0,
) -> list[T]:
    """Run `program` on every worker and return the results by rank. The first error of any thread is raised."""
    listener = listen(LOOPBACK)
    port = listener.getsockname()[1]
    shared = transport or InProcessTransport()
    job = with_credentials(
        Job(
            scheduler_port=port,
            num_workers=num_workers,
            num_servers=num_servers,
            timeout_s=timeout_s,
            stall_seconds=timeout_s / 2,
            allow_optimizers=allow_optimizers,
        )
    )
    results: dict[int, T] = {}

    def work(own: Job) -> None:
        kv = create(store, staleness=staleness, groups=groups, lr_scale=lr_scale, check_finite=check_finite)
        assert own.rank is not None
        results[own.rank] = program(kv)

    threads = JobThreads(job, listener, shared, work)
    threads.start()
    threads.join()
    if threads.errors:
        raise next(iter(threads.errors.values()))
    return [results[rank] for rank in range(num_workers)]


class JobThreads:
    """The scheduler, the servers and the workers of a job, as threads of this process.

    Every worker thread calls `work(job)` with the job as that worker sees it. `errors` has what ended a thread, by the
    name of the thread ("worker 0"), in the order of time.
    """

    def __init__(self, job: Job, listener: socket.socket, transport: Transport, work: Callable[[Job], object]) -> None:
        self.errors: dict[str, BaseException] = {}
        self.scheduler_status = 0
        self._transport = transport
        self._work = work
        programs: dict[str, Callable[[], object]] = {"scheduler 0": partial(self._run_scheduler, job, listener)}
        for rank in range(job.num_servers):
            programs[f"server {rank}"] = partial(self._run_server, job.as_role("server", rank))
        for rank in range(job.num_workers):
            programs[f"worker {rank}"] = partial(self._run_worker, job.as_role("worker", rank))
        self.threads = [
            threading.Thread(target=self._keep_error, args=[name, target], name=name, daemon=True)
            for name, target in programs.items()
        ]

    def start(self) -> None:
        """Start all threads."""
        for thread in self.threads:
            thread.start()

    def join(self, timeout_s: float | None = None, *, only: str = "") -> bool:
        """Wait for the threads whose names begin with `only`, or for `timeout_s`. Return whether they have ended."""
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        threads = [thread for thread in self.threads if thread.name.startswith(only)]
        for thread in threads:
            left = deadline - time.monotonic()
            thread.join(None if left == math.inf else max(0.0, left))
        return not any(thread.is_alive() for thread in threads)

    def _run_scheduler(self, job: Job, listener: socket.socket) -> None:
        self.scheduler_status = serve_scheduler(job, listener)

    def _run_server(self, job: Job) -> None:
        with job_of_thread(job):
            serve_server(job, self._transport)

    def _run_worker(self, job: Job) -> None:
        failed = True
        try:
            with thread_is_worker(job, self._transport):
                self._work(job)
            failed = False
        except BaseException as error:
            self.errors[f"worker {job.rank}"] = error  # before the others fail because this one has left
            raise
        finally:
            SESSIONS.finish(job, failed=failed)

    def _keep_error(self, name: str, target: Callable[[], object]) -> None:
        try:
            target()
        except BaseException as error:
            self.errors[name] = error
