"""The slices that a server stores, as the scheduler's views assign them.

A view says who lives, and which server is the primary or the backup of each slice. This module creates, promotes and
drops slices accordingly, removes workers that left, and rebuilds shards after a server was started again. `reception`
passes the requests of workers to the slices.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from echelon.cluster.messages import (
    MAX_STORES,
    SERVER,
    WORKER,
    Departure,
    HeldSlice,
    Member,
    NotFinite,
    Response,
    Roster,
    Settled,
    Slice,
    SliceInSync,
    View,
    encode,
)
from echelon.observe.events import EventLog
from echelon.observe.history import is_recorded
from echelon.server.shard.answer import Answer
from echelon.server.shard.shard import Shard
from echelon.server.slices.backups import Backups
from echelon.server.slices.hosted_slice import HostedSlice
from echelon.server.slices.links import Links
from echelon.server.slices.recovery import Recovery
from echelon.server.slices.seats import Seat, Seats
from echelon.server.slices.state_file import StateFiles
from echelon.transport.interface import Endpoint, Transport
from echelon.transport.outbox import Precedence

MAX_DEFECTS = 10  # keys with NaN or infinity that the scheduler is told of at the end of a store

TellScheduler = Callable[[SliceInSync | NotFinite | Settled], None]


class Slices:
    """The slices of one server process, with the workers that use them."""

    def __init__(
        self,
        rank: int,
        roster: Roster,
        endpoint: Endpoint,
        transport: Transport,
        events: EventLog,
        allowed_optimizers: Sequence[str] = (),
        state_folder: Path | None = None,
    ) -> None:
        self._rank = rank
        self._endpoint = endpoint
        self._transport = transport
        self._events = events
        self._allowed_optimizers = allowed_optimizers
        self._state_files = StateFiles(state_folder)
        servers = {member.rank: member for member in roster.members if member.role == SERVER}
        self.total = len(roster.slices) or len(servers)  # slices of the job
        self.hosted: dict[int, HostedSlice] = {}  # those that this process stores, by number
        self.seats = Seats()
        self.links = Links(transport, servers[rank].endpoint_name if rank in servers else "server")
        self.backups = Backups(self.hosted, self.links, events, self._tell)
        self._untold: list[SliceInSync | NotFinite | Settled] = []  # before the loop runs
        self.tell_scheduler: TellScheduler = self._untold.append
        self.workers: list[int] = []  # the living ones
        self._tokens: dict[int, str] = {}  # of their processes
        slices = roster.slices or [Slice(number) for number in range(self.total)]
        self.view = View(roster.view, [], "", Departure.JOINED, roster.members, slices, roster.outcome)
        # by the number of the store: the workers that have closed it
        self._closed = {store.number: set(store.closed) for store in roster.stores if store.closed}
        self._adopt(roster.members, slices)
        for hosted in self.primaries if roster.late else ():
            for store in roster.stores:
                expected = set(self.workers).difference(store.closed)
                hosted.recoveries[store.number] = Recovery(expected)

    def connect(self, tell_scheduler: TellScheduler) -> None:
        """Tell the scheduler what it has to know, from now on and what there was so far."""
        self.tell_scheduler = tell_scheduler
        while self._untold:
            tell_scheduler(self._untold.pop(0))

    def _tell(self, message: SliceInSync | NotFinite | Settled) -> None:
        self.tell_scheduler(message)

    @property
    def primaries(self) -> list[HostedSlice]:
        """The slices whose primary this server is."""
        return [hosted for hosted in self.hosted.values() if hosted.is_primary]

    @property
    def held_bytes(self) -> int:
        """The bytes that requests without an answer keep in this process."""
        return sum(shard.held_bytes for hosted in self.hosted.values() for shard in hosted.shards.values())

    def held(self) -> list[HeldSlice]:
        """Return what this server stores, for a scheduler that was started again."""
        return [
            HeldSlice(
                hosted.number,
                hosted.is_primary,
                hosted.stream is not None and hosted.stream.is_in_sync,
                hosted.work() if hosted.is_primary else [],
            )
            for hosted in self.hosted.values()
        ]

    # --- views

    def follow(self, view: View) -> None:
        """Follow the living members. A worker that was started again is another process with the same rank."""
        if view.number < self.view.number:
            return
        tokens = _tokens(view.members) or self._tokens
        new = {rank for rank, _ in tokens.items() - self._tokens.items()}
        gone = [worker for worker in self.workers if worker not in view.workers or worker in new]
        came = [worker for worker in view.workers if worker not in self.workers or worker in new]
        self.workers, self.view, self._tokens = view.workers, view, tokens
        now = time.monotonic()
        kept = set() if view.workers else self._left_open_by(gone)
        for worker in gone:
            self._remove(worker, view, now, kept)
        for worker in came:
            for hosted in self.primaries:
                hosted.worker_came(worker, self._token(worker), now)
        for hosted in self.primaries if gone else ():
            for store, recovery in list(hosted.recoveries.items()):
                for worker in gone:
                    recovery.remove(worker)
                self.recover_if_complete(hosted, store)
        if view.members:
            self._adopt(view.members, view.slices)

    def _left_open_by(self, gone: Sequence[int]) -> set[int]:
        """Return the stores that one of these workers had not closed. Workers that are started again need them."""
        return {number for number in self._stores if not self._closed.get(number, set()).issuperset(gone)}

    @property
    def _stores(self) -> set[int]:
        return {*self._closed, *(store for hosted in self.hosted.values() for store in hosted.shards)}

    def _remove(self, worker: int, view: View, now: float, kept: Collection[int]) -> None:
        """Remove a worker that has left the job from all stores. Those in `kept` stay, although nobody uses them."""
        released = [one.worker_gone(worker, view.number, now) for one in self.primaries]
        reason = "; ".join(dict.fromkeys(filter(None, released)))
        self._settle(worker)
        self._events.write("left", worker=worker, view=view.number, reason=view.reason, released=reason)
        for number in self._stores:
            self._closed.get(number, set()).discard(worker)
            self._forget(worker, number, keep=number in kept)

    def _adopt(self, members: Sequence[Member], slices: Sequence[Slice]) -> None:
        """Store the slices that a view gives this process, as their primary or backup."""
        self.seats.know(member for member in members if member.role == WORKER)
        self._tokens = _tokens(members)
        self.workers = list(self._tokens)
        self.links.know(member for member in members if member.role == SERVER)
        for number, stored in enumerate(slices):
            if stored.primary == self._rank:
                self._be_primary(number, stored)
            elif stored.backup == self._rank:
                if number not in self.hosted or self.hosted[number].is_primary:
                    self._host(number, is_primary=False)
            else:
                self.hosted.pop(number, None)

    def _host(self, number: int, *, is_primary: bool) -> HostedSlice:
        history = self._events if is_recorded(self._events) else None
        hosted = HostedSlice(number, self._make_shard, self._answer, is_primary=is_primary, history=history)
        self.hosted[number] = hosted
        return hosted

    def _be_primary(self, number: int, stored: Slice) -> None:
        now = time.monotonic()
        hosted = self.hosted.get(number)
        if hosted is None:
            hosted = self._host(number, is_primary=True)
        elif not hosted.is_primary:
            hosted.promote({rank: self._token(rank) for rank in self.workers}, self.view.number, now)
            self._catch_up(hosted, now)
            self._events.write("promoted", slice=number, server=self._rank)
            print(f"server {self._rank} stores slice {number} now", file=sys.stderr, flush=True)
        self.backups.follow(hosted, stored, now)

    def _catch_up(self, hosted: HostedSlice, now: float) -> None:
        """Let a promoted slice follow what its lost primary may have been told and did not forward."""
        for store, shard in list(hosted.shards.items()):
            for worker in self._closed.get(store, set()).intersection(shard.workers):
                hosted.store_closed(store, worker, self.view.number, now)
            for worker, token in sorted(self.users(store).items() - shard.workers.items()):
                hosted.worker_joined_store(store, worker, token, now)

    # --- stores

    def close(self, worker: int, number: int) -> None:
        """Stop waiting for a worker that has closed a store."""
        if worker not in self.workers or not 0 <= number < MAX_STORES:
            return
        self._closed.setdefault(number, set()).add(worker)
        for hosted in self.primaries:
            hosted.store_closed(number, worker, self.view.number, time.monotonic())
            if (recovery := hosted.recoveries.get(number)) is not None:
                recovery.remove(worker)
                self.recover_if_complete(hosted, number)
        self._forget(worker, number)

    def _settle(self, worker: int) -> None:
        """Tell the scheduler what became of the steps of a worker that has left, as far as it is known."""
        for hosted in self.primaries:
            if hosted.shards:
                hosted.send_settlements(self.tell_scheduler)
            else:  # a new server, which has applied nothing of it
                self.tell_scheduler(Settled(None, hosted.number, self.view.number, worker, [], []))

    def _forget(self, worker: int, number: int, *, keep: bool = False) -> None:
        """Drop the connections of a worker's store, and free a store that no living worker has open or will open.

        `keep`: its last worker died, so it is not freed.
        """
        for seat in [seat for seat in self.seats.of_worker(worker) if seat.store == number]:
            self.seats.leave(seat)
        if not keep and self._closed.get(number, set()).issuperset(self.workers):
            for hosted in self.primaries:
                if number in hosted.shards:
                    self._report_end(hosted.shards[number])
                hosted.free(number)
            self._closed.pop(number, None)

    def has_closed(self, worker: int, store: int) -> bool:
        """Return whether a worker has closed a store."""
        return worker in self._closed.get(store, ())

    def users(self, store: int) -> dict[int, str]:
        """Return the living workers that have not closed a store, and the token of each one's process."""
        return {worker: self._token(worker) for worker in self.workers if not self.has_closed(worker, store)}

    def _token(self, worker: int) -> str:
        return self._tokens.get(worker, "")

    def recover_if_complete(self, hosted: HostedSlice, store: int) -> None:
        """Rebuild a shard when all workers have said what they have of it."""
        if not hosted.recoveries[store].is_complete:
            return
        saved = self._state_files.read(hosted.number, store)
        found = hosted.recover(store, self.users(store), saved, time.monotonic())
        old = found.num_updates_old
        state = "starts from zero" if old is None else f"is {old} updates old"
        numbers = {"keys": found.num_keys, "in_part": found.num_in_part, "updates_old": old}
        self._events.write("recovered", slice=hosted.number, store=store, **numbers)
        in_part = f"; the last update of {found.num_in_part} of them was applied in part" if found.num_in_part else ""
        print(
            f"server {self._rank} has slice {hosted.number} from the workers again ({found.num_keys} keys){in_part}; "
            f"the optimizer's state {state}",
            file=sys.stderr,
            flush=True,
        )

    def _make_shard(self, slice_number: int, workers: Mapping[int, str], answer: Answer) -> Shard:
        return Shard(slice_number, self.total, workers, answer, self._transport.attach, self._allowed_optimizers)

    def _answer(
        self, seat: Seat, response: Response, frames: Sequence[memoryview], precedence: Precedence | None
    ) -> None:
        if (peer := self.seats.peer_at(seat)) is not None:
            self._endpoint.send(peer, [encode(response), *frames], precedence)

    def _report_end(self, shard: Shard) -> None:
        """Tell the scheduler if a store ends with NaN or infinity: the result of the job is not whole."""
        for defect in shard.final_defects()[:MAX_DEFECTS]:
            self.tell_scheduler(defect)

    def report_ends(self) -> None:
        """Tell the scheduler which stores end with NaN or infinity, when the job ends."""
        for hosted in self.primaries:
            for shard in hosted.shards.values():
                self._report_end(shard)

    def send_due(self, now: float) -> None:
        """Send and write what is due: settlements, inputs that were not acknowledged, optimizer states."""
        for hosted in self.hosted.values():
            hosted.send_settlements(self.tell_scheduler)
            if hosted.stream is not None and hosted.stream.resend_if_due(now):
                self._events.write("replicated_again", slice=hosted.number)
            if hosted.is_primary and hosted.stream is None:
                for store, shard in hosted.shards.items():
                    self._state_files.write_if_due(hosted.number, store, shard, now)


def _tokens(members: Sequence[Member]) -> dict[int, str]:
    """Return the tokens of the workers, by rank."""
    return {member.rank: member.token for member in members if member.role == WORKER}
