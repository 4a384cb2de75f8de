"""Telling the scheduler that a worker has ended. Only a launcher sees the end of one that never registered."""

from __future__ import annotations

import threading
import time
from contextlib import closing, suppress

from echelon.cluster.messages import WorkerExited, shorten
from echelon.environment import Job
from echelon.errors import JobError
from echelon.transport.admission.admission import connect
from echelon.transport.admission.channel import Channel, send_all
from echelon.transport.admission.credentials import Security
from echelon.transport.control import CONNECT_S, SEND_S, frame


def report_worker_exit(job: Job, message: WorkerExited) -> None:
    """Send the end of a worker to the scheduler of a job. A scheduler that has ended needs no report.

    A thread does it, because the scheduler may still be starting and the launcher must not wait for it.
    """
    threading.Thread(target=_report, args=(job, message), name="echelon-report", daemon=True).start()


def _report(job: Job, message: WorkerExited) -> None:
    deadline = time.monotonic() + job.timeout_s
    short = WorkerExited(message.rank, shorten(message.how), message.failed)
    with suppress(OSError, JobError), closing(_connect(job, deadline)) as channel:
        send_all(channel, frame(short), SEND_S)


def _connect(job: Job, deadline: float) -> Channel:
    """Connect to the scheduler. Its socket listens from the beginning, but it may be long until it answers."""
    while True:
        try:
            return connect((job.scheduler_host, job.scheduler_port), Security.of(job), CONNECT_S)
        except TimeoutError:
            if time.monotonic() > deadline:
                raise
