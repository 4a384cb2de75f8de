"""A worker's membership of the job: its rank, the living workers, barriers, halt requests, and failures of the job."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack

from echelon.cluster.messages import (
    SERVER,
    WORKER,
    Abort,
    Barrier,
    BarrierDone,
    ControlMessage,
    Halt,
    Leave,
    Member,
    View,
)
from echelon.environment import Job
from echelon.errors import JobError, UsageError
from echelon.kvstore.store import CLOSED
from echelon.transport.interface import Transport
from echelon.transport.registration import register

REASON_S = 2.0


class Session:
    """A worker that is registered with the scheduler. A thread of the control connection calls `_receive`."""

    def __init__(self, job: Job, transport: Transport) -> None:
        self._job = job
        self._changed = threading.Condition()
        self._broken: str | None = None
        self._barriers = 0
        self._barriers_done = 0
        self._halted_at_barrier: str | None = None  # the value of `halted` when the last barrier completed
        self._left = False
        self.on_change: Callable[[], None] = lambda: None
        self.halted: str | None = None
        self._stack = ExitStack()
        post = self._stack.enter_context(register(job, WORKER, transport))
        self._control = post.control
        self.rank = post.rank
        workers = [member for member in post.roster.members if member.role == WORKER]
        self.workers = [member.rank for member in workers]
        self.hosts = {member.rank: member.host for member in workers}
        self.servers: list[Member] = [member for member in post.roster.members if member.role == SERVER]
        post.set_handler(self._receive)  # last, because a view that arrived meanwhile needs all of the above

    def check_job(self) -> None:
        """Raise JobError if a server or the scheduler is gone, or the scheduler counts this worker as dead."""
        broken = self._broken or self._control.lost
        if broken is not None:
            raise JobError(f"worker {self.rank}: the job is broken: {broken}")

    def check_joined(self) -> None:
        """Raise UsageError if this worker has left the job."""
        if self._left:
            raise UsageError(f"worker {self.rank}: {CLOSED}")

    def check_removed(self) -> None:
        """Wait up to `REASON_S` for the scheduler to say why it removed this worker, and raise JobError if it does.

        A server that refuses a removed worker may be faster than the scheduler's message with the reason.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._broken is not None or self._control.lost is not None, REASON_S)
        self.check_job()

    def barrier(self) -> str | None:
        """Wait for all living workers, with a deadline. Return the reason to stop, if one was given before that.

        All workers return the same reason. A worker that wakes up late may already have received a newer one, which
        the others have not, so the reason is the one that was known when the barrier completed.
        """
        with self._changed:
            self._barriers += 1
            wanted = self._barriers
            self._control.send(Barrier(wanted))
            deadline = time.monotonic() + self._job.timeout_s
            while self._barriers_done < wanted:
                self.check_job()
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    raise JobError(
                        f"worker {self.rank}: not all workers reached barrier {wanted} within {self._job.timeout_s:g} s"
                    )
            return self._halted_at_barrier

    def halt(self, reason: str) -> None:
        """Ask all workers to stop training; `halted` is set when the scheduler has sent the request to everybody."""
        self._control.send(Halt(reason))

    def wait_for_halt_reason(self) -> str:
        """Wait until the scheduler has sent the reason of a halt that a server announced, and return it."""
        with self._changed:
            self._changed.wait_for(lambda: self.halted or self._broken or self._control.lost, self._job.timeout_s)
        self.check_job()
        return self.halted or "a worker that has left the job asked all workers to stop"

    def leave(self, reason: str, *, failed: bool = False) -> None:
        """Tell the scheduler that this worker leaves, and close the connection."""
        if not self._left:
            self._left = True
            if not self._broken:
                self._control.send(Leave(reason, failed))
            self._stack.close()

    def abandon(self) -> None:
        """Close the connection without a message, so that the scheduler reports this worker's death."""
        if not self._left:
            self._left = True
            self._stack.close()

    def _receive(self, message: ControlMessage) -> None:
        with self._changed:
            match message:
                case View(number, workers, reason):
                    self.workers = workers
                    if self.rank not in workers and not self._left:
                        self._broken = f"view {number} does not include this worker: {reason}"
                case BarrierDone(sequence):
                    self._barriers_done = max(self._barriers_done, sequence)
                    self._halted_at_barrier = self.halted
                case Abort(reason):
                    self._broken = reason
                case Halt(reason):  # the first reason counts, because all workers receive them in the same order
                    self.halted = self.halted or reason
            self._changed.notify_all()
        self.on_change()
