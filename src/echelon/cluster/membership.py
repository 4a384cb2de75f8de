"""The members of a job: registration, barriers, views and the end of the job. A pure state machine.

The scheduler's loop calls one method per event; each returns the messages to send. The job is gathering until all
processes have registered, then running, then over. A worker that leaves shrinks the view; a server that leaves ends the
job. No barrier and no view waits for a process that has left.

A message that its sender must not send, such as a barrier of a store that it has not opened, raises Forbidden and
changes nothing. Messages of a process that has left are ignored, because it may have sent them before.

A worker has one or more stores, which it numbers in the order of their creation. Each has barriers of its own, which
do not wait for a worker that has closed the store. A worker without an open store may leave without announcing it.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from echelon.cluster.barriers import Barriers
from echelon.cluster.messages import (
    SERVER,
    WORKER,
    Abort,
    BarrierDone,
    ControlMessage,
    Departure,
    Finish,
    Forbidden,
    Halt,
    Leave,
    Member,
    Refused,
    Register,
    Registered,
    Roster,
    ServersUnused,
    StoreClosed,
    StoreEnded,
    View,
    WorkerExited,
)

MAX_OPEN_STORES = 1000  # of one worker at the same time


class Send(NamedTuple):
    """A message for one connection."""

    to: int
    message: ControlMessage


class Membership:
    """The state of the scheduler. A connection is a number that the scheduler's loop assigns."""

    def __init__(self, num_workers: int, num_servers: int) -> None:
        self._wanted = {WORKER: num_workers, SERVER: num_servers}
        self._members: dict[int, Member] = {}
        self._barriers: defaultdict[int, Barriers] = defaultdict(Barriers)  # by the number of the store
        self._open: dict[int, set[int]] = {}  # rank -> the numbers of its open stores, once it has opened one
        self._num_opened: dict[int, int] = {}  # rank -> how many stores it has opened so far
        self._exited: dict[int, str] = {}  # rank -> how a worker exited that never registered
        self.view = 0
        self.running = False
        self.over = False
        self.failure: str | None = None
        self.unused: ServersUnused | None = None  # the first message of a worker whose store has no servers
        self._num_unused = 0  # such workers
        self._unused: set[int] = set()  # their connections that are open

    def member(self, connection: int) -> Member | None:
        """Return the process behind a connection, or None if it has not registered."""
        return self._members.get(connection)

    def register(self, connection: int, request: Register) -> list[Send]:
        """Register a process. A repeated request gets the same answer again."""
        if (known := self._members.get(connection)) is not None:
            return [Send(connection, Registered(known.rank))]
        if connection in self._unused:
            raise Forbidden("it registers on the connection that announced a store without servers")
        refusal = self._refusal(request)
        if refusal is not None:
            return [Send(connection, Refused(refusal))]
        taken = {m.rank for m in self._members.values() if m.role == request.role}
        free = (rank for rank in range(self._wanted[request.role]) if rank not in taken)
        rank = next(free) if request.rank is None else request.rank
        self._members[connection] = Member(
            request.role, rank, request.host, request.pid, request.address, request.token
        )
        sends = [Send(connection, Registered(rank))]
        if self.unused is not None and request.role == SERVER:
            sends.append(Send(connection, self.unused))
        if len(self._members) == sum(self._wanted.values()):
            self.running, self.view = True, 1
            roster = Roster(sorted(self._members.values(), key=lambda m: (m.role, m.rank)))
            sends += self._to_all(roster) + self._all_barriers_done()
        return sends + self._finish_if_all_exited()

    @property
    def has_time_limit(self) -> bool:
        """Whether the missing processes must register in time. Workers whose store has no servers need not."""
        return not (self.running or self.over or self._unused)

    def is_used(self, connection: int) -> bool:
        """Whether a connection is a process of the job: a member, or a worker whose store has no servers."""
        return connection in self._members or connection in self._unused

    def servers_unused(self, connection: int, message: ServersUnused) -> list[Send]:
        """Record that a worker has a store without servers. Servers then wait without a time limit."""
        if connection in self._members:
            raise Forbidden("it announces a store without servers on the connection that it registered")
        if connection not in self._unused and len(self._unused) >= self._wanted[WORKER]:
            raise Forbidden(f"it announces a store without servers, as all {len(self._unused)} workers have")
        self._num_unused += connection not in self._unused
        self._unused.add(connection)
        if self.unused is not None or self.running or self.over:
            return []
        self.unused = message
        return [Send(c, message) for c, m in self._members.items() if m.role == SERVER]

    def worker_exited(self, connection: int, message: WorkerExited) -> list[Send]:
        """Handle the exit of a worker process. If it never registered, the others must not wait for it."""
        if self.is_used(connection):
            raise Forbidden(f"it reports the exit of worker {message.rank}, which only launchers do")
        if message.rank >= (wanted := self._wanted[WORKER]):
            raise Forbidden(f"it reports the exit of worker {message.rank}, but the job has {wanted} workers")
        workers = [m.rank for m in self._members.values() if m.role == WORKER]
        if self.running or self.over or message.rank in workers:
            return []
        when = "" if self.unused else " before it joined the job"
        self._exited[message.rank] = f"worker {message.rank} {message.how}{when}"
        if message.failed or workers:
            return self.abort(self._exited[message.rank])
        return self._finish_if_all_exited()

    def barrier(self, connection: int, sequence: int, store: int = 0) -> list[Send]:
        """Record that a worker has reached a barrier of a store."""
        rank = self._worker(connection, store)
        if rank is None:
            return []
        self._barriers[store].reach(rank, sequence)
        return self._barriers_done(store)

    def store_opened(self, connection: int, store: int) -> list[Send]:
        """Record that a worker has created a store."""
        rank = self._worker(connection)
        if rank is None:
            return []
        number = self._num_opened.get(rank, 0)
        if store != number:
            raise Forbidden(f"it opens store {store}, but its next one is store {number}")
        if len(self._open.get(rank, ())) >= MAX_OPEN_STORES:
            raise Forbidden(f"it opens store {store}, although {MAX_OPEN_STORES} are open: close some before")
        self._num_opened[rank] = number + 1
        self._open.setdefault(rank, set()).add(store)
        return []

    def store_ending(self, connection: int, store: int) -> list[Send]:
        """Record that a worker waits until all others have no more pushes to a store."""
        rank = self._worker(connection, store)
        if rank is None:
            return []
        self._barriers[store].end(rank)
        return self._barriers_done(store)

    def store_closed(self, connection: int, message: StoreClosed) -> list[Send]:
        """Record that a worker has closed a store, and tell everybody."""
        rank = self._worker(connection, message.store)
        if rank is None:
            return []
        if rank != message.rank:
            raise Forbidden(f"it closes store {message.store} of worker {message.rank}, but is worker {rank}")
        self._open[rank].remove(message.store)
        self._barriers[message.store].close(rank)
        return self._to_all(message) + self._barriers_done(message.store)

    def num_open_stores(self, connection: int) -> int:
        """Return how many stores of a worker are open."""
        member = self._members.get(connection)
        return len(self._open.get(member.rank, ())) if member is not None else 0

    def halt(self, connection: int, request: Halt) -> list[Send]:
        """Forward a worker's request to stop training to all workers."""
        rank = self._worker(connection)
        if rank is None:
            return []
        if request.store not in self._open.get(rank, ()):
            if request.store < self._num_opened.get(rank, 0):
                return []  # it has closed the store meanwhile
            raise Forbidden(f"it halts store {request.store}, which it has not opened")
        return [Send(c, request) for c, m in self._members.items() if m.role == WORKER]

    def leave(self, connection: int, message: Leave) -> list[Send]:
        """Remove a process that announced that it leaves."""
        departure = Departure.FAILED if message.failed else Departure.LEFT
        return self._remove(connection, departure, message.reason)

    def lost(self, connection: int, why: str) -> list[Send]:
        """Remove a process that disappeared without announcing it."""
        if connection in self._unused:
            self._unused.remove(connection)
            return self._finish_if_all_exited()
        member = self._members.get(connection)
        if member is not None and member.role == WORKER and self._open.get(member.rank) == set():
            return self._remove(connection, Departure.LEFT, "it had closed its stores")
        return self._remove(connection, Departure.DIED, why)

    def waiting_for(self) -> str:
        """Return the processes that have not registered, for the stall report."""
        parts = []
        for role, count in self._wanted.items():
            here = {m.rank for m in self._members.values() if m.role == role}
            if missing := [str(rank) for rank in range(count) if rank not in here]:
                parts.append(f"{role} {', '.join(missing)}")
        return " and ".join(parts)

    def _worker(self, connection: int, store: int | None = None) -> int | None:
        """Return the rank of a worker, or None if it has left. It must have opened `store` and not closed it."""
        member = self._members.get(connection)
        if member is None:
            return None
        if member.role != WORKER:
            raise Forbidden("it sends a message that only workers send")
        if store is not None and store not in self._open.get(member.rank, ()):
            raise Forbidden(f"it uses store {store}, which it has not opened or has closed")
        return member.rank

    def _refusal(self, request: Register) -> str | None:
        if request.role not in self._wanted:
            return f"a process of role {request.role!r} cannot register; only workers and servers can"
        if self.running or self.over:
            return "the job has already started, and processes cannot join it later"
        if request.role == WORKER and self._exited:
            return next(iter(self._exited.values()))
        wanted = self._wanted[request.role]
        same = [m for m in self._members.values() if m.role == request.role]
        if len(same) == wanted:
            return f"all {wanted} {request.role}s have already registered"
        if request.rank is not None:
            if not 0 <= request.rank < wanted:
                return f"{request.role} rank {request.rank} is out of range; the job has {wanted} {request.role}s"
            if taken := next((m for m in same if m.rank == request.rank), None):
                return f"{request.role} rank {request.rank} is taken by {taken}"
        return None

    def _remove(self, connection: int, departure: Departure, why: str) -> list[Send]:
        member = self._members.pop(connection, None)
        if member is None or self.over:
            return []
        if member.role == SERVER or not self.running:
            before = "" if self.running else " before the job started"
            return self.abort(f"{member} {departure.value}{before}: {why}")
        workers = sorted(m.rank for m in self._members.values() if m.role == WORKER)
        self.view += 1
        view = View(self.view, workers, f"{member} {departure.value}: {why}", departure)
        sends = self._to_all(view) + self._all_barriers_done()
        if not workers:
            self.over = True
            sends += self._to_all(Finish())
        return sends

    def _finish_if_all_exited(self) -> list[Send]:
        """End the job if all workers exited without registering, and none failed: they did not use the servers."""
        num_exited = max(len(self._exited), self._num_unused - len(self._unused))
        if self.running or self.over or num_exited < self._wanted[WORKER]:
            return []
        if len(self._members) < self._wanted[SERVER]:
            return []
        self.over = True
        return self._to_all(Finish())

    def _all_barriers_done(self) -> list[Send]:
        """Return the messages of barriers that are complete because the members of the job have changed."""
        return [send for store in list(self._barriers) for send in self._barriers_done(store)]

    def _barriers_done(self, store: int) -> list[Send]:
        """Return the messages of a store whose barrier is complete now; forget a store that all workers have closed."""
        if not self.running:
            return []
        workers = {m.rank: c for c, m in self._members.items() if m.role == WORKER}
        barriers = self._barriers[store]
        members = [rank for rank in workers if rank not in barriers.closed]
        sends: list[Send] = []
        if (sequence := barriers.complete(members)) is not None:
            sends += [Send(workers[rank], BarrierDone(sequence, store)) for rank in members]
        if barriers.has_ended(members):
            sends += [Send(workers[rank], StoreEnded(store)) for rank in members]
        if not members:
            del self._barriers[store]
        return sends

    def abort(self, reason: str) -> list[Send]:
        """End the job because it has failed."""
        self.over, self.failure = True, reason
        # Servers that nobody uses did not fail, and have nothing to report.
        return self._to_all(Finish() if self.unused and not self.running else Abort(reason))

    def _to_all(self, message: ControlMessage) -> list[Send]:
        return [Send(connection, message) for connection in self._members]
