"""A worker's part in one store of the job: the workers that have not closed it, its barriers, and requests to stop."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from echelon.cluster.messages import Barrier, BarrierDone, Halt, Member, StoreClosed, StoreEnded, StoreEnding, shorten
from echelon.errors import JobError, UsageError
from echelon.kvstore.store import CLOSED

if TYPE_CHECKING:
    from echelon.kvstore.servers.session import Session

REASON_S = 2.0


class StoreSession:
    """Created by `Session.open_store`. The session's lock protects its state."""

    def __init__(self, session: Session, number: int) -> None:
        self.number = number
        self.on_change: Callable[[], None] = lambda: None  # wakes the thread that waits for servers
        self.on_finish: Callable[[], None] = lambda: None  # closes the store, if this process ends without closing it
        self.pause: Callable[[], None] = lambda: None  # lets the others make rounds without this worker
        self.resume: Callable[[], None] = lambda: None
        self.halted: str | None = None
        self._session = session
        self._changed = session.changed
        self._closed = False
        self._closed_by: set[int] = set()  # ranks
        self._barriers = 0
        self._barriers_done = 0
        self._ended = False
        self._halted_at_barrier: str | None = None  # the value of `halted` when the last barrier completed

    @property
    def rank(self) -> int:
        """This worker's rank."""
        return self._session.rank

    @property
    def workers(self) -> list[int]:
        """The living workers that have not closed this store."""
        return [rank for rank in self._session.workers if rank not in self._closed_by]

    @property
    def hosts(self) -> dict[int, str]:
        """The addresses of all workers."""
        return self._session.hosts

    @property
    def siblings(self) -> list[StoreSession]:
        """The other stores that this worker has open."""
        return [store for store in self._session.open_stores if store is not self]

    @property
    def servers(self) -> list[Member]:
        """The servers of the job."""
        return self._session.servers

    def check_job(self) -> None:
        """Raise JobError if a server or the scheduler is gone, or the scheduler counts this worker as dead."""
        self._session.check_job()

    def check_joined(self) -> None:
        """Raise UsageError if this worker has closed the store or left the job."""
        if self._closed or self._session.has_left:
            raise UsageError(f"worker {self.rank}: {CLOSED}")

    def check_removed(self) -> None:
        """Wait up to `REASON_S` for the scheduler to say why it removed this worker, and raise JobError if it does.

        A server that refuses a removed worker may be faster than the scheduler's message with the reason.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._session.failure is not None, REASON_S)
        self.check_job()

    def barrier(self) -> str | None:
        """Wait for all living workers, with a deadline. Return the reason to stop, if one was given before that.

        All workers return the same reason. A worker that wakes up late may already have received a newer one, which
        the others have not, so the reason is the one that was known when the barrier completed.
        """
        with self._changed:
            self._barriers += 1
            wanted = self._barriers
            self._session.send(Barrier(wanted, self.number))
            deadline = time.monotonic() + self._session.timeout_s
            while self._barriers_done < wanted:
                self.check_job()
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    where = f"barrier {wanted}" if self.number == 0 else f"barrier {wanted} of store {self.number}"
                    raise JobError(
                        f"worker {self.rank}: not all workers reached {where} within {self._session.timeout_s:g} s"
                    )
            return self._halted_at_barrier

    def wait_for_end(self, stall_seconds: float) -> None:
        """Wait until all other workers wait for the end, too, have closed the store or have left. No deadline.

        Barriers do not wait for this worker meanwhile. Every `stall_seconds` a line says what it waits for.
        """
        with self._changed:
            self._session.send(StoreEnding(self.number))
            began = time.monotonic()
            while not self._ended:
                self.check_job()
                if not self._changed.wait(stall_seconds):
                    waited = time.monotonic() - began
                    others = ", ".join(str(rank) for rank in self.workers if rank != self.rank)
                    print(
                        f"worker {self.rank} has closed its Trainer, and waited {waited:.0f} s for the last updates of "
                        f"worker {others}",
                        file=sys.stderr,
                        flush=True,
                    )

    def halt(self, reason: str) -> None:
        """Ask all workers to stop training; `halted` is set when the scheduler has sent the request to everybody."""
        self._session.send(Halt(shorten(reason), self.number))

    def wait_for_halt_reason(self) -> str:
        """Wait until the scheduler has sent the reason of a halt that a server announced, and return it."""
        with self._changed:
            self._changed.wait_for(lambda: self.halted or self._session.failure, self._session.timeout_s)
        self.check_job()
        return self.halted or "a worker that has left the job asked all workers to stop"

    def close(self) -> None:
        """Tell the scheduler that this worker has closed the store."""
        if not self._closed:
            self._closed = True
            self._session.close_store(self)

    def leave_job(self, reason: str) -> None:
        """Leave the job because of an error."""
        self._session.leave(reason, failed=True)

    def receive(self, message: BarrierDone | Halt | StoreClosed | StoreEnded) -> None:
        """Take a message of the scheduler. The caller holds the session's lock, and wakes the waiting threads."""
        match message:
            case BarrierDone(sequence):
                self._barriers_done = max(self._barriers_done, sequence)
                self._halted_at_barrier = self.halted
            case Halt(reason):  # the first reason counts, because all workers receive them in the same order
                self.halted = self.halted or reason
            case StoreClosed(_, rank):
                self._closed_by.add(rank)
            case StoreEnded():
                self._ended = True
