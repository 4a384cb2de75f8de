"""The scheduler process: a loop around the pure state machine `cluster.membership`. Imports no torch.

`python -m echelon.scheduler` runs the scheduler of the job that the environment describes. `loop` accepts connections,
passes messages to the state machine (`dispatch`) and sends what that returns. `peer` is one connection: what it has
received, what waits to be sent, and how much it may send. No connection can stop or delay the
others: nothing blocks, a turn of the loop handles a bounded number of messages per connection, and an exception ends
the connection that caused it and nothing else.
"""

from __future__ import annotations

import os
import socket

from echelon.cluster.membership.rules import Rules
from echelon.environment import MAX_RESTARTS, Job, variable
from echelon.errors import UsageError
from echelon.observe.events import EventLog
from echelon.scheduler.loop import Scheduler
from echelon.system import raise_file_limit
from echelon.transport.listening import listen


def serve(job: Job, listener: socket.socket | None = None) -> int:
    """Run until the job is over; return the exit status. Without `listener`, inherit or create the socket."""
    raise_file_limit()
    listener = listener or _listener(job)
    with EventLog.open(job.run_dir, "scheduler", 0) as events:
        events.write("scheduler_started", pid=os.getpid(), restarts=job.restarts)
        return Scheduler(job, listener, events, rules_of(job)).run()


def rules_of(job: Job) -> Rules:
    """Return how the membership of a job may change. Only a launcher, which sets the variable, restarts processes."""
    return Rules(
        min_workers=job.min_workers,
        max_workers=job.max_workers,
        replicas=job.replicas,
        can_restart=job.max_restarts > 0 and variable(MAX_RESTARTS) is not None,
        is_restarted=job.restarts > 0,
        return_s=job.heartbeat_timeout_s,
    )


def _listener(job: Job) -> socket.socket:
    if job.listen_fd is not None:
        return socket.socket(fileno=job.listen_fd)
    port = job.scheduler_port
    if not port:
        raise UsageError("the scheduler has no port: set DMLC_PS_ROOT_PORT, to the same value for all roles")
    host = job.host or job.scheduler_host
    try:
        return listen(host, port)
    except OSError as error:
        raise UsageError(
            f"the scheduler cannot listen at {host}:{port}: {os.strerror(error.errno or 0)}; set another "
            "DMLC_PS_ROOT_PORT for all roles"
        ) from error
