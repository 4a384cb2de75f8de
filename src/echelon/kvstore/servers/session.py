"""A worker's membership of the job, which all its stores share: its rank, the living members, failures of the job.

A process joins the job when it creates its first store, and leaves it when it exits. Each store has a `StoreSession`
for what it does not share with other stores.

A worker that was stopped or cut off for longer than the heartbeat timeout is removed from the job: `check_job` raises
WorkerRemoved then. After `rejoin` it is a late worker, like one that joins a job that was running before.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from echelon.cluster.messages import (
    SERVER,
    WORKER,
    Abort,
    BarrierDone,
    ControlMessage,
    CutReady,
    Finish,
    Halt,
    Lease,
    Leave,
    Leaving,
    LedgerEnded,
    LedgerRefused,
    LedgerState,
    MayLeave,
    Member,
    Outcome,
    Refused,
    Register,
    Removed,
    Return,
    Roster,
    Slice,
    StoreClosed,
    StoreEnded,
    StoreIsAt,
    StoreOpened,
    View,
    shorten,
)
from echelon.environment import Job
from echelon.errors import EchelonError, JobError, WorkerLeft, WorkerRemoved
from echelon.kvstore.servers.store_session import StoreSession
from echelon.transport.control import RECONNECT_S
from echelon.transport.interface import Transport
from echelon.transport.registration import Place, place_of, register

FAILED_S = 5.0  # that a worker which leaves because of an error tries to say so


class Session:
    """A worker that is registered with the scheduler. A thread of the control connection calls `_receive`.

    `on_view` and `on_returned` have functions that this thread calls, with the lock: after each change of the view, and
    after the connection to the scheduler was replaced, when messages that are not in `Return` may have been lost.
    """

    def __init__(self, job: Job, transport: Transport) -> None:
        self.changed = threading.Condition()  # also protects the state of all stores
        self.timeout_s = job.timeout_s
        self.ranks = range(max(job.num_workers, job.max_workers or 0))  # those that workers of the job can have
        self.broken: str | None = None
        self.removed: str | None = None  # why the scheduler removed this worker, until it has joined again
        self.has_left = False
        self.may_leave = False  # this worker has announced that it leaves, and the others continue without it
        self.was_told_to_leave = False  # and has left
        self.on_left: Callable[[], None] = lambda: None
        self.on_view: list[Callable[[View], None]] = []
        self.on_returned: list[Callable[[], None]] = []
        self._stores: dict[int, StoreSession] = {}  # by number: those that are open, and those to be opened
        self._num_opened = 0
        self._leaving: Leaving | None = None
        self._registering: Register | None = None  # while this worker joins again
        self._stack = ExitStack()
        post = self._stack.enter_context(register(job, WORKER, transport))
        self._control = post.control
        self._own = post.member
        self.rank = post.rank
        self._take_roster(post.roster)
        post.control.greeting, post.control.on_returned = self._greeting, self._returned
        post.set_handler(self._receive)  # last, because a view that arrived meanwhile needs all of the above

    def _take_roster(self, roster: Roster) -> None:
        self.is_late = roster.late  # this worker has joined a job that was running
        self.stores_at_join = {store.number: store.barriers_done for store in roster.stores}
        self._take_members(roster.view, roster.members, roster.slices, roster.outcome)
        self.hosts_at_join = self.hosts  # of all workers, unless this one is late; `hosts` loses those that leave
        # The workers that have been in the job for longer than this one, or as long and with a lower rank.
        self.elders = {rank for rank in self.workers if rank != self.rank and (roster.late or rank < self.rank)}

    def _take_members(self, view: int, members: list[Member], slices: list[Slice], outcome: Outcome) -> None:
        self.view = view
        self.members = members
        self.slices = slices
        self._outcome = outcome
        self.workers = [member.rank for member in members if member.role == WORKER]
        self.hosts = {member.rank: member.host for member in members if member.role == WORKER}
        self.servers = [member for member in members if member.role == SERVER]
        self.slice_addresses = _slice_addresses(slices, self.servers)

    @property
    def endpoint_name(self) -> str:
        """How the names of this worker's connections to servers begin."""
        return self._own.endpoint_name

    @property
    def failure(self) -> str | None:
        """Why this worker cannot continue, or None."""
        return self.broken or self._control.lost or self.removed

    @property
    def reconnecting(self) -> str | None:
        """Why the connection to the scheduler is being replaced, or None."""
        return self._control.reconnecting

    def check_job(self) -> None:
        """Raise JobError if the job has failed or the scheduler is gone, WorkerRemoved if it removed this worker."""
        if (failure := self.broken or self._control.lost) is not None:
            raise JobError(f"worker {self.rank}: the job is broken: {failure}")
        if self.removed is not None:
            raise WorkerRemoved(
                f"worker {self.rank}: the scheduler removed this worker from the job: {self.removed}; a Trainer joins "
                "it again by itself, but a program that uses a KVStore without one has to be started again"
            )

    def rejoin(self) -> None:
        """Join the job again after the scheduler removed this worker, as a late worker with a new token.

        Its open stores are late, too, and their connections to servers have to be opened again.
        """
        with self.changed:
            if self.removed is None:
                return  # another thread has done it
            if self._registering is None:
                own = self._own
                self._registering = Register(WORKER, own.rank, own.host, own.pid, own.address, secrets.token_hex(16))
                self.send(self._registering)
            end = time.monotonic() + self.timeout_s
            while self.removed is not None:
                if (failure := self.broken or self._control.lost) is not None:
                    raise JobError(f"worker {self.rank}: it cannot join the job again: {failure}")
                if not self.changed.wait(max(0.0, end - time.monotonic())):
                    raise JobError(f"worker {self.rank}: it could not join the job again within {self.timeout_s:g} s")

    def announce_leaving(self, reason: str) -> None:
        """Tell the scheduler that this worker was told to end. It then sets `may_leave`, or halts all stores."""
        with self.changed:
            if not self.has_left:
                self._leaving = self._leaving or Leaving(shorten(reason))
                self.send(self._leaving)

    def leave_as_told(self) -> None:
        """Close the stores that are open, without waiting for others, and leave the job."""
        self.finish("it was told to end" if self._leaving is None else self._leaving.reason)
        self.was_told_to_leave = True

    def send(self, message: ControlMessage) -> None:
        """Send a message to the scheduler."""
        self._control.send(message)

    def open_store(self) -> StoreSession:
        """Return the session of this worker's next store. All workers open their stores in the same order."""
        with self.changed:
            store = self._store(self._num_opened)
            assert store is not None
            self._num_opened += 1
            store.is_late = self.is_late  # until the scheduler answers; its answer may get lost with the connection
            self.send(StoreOpened(store.number))
            if self.is_late:
                store.wait_for_position()
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

    def finish(self, reason: str = "it finished") -> None:
        """Close the stores that are open, then leave the job."""
        errors: list[EchelonError] = []
        for store in list(self._stores.values()):
            try:
                store.on_finish()
            except EchelonError as error:  # for example a refused push that nobody waited for
                errors.append(error)
        self.leave(reason)
        if errors:
            raise errors[0]

    def leave(self, reason: str, *, failed: bool = False) -> None:
        """Tell the scheduler that this worker leaves, and close the connection."""
        if not self.has_left:
            self.has_left = True
            if not self.broken:
                self._control.wait_until_connected(FAILED_S if failed else RECONNECT_S)
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

    @contextmanager
    def _greeting(self) -> Iterator[ControlMessage]:
        """Yield the first message on a new connection. The lock keeps the state as it says until it is sent."""
        with self.changed:
            if self._registering is not None:
                yield self._registering
                return
            states = [store.state() for number, store in self._stores.items() if number < self._num_opened]
            yield Return(
                self._own,
                self.view,
                self.members,
                self.slices,
                states,
                num_opened=self._num_opened,
                outcome=self._outcome,
            )

    def _returned(self) -> None:
        """Send again what is not in the greeting. To register again is to have no stores yet, and no leases."""
        with self.changed:
            if self._registering is not None:
                return
            if self._leaving is not None:
                self.send(self._leaving)
            for store in self._stores.values():
                store.returned()
            for tell in self.on_returned:
                tell()

    def _receive(self, message: ControlMessage) -> None:
        with self.changed:
            match message:
                case View():
                    self._receive_view(message)
                case Abort(reason):
                    self.broken = reason
                case Finish():  # to a process that was removed, and returns when the others have finished
                    self.broken = "it is over, all workers have finished"
                case Removed(_, reason) if self._registering is None:
                    self.removed = reason
                case Roster() if self._registering is not None:
                    self._join_again(self._registering, message)
                case Refused(reason) if self._registering is not None:
                    self.broken = f"the scheduler rejected this process: {reason}"
                case MayLeave():
                    self.may_leave = True
                case BarrierDone() | Halt() | StoreClosed() | StoreEnded() | StoreIsAt():
                    if (store := self._store(message.store)) is not None:
                        store.receive(message)
                case Lease() | LedgerEnded() | LedgerState() | LedgerRefused() | CutReady():
                    if (store := self._store(message.store)) is not None and store.ledger is not None:
                        store.ledger.receive(message)
            self.changed.notify_all()
            for store in self._stores.values():  # with the lock: a closed store's endpoint must not be woken
                store.on_change()

    def _receive_view(self, view: View) -> None:
        if view.number < self.view or self.removed is not None:
            return
        tokens = {member.token for member in self.members if member.role == WORKER}
        new = [m.rank for m in view.members if m.role == WORKER and m.token not in tokens]
        self._take_members(view.number, view.members, view.slices, view.outcome)
        self.elders.difference_update(new)
        for store in self._stores.values():
            store.welcome(new)
        for tell in self.on_view:
            tell(view)

    def _join_again(self, request: Register, roster: Roster) -> None:
        """Be a late worker, with a new token. The scheduler has forgotten the stores of the earlier one."""
        self._own = next(member for member in roster.members if member.token == request.token)
        self._registering = self.removed = None
        self._take_roster(roster)
        for number in range(self._num_opened):
            self.send(StoreOpened(number))
            if number not in self._stores:
                self.send(StoreClosed(number, self.rank))
            else:
                self._stores[number].restart()
        if self._leaving is not None:
            self.send(self._leaving)


def _slice_addresses(slices: Sequence[Slice], servers: Sequence[Member]) -> list[str | None]:
    """Return the address of the server that stores each slice; None: there is none now."""
    by_rank = {member.rank: member.address for member in servers}
    if not slices:
        return [by_rank[rank] for rank in sorted(by_rank)]
    return [None if stored.primary is None else by_rank.get(stored.primary) for stored in slices]


class Sessions:
    """The sessions of this process by their place in a job. Threads that run several workers have several."""

    def __init__(self) -> None:
        self._sessions: dict[Place, Session] = {}

    def join(self, job: Job, transport: Transport) -> tuple[Session, bool]:
        """Return the session of a worker, and whether it has joined the job only now."""
        session = self._sessions.get(place_of(job))
        if session is not None and session.was_told_to_leave:
            raise WorkerLeft(session.rank)
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
