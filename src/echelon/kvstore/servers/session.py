"""A worker's standing in the job: its rank, who else lives, barriers, and the news that the job is broken."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Protocol

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


class Session(Protocol):
    """What a store asks of the job around it."""

    rank: int
    workers: list[int]
    hosts: dict[int, str]
    halted: str | None

    def check(self) -> None:
        """Raise JobError if the job is broken."""
        ...

    def check_here(self) -> None:
        """Raise UsageError if this worker has left the job."""
        ...

    def hear_why(self) -> None:
        """Raise JobError with the scheduler's reason, if a word of it comes within moments."""
        ...

    def barrier(self) -> str | None:
        """Wait for all living workers. Returns why to stop, if somebody asked for that before all were there."""
        ...

    def halt(self, reason: str) -> None:
        """Ask all workers to stop training."""
        ...

    def hear_halt(self) -> str:
        """Somebody asked all to stop: wait for the word why."""
        ...

    def leave(self, reason: str, *, failed: bool = False) -> None:
        """Announce that this worker leaves, and close the connection."""
        ...


class Joined:
    """A worker registered with a scheduler."""

    def __init__(self, job: Job, transport: Transport) -> None:
        self._job = job
        self._changed = threading.Condition()
        self._broken: str | None = None
        self._barriers = 0
        self._barriers_done = 0
        self._halted_before: str | None = None  # the last barrier that is done
        self._left = False
        self.on_news: Callable[[], None] = lambda: None
        self.halted: str | None = None
        self._stack = ExitStack()
        post = self._stack.enter_context(register(job, WORKER, transport))
        self._control = post.control
        self.rank = post.rank
        workers = [member for member in post.roster.members if member.role == WORKER]
        self.workers = [member.rank for member in workers]
        self.hosts = {member.rank: member.host for member in workers}
        self.servers: list[Member] = [member for member in post.roster.members if member.role == SERVER]
        post.set_handler(self._receive)  # last: a view that came meanwhile must find all of the above

    def check(self) -> None:
        """Raise if a server or the scheduler is gone, or this worker is taken for dead."""
        broken = self._broken or self._control.lost
        if broken is not None:
            raise JobError(f"worker {self.rank}: the job is broken: {broken}")

    def check_here(self) -> None:
        """Raise if this worker has left."""
        if self._left:
            raise UsageError(f"worker {self.rank}: {CLOSED}")

    def hear_why(self) -> None:
        """A server takes this worker for dead: the scheduler, who knows why, may be heard a moment later."""
        with self._changed:
            self._changed.wait_for(lambda: self._broken is not None or self._control.lost is not None, REASON_S)
        self.check()

    def barrier(self) -> str | None:
        """Wait for all living workers, with a deadline.

        All return the same: who is slow to wake up may know of a later word by then, which others do not.
        """
        with self._changed:
            self._barriers += 1
            wanted = self._barriers
            self._control.send(Barrier(wanted))
            deadline = time.monotonic() + self._job.timeout_s
            while self._barriers_done < wanted:
                self.check()
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    raise JobError(
                        f"worker {self.rank}: barrier {wanted} was not reached by all in {self._job.timeout_s:g} s"
                    )
            return self._halted_before

    def halt(self, reason: str) -> None:
        """Ask all workers to stop training; `halted` is set when the scheduler has told everybody."""
        self._control.send(Halt(reason))

    def hear_halt(self) -> str:
        """Somebody asked all to stop: wait for the word why, which the scheduler passes on."""
        with self._changed:
            self._changed.wait_for(lambda: self.halted or self._broken or self._control.lost, self._job.timeout_s)
        self.check()
        return self.halted or "a worker that is gone asked all to stop"

    def leave(self, reason: str, *, failed: bool = False) -> None:
        """Announce that this worker leaves, and close the connection."""
        if not self._left:
            self._left = True
            if not self._broken:
                self._control.send(Leave(reason, failed))
            self._stack.close()

    def abandon(self) -> None:
        """Close without a goodbye: the others will see a death."""
        if not self._left:
            self._left = True
            self._stack.close()

    def _receive(self, message: ControlMessage) -> None:
        with self._changed:
            match message:
                case View(number, workers, reason):
                    self.workers = workers
                    if self.rank not in workers and not self._left:
                        self._broken = f"view {number} goes on without this worker: {reason}"
                case BarrierDone(sequence):
                    self._barriers_done = max(self._barriers_done, sequence)
                    self._halted_before = self.halted
                case Abort(reason):
                    self._broken = reason
                case Halt(reason):  # the first reason counts: all hear them in the same order
                    self.halted = self.halted or reason
            self._changed.notify_all()
        self.on_news()
