"""A worker's part in one store of the job: the workers that have not closed it, its barriers, and requests to stop."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from echelon.cluster.messages import (
    Barrier,
    BarrierDone,
    ControlMessage,
    CutReady,
    Halt,
    HeldLedger,
    Lease,
    LedgerEnded,
    LedgerRefused,
    LedgerState,
    Member,
    NotWhole,
    StoreClosed,
    StoreEnded,
    StoreEnding,
    StoreIsAt,
    StoreJoined,
    StoreState,
    shorten,
)
from echelon.errors import JobError, UsageError, WorkerLeft, WorkerRemoved
from echelon.kvstore.store import CLOSED
from echelon.transport.interface import Endpoint, Transport

if TYPE_CHECKING:
    from echelon.kvstore.servers.session import Session

REASON_S = 2.0
POLL_S = 0.2  # how soon a wait notices that the job has failed
LedgerMessage = Lease | LedgerEnded | LedgerState | LedgerRefused | CutReady


class SessionLedger(Protocol):
    """The leases of a store. Messages of the scheduler, and a lost connection, concern them."""

    def receive(self, message: LedgerMessage) -> None: ...

    def held(self) -> HeldLedger: ...

    def send_again(self) -> None: ...

    def begin_again(self) -> None: ...


class StoreSession:
    """Created by `Session.open_store`. The session's lock protects its state."""

    def __init__(self, session: Session, number: int) -> None:
        self.number = number
        self.on_change: Callable[[], None] = lambda: None  # wakes the thread that waits for servers
        self.on_finish: Callable[[], None] = lambda: None  # closes the store, if this process ends without closing it
        self.follow: Callable[[], None] = lambda: None  # connects to the servers that store slices now
        self.pause: Callable[[], None] = lambda: None  # lets the others make rounds without this worker
        self.resume: Callable[[Sequence[int]], None] = lambda workers: None  # those that have waited with this worker
        self.halted: str | None = None
        self.ledger: SessionLedger | None = None  # of `Trainer.samples`
        self.num_ledgers = 0  # that this worker has opened
        self.num_closed_ledgers = 0
        self.num_over_ledgers = 0  # that are over for all workers, as far as this one knows
        self._session = session
        self._changed = session.changed
        self.is_late = False  # the others have made barriers without this worker, which does not take part yet
        self._position: int | None = None  # of a late worker: how many barriers were done when it opened the store
        self._joining = False
        self._ending = False
        self._asked_to_halt: str | None = None
        self._closed = False
        self._closed_by: set[int] = set()  # ranks
        self._barriers = 0
        self._barriers_done = 0
        self._ended = False
        self._halted_at_barrier: str | None = None  # the value of `halted` when the last barrier completed
        self.workers_at_barrier: list[int] = []  # the value of `workers` then
        self.has_newcomers = False  # workers have joined since this worker gave them what they need
        self._connected_as = ""  # the name of this worker's process when it connected to the servers

    @property
    def rank(self) -> int:
        """This worker's rank."""
        return self._session.rank

    @property
    def changed(self) -> threading.Condition:
        """The session's lock. It is notified after each message of the scheduler."""
        return self._changed

    @property
    def timeout_s(self) -> float:
        """How long this worker waits for others."""
        return self._session.timeout_s

    def send(self, message: ControlMessage) -> None:
        """Send a message to the scheduler."""
        self._session.send(message)

    @property
    def workers(self) -> list[int]:
        """The living workers that have not closed this store."""
        return [rank for rank in self._session.workers if rank not in self._closed_by]

    @property
    def hosts(self) -> dict[int, str]:
        """The addresses of the living workers."""
        return self._session.hosts

    @property
    def ranks(self) -> Sequence[int]:
        """The ranks that workers of the job can have, whether they live, have left or may still join."""
        return self._session.ranks

    @property
    def siblings(self) -> list[StoreSession]:
        """The other stores that this worker has open."""
        return [store for store in self._session.open_stores if store is not self]

    @property
    def servers(self) -> list[Member]:
        """The servers of the job."""
        return self._session.servers

    @property
    def slice_addresses(self) -> list[str | None]:
        """The address of the server that stores each slice; None: there is none now. A new list after each change."""
        return self._session.slice_addresses

    @property
    def view(self) -> int:
        """The number of the newest view."""
        return self._session.view

    @property
    def joined_late(self) -> bool:
        """Whether this worker joined a job that was running, or joined again after it was removed."""
        return self._session.is_late

    @property
    def has_elders(self) -> bool:
        """Whether another worker with this store open has been in the job longer, or as long with a lower rank."""
        return any(rank in self._session.elders for rank in self.workers)

    def connect(self, transport: Transport) -> Endpoint:
        """Connect to the servers, as the process that is a member of the job now."""
        with self._changed:
            name, addresses = self._session.endpoint_name, self._session.slice_addresses
        endpoint = transport.connect(name, [address or "" for address in addresses])
        with self._changed:
            self._connected_as = name
            self.on_change = endpoint.wake
        return endpoint

    def follow_slices(self) -> None:
        """Let all stores of this worker connect to the servers that store slices now.

        A server that was lost without a backup waits for what all workers have of it. So every wait does this, also one
        for the scheduler or in another store, and all workers do it in the same order of stores.
        """
        for store in self._session.open_stores:
            if store.is_connected:
                store.follow()

    @property
    def is_connected(self) -> bool:
        """Whether this store is connected as the process that is a member of the job now."""
        return bool(self._connected_as) and self._connected_as == self._session.endpoint_name

    def wait_until(self, is_true: Callable[[], bool], seconds: float) -> bool:
        """Wait for messages of the scheduler until a condition is true. Return whether it is. Without the lock.

        Raise what `check_job` raises. Servers that are rebuilt meanwhile get what this worker has of them.
        """
        deadline = time.monotonic() + seconds
        while True:
            addresses = self.slice_addresses
            self.follow_slices()
            with self._changed:
                end = time.monotonic() + min(POLL_S, deadline - time.monotonic())
                while not is_true() and self.slice_addresses is addresses and self._session.failure is None:
                    if not self._changed.wait(max(0.0, end - time.monotonic())):
                        break
                if is_true():
                    return True
            self.check_job()
            if time.monotonic() >= deadline:
                return False

    def rejoin(self) -> None:
        """Join the job again, if another store of this worker has not done it, and learn how far the store is."""
        self._session.rejoin()
        with self._changed:
            self._connected_as = ""
            self.wait_for_position()

    def check_job(self) -> None:
        """Raise JobError if the job has failed or the scheduler is gone, WorkerRemoved if it removed this worker."""
        self._session.check_job()
        if self._connected_as and self._connected_as != self._session.endpoint_name:
            raise WorkerRemoved(f"worker {self.rank}: this store belongs to a worker that was removed from the job")

    def check_joined(self) -> None:
        """Raise UsageError if this worker has closed the store or left the job; WorkerLeft if it was told to leave."""
        if self._session.was_told_to_leave:
            raise WorkerLeft(self.rank)
        if self._closed or self._session.has_left:
            raise UsageError(f"worker {self.rank}: {CLOSED}")

    def check_removed(self) -> None:
        """Wait up to `REASON_S` for the scheduler to say why it removed this worker, and raise JobError if it does.

        A server that refuses a removed worker may be faster than the scheduler's message with the reason. Time without
        a connection to the scheduler does not count: one that is started again says it then.
        """
        end = time.monotonic() + self._session.timeout_s
        with self._changed:
            heard_at = time.monotonic()
            while self._session.failure is None and (now := time.monotonic()) < min(heard_at + REASON_S, end):
                heard_at = now if self._session.reconnecting is not None else heard_at
                self._changed.wait(POLL_S)
        self.check_job()

    def wait_for_position(self) -> None:
        """Wait until the scheduler has said whether this late worker is late for this store. With the lock."""
        self._wait_for(lambda: self._position is not None, f"the scheduler's answer about store {self.number}")

    def join(self) -> None:
        """Take part in the barriers of the store from now on, if this worker is late. Otherwise do nothing."""
        with self._changed:
            if not self.is_late:
                return
            self._joining = True
            self._session.send(StoreJoined(self.number))
            self._wait_for(lambda: not self.is_late, f"the scheduler's answer about store {self.number}")

    def _wait_for(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + self._session.timeout_s
        while not condition():
            self.check_job()
            if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                raise JobError(f"worker {self.rank}: no {what} within {self._session.timeout_s:g} s")

    def barrier(self, stall_seconds: float | None = None) -> str | None:
        """Wait for all living workers, with a deadline. Return the reason to stop, if one was given before that.

        With `stall_seconds` there is no deadline, and a line says at this interval whom it waits for.

        All workers return the same reason. A worker that wakes up late may already have received a newer one, which
        the others have not, so the reason is the one that was known when the barrier completed.
        """
        with self._changed:
            self.join()
            self._barriers += 1
            wanted = self._barriers
            self._session.send(Barrier(wanted, self.number))
        began = time.monotonic()
        timeout_s = self._session.timeout_s if stall_seconds is None else stall_seconds
        while not self.wait_until(lambda: self._barriers_done >= wanted, timeout_s):
            if stall_seconds is not None:
                self._report_stall(began, "has finished", "the end")
                continue
            where = f"barrier {wanted}" if self.number == 0 else f"barrier {wanted} of store {self.number}"
            lost = self._session.reconnecting
            raise JobError(
                f"worker {self.rank}: not all workers reached {where} within {self._session.timeout_s:g} s"
                + (f", because the connection to the scheduler was lost: {lost}" if lost else "")
            )
        return self._halted_at_barrier

    def wait_for_end(self, stall_seconds: float) -> None:
        """Wait until all other workers wait for the end, too, have closed the store or have left. No deadline.

        The wait also ends when this worker may leave.

        Barriers do not wait for this worker meanwhile. Every `stall_seconds` a line says what it waits for.
        """
        with self._changed:
            self._ending = True
            self._session.send(StoreEnding(self.number))
        began = time.monotonic()
        while not self.wait_until(lambda: self._ended or self.may_leave, stall_seconds):
            self._report_stall(began, "has closed its Trainer", "the last updates")

    def _report_stall(self, began: float, state: str, what: str) -> None:
        waited = time.monotonic() - began
        others = ", ".join(str(rank) for rank in self.workers if rank != self.rank)
        print(
            f"worker {self.rank} {state}, and waited {waited:.0f} s for {what} of worker {others}",
            file=sys.stderr,
            flush=True,
        )

    def halt(self, reason: str) -> None:
        """Ask all workers to stop training; `halted` is set when the scheduler has sent the request to everybody."""
        with self._changed:
            self._asked_to_halt = shorten(reason)
            self._session.send(Halt(self._asked_to_halt, self.number))

    def report_defect(self, reason: str) -> None:
        """Tell the scheduler why the result is not whole."""
        self._session.send(NotWhole(shorten(f"worker {self.rank}: {reason}")))

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

    @property
    def may_leave(self) -> bool:
        """Whether this worker has announced that it leaves, and the others continue without it."""
        return self._session.may_leave

    def announce_leaving(self, reason: str) -> None:
        """Tell the scheduler that this worker was told to end."""
        self._session.announce_leaving(reason)

    @property
    def was_told_to_leave(self) -> bool:
        """Whether this worker has left the job because it was told to end."""
        return self._session.was_told_to_leave

    def leave_as_told(self) -> None:
        """Close all stores of this worker, without waiting for others, and leave the job."""
        self._session.leave_as_told()

    def leave_job(self, reason: str) -> None:
        """Leave the job because of an error."""
        self._session.leave(reason, failed=True)

    def state(self) -> StoreState:
        """Return what a scheduler has to know of this store after a lost connection. With the lock."""
        halted = self.halted or self._asked_to_halt
        return StoreState(
            self.number,
            self._barriers,
            self._barriers_done,
            self._ending,
            halted,
            None if self.ledger is None else self.ledger.held(),
            takes_part=not self.is_late,
            num_closed_ledgers=self.num_closed_ledgers,
            num_over_ledgers=self.num_over_ledgers,
        )

    def returned(self) -> None:
        """Ask again what the scheduler may not have answered on a lost connection. With the lock."""
        if self._joining:
            self._session.send(StoreJoined(self.number))
        if self.ledger is not None:
            self.ledger.send_again()

    def restart(self) -> None:
        """Begin again as a late worker, which the scheduler has removed before. With the lock."""
        self._barriers = self._barriers_done = 0
        self._position = None
        self._joining = self._ending = self._ended = False
        self.is_late = True
        if self.ledger is not None:
            self.ledger.begin_again()

    def welcome(self, new: Iterable[int]) -> None:
        """Record that new processes have these ranks, which have not closed the store. With the lock."""
        self._closed_by.difference_update(new)
        self.has_newcomers = self.has_newcomers or bool(set(new) - {self.rank})

    def receive(self, message: BarrierDone | Halt | StoreClosed | StoreEnded | StoreIsAt) -> None:
        """Take a message of the scheduler. The caller holds the session's lock, and wakes the waiting threads."""
        match message:
            case BarrierDone(sequence) if sequence > self._barriers_done:  # it may be repeated
                self._barriers_done = sequence
                self._halted_at_barrier = self.halted
                self.workers_at_barrier = self.workers
            case Halt(reason):  # the first reason counts, because all workers receive them in the same order
                self.halted = self.halted or reason
            case StoreClosed(_, rank):
                self._closed_by.add(rank)
            case StoreEnded():
                self._ended = True
            case StoreIsAt(_, barriers, takes_part):
                self._take_position(barriers, takes_part)

    def _take_position(self, barriers: int, takes_part: bool) -> None:
        if not takes_part:
            self._position, self._barriers_done = barriers, max(self._barriers_done, barriers)
            self.is_late = True
        elif self._joining or self._position is None:
            self._position, self._barriers = barriers, max(self._barriers, barriers)
            self._joining = self.is_late = False
