"""A job with servers whose workers have several devices, as forks of the test: real processes that start quickly."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from echelon.environment import Job
from echelon.kvstore import KVStore, create
from echelon.scheduler import serve as serve_scheduler
from echelon.server.serve import serve as serve_server
from echelon.transport.choose import by_name
from forked import Fork

TIMEOUT_S = 60.0
Sizes = tuple[int, int, int]  # workers, devices of each, servers


def run(
    program: Callable[[KVStore], Any], store: str, *, sizes: Sizes = (1, 2, 1), status: int = 0, **options: Any
) -> list[Any]:
    """Run `program` on every device of every worker. Return the results, or the errors, by rank.

    `status`: the one that the job must end with, which is the scheduler's.
    """

    def work(job: Job) -> Any:
        with create(store, job=job, **options) as kv:
            return program(kv)

    return run_processes(work, sizes, status)


def run_as_launched(program: Callable[[], Any], sizes: Sizes, run_dir: str | None = None) -> list[Any]:
    """Run a program that reads its environment on every device of every worker."""

    def work(job: Job) -> Any:
        os.environ.update(replace(job, run_dir=run_dir).to_environment())
        if job.device_fd is not None:
            os.environ["ECHELON_DEVICE_FD"] = str(job.device_fd)
        return program()

    return run_processes(work, sizes)


def run_processes(program: Callable[[Job], Any], sizes: Sizes, status: int = 0) -> list[Any]:
    """Run a scheduler, servers, and `program` for every device. Return the results of `program`."""
    num_workers, num_devices, num_servers = sizes

    def work(job: Job, *listening: socket.socket) -> Any:
        return program(replace(job, device_fd=listening[0].detach() if listening else None))

    def serve(job: Job) -> int:
        return serve_server(job, by_name("auto"))

    with ExitStack() as sockets:
        scheduler, *rendezvous = [
            sockets.enter_context(socket.create_server(("127.0.0.1", 0), backlog=128)) for _ in range(num_workers + 1)
        ]
        job = Job(
            scheduler_port=scheduler.getsockname()[1],
            num_workers=num_workers,
            num_servers=num_servers,
            num_devices=num_devices,
            stall_seconds=TIMEOUT_S / 2,
            timeout_s=TIMEOUT_S,
        )
        others = [Fork(serve_scheduler, job, sockets=[scheduler])]
        others += [Fork(serve, job.as_role("server", rank)) for rank in range(num_servers)]
        devices = []
        for rank in range(num_workers * num_devices):
            worker, index = divmod(rank, num_devices)
            listening = rendezvous[worker]
            mine = replace(job, rank=worker, device_index=index, device_port=listening.getsockname()[1])
            devices.append(Fork(work, mine, sockets=[] if index else [listening]))
    found = [fork.result() for fork in devices]
    statuses = [fork.result() for fork in others]
    assert statuses == [status] + [0] * num_servers
    return found
