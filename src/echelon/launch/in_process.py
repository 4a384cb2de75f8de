"""The in-process launcher: runs a whole job as threads of this process, for tests and debuggers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from echelon.cluster.shares import Groups
from echelon.environment import Job
from echelon.kvstore import KVStore, create
from echelon.kvstore.servers.session import SESSIONS
from echelon.kvstore.worker import thread_is_worker
from echelon.launch.processes import listen_on_loopback
from echelon.scheduler import serve as serve_scheduler
from echelon.server.serve import serve as serve_server
from echelon.transport.in_process import InProcessTransport
from echelon.transport.interface import Transport

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
    listener = listen_on_loopback()
    port = listener.getsockname()[1]
    shared = transport or InProcessTransport()
    job = Job(
        scheduler_port=port,
        num_workers=num_workers,
        num_servers=num_servers,
        timeout_s=timeout_s,
        stall_seconds=timeout_s / 2,
        allow_optimizers=allow_optimizers,
    )
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        own = job.as_role("worker", rank)
        try:
            with thread_is_worker(own, shared):
                kv = create(store, staleness=staleness, groups=groups, lr_scale=lr_scale, check_finite=check_finite)
                results[rank] = program(kv)
        finally:
            SESSIONS.finish(own)

    def keep_error(target: Callable[[], object]) -> None:
        try:
            target()
        except BaseException as error:
            errors.append(error)

    programs: dict[str, Callable[[], object]] = {"scheduler": partial(serve_scheduler, job, listener)}
    for rank in range(num_servers):
        programs[f"server-{rank}"] = partial(serve_server, job.as_role("server", rank), shared)
    for rank in range(num_workers):
        programs[f"worker-{rank}"] = partial(work, rank)
    threads = [threading.Thread(target=keep_error, args=[target], name=name) for name, target in programs.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(num_workers)]
