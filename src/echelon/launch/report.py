"""Telling the scheduler that a worker has ended. Only a launcher sees the end of one that never registered."""

from __future__ import annotations

import socket

from echelon.cluster.messages import WorkerExited
from echelon.environment import Job
from echelon.transport.control import frame


def report_worker_exit(job: Job, message: WorkerExited) -> None:
    """Send the end of a worker to the scheduler of a job. A scheduler that has ended needs no report."""
    try:
        with socket.create_connection((job.scheduler_host, job.scheduler_port), timeout=1.0) as connection:
            connection.sendall(frame(message))
    except OSError:
        pass
