"""A worker's membership of the job, which all its stores share: its rank, the living workers, failures of the job.

A process joins the job when it creates its first store, and leaves it when it exits. Each store has a `StoreSession`
for what it does not share with other stores.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack

from echelon.cluster.messages import (
    SERVER,
    WORKER,
    Abort,
    BarrierDone,
    ControlMessage,
    Halt,
    Leave,
    Member,
    StoreClosed,
    StoreEnded,
    StoreOpened,
    View,
    shorten,
)
from echelon.environment import Job
from echelon.errors import EchelonError, JobError
from echelon.kvstore.servers.store_session import StoreSession
from echelon.transport.interface import Transport
from echelon.transport.registration import Place, place_of, register


class Session:
    """A worker that is registered with the scheduler. A thread of the control connection calls `_receive`."""

    def __init__(self, job: Job, transport: Transport) -> None:
        self.changed = threading.Condition()  # also protects the state of all stores
        self.timeout_s = job.timeout_s
        self.broken: str | None = None
        self.has_left = False
        self.on_left: Callable[[], None] = lambda: None
        self._stores: dict[int, StoreSession] = {}  # by number: those that are open, and those to be opened
        self._num_opened = 0
        self._stack = ExitStack()
        post = self._stack.enter_context(register(job, WORKER, transport))
        self._control = post.control
        self.rank = post.rank
        workers = [member for member in post.roster.members if member.role == WORKER]
        self.workers = [member.rank for member in workers]
        self.hosts = {member.rank: member.host for member in workers}
        self.endpoint_name = next(member.endpoint_name for member in workers if member.rank == self.rank)
        self.servers: list[Member] = [member for member in post.roster.members if member.role == SERVER]
        post.set_handler(self._receive)  # last, because a view that arrived meanwhile needs all of the above

    @property
    def failure(self) -> str | None:
        """Why the job is broken, or None."""
        return self.broken or self._control.lost

    def check_job(self) -> None:
        """Raise JobError if a server or the scheduler is gone, or the scheduler counts this worker as dead."""
        if (failure := self.failure) is not None:
            raise JobError(f"worker {self.rank}: the job is broken: {failure}")

    def send(self, message: ControlMessage) -> None:
        """Send a message to the scheduler."""
        self._control.send(message)

    def open_store(self) -> StoreSession:
        """Return the session of this worker's next store. All workers open their stores in the same order."""
        with self.changed:
            store = self._store(self._num_opened)
            assert store is not None
            self._num_opened += 1
        self.send(StoreOpened(store.number))
        return store

    @property
    def open_stores(self) -> list[StoreSession]:
        """The stores that this worker has open."""
        with self.changed:
            return [store for number, store in self._stores.items() if number < self._num_opened]

    def close_store(self, store: StoreSession) -> None:
        """Tell the scheduler that this worker has closed a store."""
        with self.changed:
            self._stores.pop(store.number, None)
        if not self.has_left and not self.broken:
            self.send(StoreClosed(store.number, self.rank))

    def finish(self) -> None:
        """Close the stores that are open, then leave the job."""
        errors: list[EchelonError] = []
        for store in list(self._stores.values()):
            try:
                store.on_finish()
            except EchelonError as error:  # for example a refused push that nobody waited for
                errors.append(error)
        self.leave("it finished")
        if errors:
            raise errors[0]

    def leave(self, reason: str, *, failed: bool = False) -> None:
        """Tell the scheduler that this worker leaves, and close the connection."""
        if not self.has_left:
            self.has_left = True
            if not self.broken:
                self.send(Leave(shorten(reason), failed))
            self._close()

    def abandon(self) -> None:
        """Close the connection without a message, so that the scheduler reports this worker's death."""
        if not self.has_left:
            self.has_left = True
            self._close()

    def _close(self) -> None:
        self._stack.close()
        self.on_left()

    def _store(self, number: int) -> StoreSession | None:
        """Return the session of a store. Another worker may have opened, halted or closed it before this one opens it.

        None: this worker has closed the store.
        """
        if number >= self._num_opened:
            return self._stores.setdefault(number, StoreSession(self, number))
        return self._stores.get(number)

    def _receive(self, message: ControlMessage) -> None:
        with self.changed:
            match message:
                case View(number, workers, reason):
                    self.workers = workers
                    if self.rank not in workers and not self.has_left:
                        self.broken = f"view {number} does not include this worker: {reason}"
                case Abort(reason):
                    self.broken = reason
                case BarrierDone() | Halt() | StoreClosed() | StoreEnded():
                    if (store := self._store(message.store)) is not None:
                        store.receive(message)
            self.changed.notify_all()
            for store in self._stores.values():  # with the lock: a closed store's endpoint must not be woken
                store.on_change()


class Sessions:
    """The sessions of this process by their place in a job. Threads that run several workers have several."""

    def __init__(self) -> None:
        self._sessions: dict[Place, Session] = {}

    def join(self, job: Job, transport: Transport) -> tuple[Session, bool]:
        """Return the session of a worker, and whether it has joined the job only now."""
        session = self._sessions.get(place_of(job))
        if session is not None and not session.has_left:
            return session, False
        session = self._sessions[place_of(job)] = Session(job, transport)
        return session, True

    def finish(self, job: Job, *, failed: bool = False) -> None:
        """Close the stores of a worker that are open, and leave the job. Without a session, do nothing.

        `failed`: the worker leaves without a message, so that the scheduler reports its death.
        """
        if (session := self._sessions.pop(place_of(job), None)) is not None:
            session.abandon() if failed else session.finish()


SESSIONS = Sessions()
