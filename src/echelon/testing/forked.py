"""A whole job without servers as forks of this process: real processes for torch.distributed, and any function runs.

A fork costs milliseconds where a new interpreter costs seconds to import torch. What a program returns comes back
through a pipe; the first error is raised here. Forks end with this process, whatever happens to it.

The process that forks must use one thread of torch's (`torch.set_num_threads(1)` before any work): a fork has none of
the threads that OpenMP keeps for later, and now and then waits for them for ever.
"""

from __future__ import annotations

import ctypes
import faulthandler
import functools
import os
import pickle
import signal
import socket
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.optim import SGD

from echelon.environment import Job
from echelon.errors import JobError
from echelon.kvstore import KVStore, create
from echelon.kvstore.create import ONE_WORKER

T = TypeVar("T")
STUCK_S = 60.0
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def run(
    program: Callable[[KVStore], T],
    store: str,
    *,
    num_workers: int = 2,
    num_servers: int = 0,
    check_finite: bool = False,
    timeout_s: float = 60.0,
) -> list[T]:
    """Run `program` in a process for each worker; returns what each returned, by rank. There are no servers."""
    _warm_up()
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        jobs = [_job(store, rank, num_workers, listener, timeout_s) for rank in range(num_workers)]

        def work(rank: int) -> T:
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
            torch.set_num_threads(1)  # what threads the parent had are not here
            if rank:
                listener.close()
            with create(store, job=jobs[rank], check_finite=check_finite) as kv:
                return program(kv)

        forks = [_fork(work, rank) for rank in range(num_workers)]
    found = [_result(*fork) for fork in forks]
    for error in found:
        if isinstance(error, BaseException):
            raise error
    return found


@functools.cache
def _warm_up() -> None:
    """Let torch import what it imports late, once and not in every fork: a first step of an optimizer takes seconds."""
    SGD([torch.zeros(1, requires_grad=True)], lr=0.1).step()


def _job(store: str, rank: int, size: int, listener: socket.socket, timeout_s: float) -> Job:
    port, fd = listener.getsockname()[1], listener.fileno()
    if store in ONE_WORKER:
        return Job(num_devices=size, device_index=rank, device_port=port, device_fd=fd, timeout_s=timeout_s)
    return Job(scheduler_port=port, listen_fd=fd, num_workers=size, rank=rank, timeout_s=timeout_s)


def _fork(work: Callable[[int], Any], rank: int) -> tuple[int, int]:
    """A child's pid, and the pipe its result comes through."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writer)
        return pid, reader
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    faulthandler.dump_traceback_later(STUCK_S, exit=True)  # says where, and ends what would hang for ever
    try:
        result: Any = work(rank)
    except BaseException as error:
        result = error
        error.add_note(f"in the process of rank {rank}:\n{traceback.format_exc()}")
    try:
        data = pickle.dumps(result)
    except Exception as error:
        data = pickle.dumps(JobError(f"rank {rank}: {result!r} cannot be sent back: {error}"))
    with os.fdopen(writer, "wb") as pipe:
        pipe.write(data)
    os._exit(0)


def _result(pid: int, reader: int) -> Any:
    with os.fdopen(reader, "rb") as pipe:
        data = pipe.read()
    _, status = os.waitpid(pid, 0)
    return pickle.loads(data) if data else JobError(f"process {pid} ended with status {status} and no word")
