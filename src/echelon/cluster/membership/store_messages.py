"""The messages of workers about their stores: opening, barriers, requests to stop, the end, closing."""

from __future__ import annotations

from echelon.cluster.membership.members import Send
from echelon.cluster.membership.rules import Rules
from echelon.cluster.membership.slice_messages import SliceMessages
from echelon.cluster.membership.stores import Stores
from echelon.cluster.messages import (
    WORKER,
    BarrierDone,
    ControlMessage,
    Forbidden,
    Halt,
    Return,
    StoreClosed,
    StoreEnded,
    StoreIsAt,
)


class StoreMessages(SliceMessages):
    """Members of a job with stores. No barrier waits for a worker that has left or has closed the store."""

    def __init__(self, rules: Rules) -> None:
        super().__init__(rules)
        self.running = False
        self._stores = Stores()

    def num_open_stores(self, connection: int) -> int:
        """Return how many stores of a worker are open."""
        member = self._members.get(connection)
        return len(self._stores.open_by(member.rank)) if member is not None else 0

    def has_open(self, rank: int, store: int) -> bool:
        """Return whether a worker has a store open. False: it has closed it. Raises Forbidden if it never opened it."""
        if self._stores.has_closed(rank, store):
            return False
        self._stores.check_open(rank, store)
        return True

    def workers_of(self, store: int) -> list[int]:
        """Return the living workers that have a store open and did not join late."""
        return [rank for rank in self.workers if store in self._stores.open_by(rank) and rank not in self._stores.late]

    def store_opened(self, connection: int, store: int) -> list[Send]:
        """Record that a worker has created a store."""
        rank = self.worker(connection)
        if rank is None:
            return []
        self._stores.open(rank, store)
        return [Send(connection, self._position(rank, store))] if rank in self._stores.late else []

    def store_joined(self, connection: int, store: int) -> list[Send]:
        """Let a late worker take part in the barriers of a store."""
        rank = self.worker(connection)
        if rank is None:
            return []
        return [Send(connection, StoreIsAt(store, self._stores.enter(rank, store), True))]

    def _position(self, rank: int, store: int) -> StoreIsAt:
        """Return where a late worker is that has opened a store."""
        return StoreIsAt(store, self._stores.num_done(store), not self._stores.is_outside(rank, store))

    def barrier(self, connection: int, sequence: int, store: int = 0) -> list[Send]:
        """Record that a worker has reached a barrier of a store."""
        rank = self.worker(connection)
        if rank is None:
            return []
        self._stores.reach(rank, store, sequence)
        return self._barriers_done(store)

    def store_ending(self, connection: int, store: int) -> list[Send]:
        """Record that a worker waits until all others have no more pushes to a store."""
        rank = self.worker(connection)
        if rank is None:
            return []
        self._stores.end(rank, store)
        return self._barriers_done(store)

    def store_closed(self, connection: int, message: StoreClosed) -> list[Send]:
        """Record that a worker has closed a store, and tell everybody."""
        rank = self.worker(connection)
        if rank is None:
            return []
        self._stores.check_open(rank, message.store)
        if rank != message.rank:
            raise Forbidden(f"it closes store {message.store} of worker {message.rank}, but is worker {rank}")
        self._stores.close(rank, message.store)
        return self.to_all(message) + self._barriers_done(message.store)

    def halt(self, connection: int, request: Halt) -> list[Send]:
        """Forward a worker's request to stop training to all workers."""
        rank = self.worker(connection)
        if rank is None or self._stores.has_closed(rank, request.store):  # it has closed the store meanwhile
            return []
        if request.store not in self._stores.open_by(rank):
            raise Forbidden(f"it halts store {request.store}, which it has not opened")
        return self._halt(request)

    def _halt(self, request: Halt) -> list[Send]:
        self._stores.halt(request.store, request.reason)
        return self.to_workers(request)

    def _restore_stores(self, rank: int, report: Return) -> list[Send]:
        """Adopt what a worker that has returned reports about its stores. Its last messages may have been lost."""
        sends = []
        for store in self._stores.restore(rank, report):
            sends += self.to_all(StoreClosed(store, rank))
        for state in report.stores:
            if state.halted is not None and self._stores.halted(state.number) is None:
                sends += self._halt(Halt(state.halted, state.number))
        return sends

    def _facts_for(self, connection: int) -> list[Send]:
        """Return what a process must know of the stores that are open: who has closed them, barriers and halts."""
        facts: list[ControlMessage] = []
        for number in self._stores.numbers:
            facts += [StoreClosed(number, rank) for rank in self.workers if self._stores.has_closed(rank, number)]
        member = self._members[connection]
        for number in sorted(self._stores.open_by(member.rank)) if member.role == WORKER else ():
            facts += self._facts_of(member.rank, number)
        return [Send(connection, fact) for fact in facts]

    def _facts_of(self, rank: int, store: int) -> list[ControlMessage]:
        """Return where a worker is in a store. A halt before the last barrier comes before it."""
        facts: list[ControlMessage] = []
        done, halted = self._stores.num_done(store), self._stores.halted(store)
        if self._stores.is_outside(rank, store) or not done:
            facts.append(self._position(rank, store))
        else:
            facts.append(BarrierDone(done, store))
        if halted is not None:
            facts.insert(0 if halted.barriers_done < done else 1, Halt(halted.reason, store))
        return facts

    def _all_barriers_done(self) -> list[Send]:
        """Return the messages of barriers that are complete because the members of the job have changed."""
        return [send for store in self._stores.with_barriers for send in self._barriers_done(store)]

    def _barriers_done(self, store: int) -> list[Send]:
        """Return the messages of a store whose barrier is complete now."""
        if not self.running:
            return []
        workers = self.worker_connections()
        completed = self._stores.complete(store, workers)
        sends: list[Send] = []
        if completed.barrier is not None:
            sends += [Send(workers[rank], BarrierDone(completed.barrier, store)) for rank in completed.members]
        if completed.has_ended:
            sends += [Send(workers[rank], StoreEnded(store)) for rank in completed.members]
        return sends
