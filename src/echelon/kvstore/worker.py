"""The worker that a call belongs to: its job and its transport.

Usually this process is the worker, and the environment describes its job. The in-process launcher runs each worker as
a thread of one process, so a thread can say which worker it is.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from echelon.environment import Job, job_of_thread
from echelon.transport.choose import transport_of
from echelon.transport.interface import Transport


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker of a job, and how it reaches the servers."""

    job: Job
    transport: Transport


_THREAD: ContextVar[Worker | None] = ContextVar("echelon worker of this thread", default=None)


@contextmanager
def thread_is_worker(job: Job, transport: Transport) -> Iterator[None]:
    """Let this thread be a worker inside the block: stores that it creates by name belong to this job."""
    token = _THREAD.set(Worker(job, transport))
    try:
        with job_of_thread(job):
            yield
    finally:
        _THREAD.reset(token)


def is_thread() -> bool:
    """Return whether this thread is a worker beside others of the same process."""
    return _THREAD.get() is not None and threading.current_thread() is not threading.main_thread()


def transport_for(job: Job) -> Transport:
    """Return this thread's transport if the job is its own, or the one that the job names."""
    worker = _THREAD.get()
    return worker.transport if worker is not None and worker.job is job else transport_of(job)
