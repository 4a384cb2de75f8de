"""The ledgers of the job's stores, driven by messages and by changes of the view.

A store has one ledger after the other. Workers open the next one when the present one has ended for them. A worker that
joined late opens all of them in turn; it is told at once that the earlier ones are over.

A ledger is over when all its samples are trained, or when all workers of the store have closed it, those included that
have not opened it yet: a worker that ends its loop early, or leaves the job, must not end the ledger for slower ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count

from msgspec.structs import replace

from echelon.cluster.ledger.ledger import Ledger, ToWorker
from echelon.cluster.ledger.recovery import rebuild
from echelon.cluster.membership.members import Send
from echelon.cluster.membership.membership import Membership
from echelon.cluster.messages import (
    SERVER,
    WORKER,
    CloseLedger,
    Cut,
    Forbidden,
    GiveBack,
    HeldLedger,
    Lease,
    LedgerEnded,
    LedgerState,
    OpenLedger,
    Return,
    Settled,
    SliceWork,
    TakeLease,
    Trained,
    View,
)
from echelon.observe.events import EventLog

MAX_OPEN = 4  # ledgers of a store at the same time: a worker may end its loop before the others
_Number = tuple[int, int]  # of a store, and of one of its ledgers
FromWorker = OpenLedger | TakeLease | Trained | GiveBack | CloseLedger | Cut


class Ledgers:
    """The ledgers that workers use. `handle` and `settle` take messages, `follow` takes what has changed."""

    def __init__(self, membership: Membership, events: EventLog) -> None:
        self._membership = membership
        self._events = events
        self._ledgers: dict[_Number, Ledger] = {}
        self._num_over: dict[int, int] = {}  # by store: how many ledgers are over, and forgotten
        self._num_closed: dict[int, dict[int, int]] = {}  # by store and worker: how many ledgers it has closed
        self._works: dict[int, list[SliceWork]] = {}  # by slice: what was applied when the scheduler was started again
        self._view: View | None = None  # that the ledgers follow

    def handle(self, connection: int, message: FromWorker) -> list[Send]:
        """Take a message of a worker's connection. Raises Forbidden, and then has changed nothing."""
        rank = self._membership.worker(connection)
        if rank is None or not self._membership.has_open(rank, message.store):
            return []
        number = message.store, message.ledger
        if message.ledger < self._num_over.get(message.store, 0):
            ended = LedgerEnded(*number, self._count_over(message.store))
            return [Send(connection, ended)] if isinstance(message, TakeLease) else []
        if isinstance(message, OpenLedger):
            news = self._open(rank, message)
            return self._close_before(number, rank) + self._send(number, news)
        if number not in self._ledgers:
            raise Forbidden(f"it uses ledger {message.ledger} of store {message.store}, which nobody has opened")
        return self._send(number, self._pass_on(self._ledgers[number], rank, message))

    def _open(self, rank: int, opened: OpenLedger) -> list[ToWorker]:
        number = opened.store, opened.ledger
        if number not in self._ledgers:
            if self._is_full(opened.store):
                self._forget_unused(opened.store, lost=True)
            if self._is_full(opened.store):
                raise Forbidden(f"it opens ledger {opened.ledger}, but {MAX_OPEN} earlier ones are in use")
            self._membership.has_ledger = True
            ledger = self._ledgers[number] = self._create(rank, opened)
            self._events.write(
                "ledger_opened",
                store=opened.store,
                ledger=opened.ledger,
                samples=opened.num_samples,
                epoch=ledger.epoch,
                done=len(ledger.done),
            )
        return self._ledgers[number].open(rank, opened)

    def _is_full(self, store: int) -> bool:
        return sum(number[0] == store for number in self._ledgers) >= MAX_OPEN

    def _create(self, rank: int, opened: OpenLedger) -> Ledger:
        """Create a ledger that nobody has open. Before a restart of the scheduler, others may have trained a part."""
        num_slices, expected = len(self._membership.slices), self._membership.workers_of(opened.store)
        works = self._works_of(opened.store)
        mine = [work for found in works.values() for work in found if work.ledger == opened.ledger]
        if not mine:
            return Ledger(opened, num_slices, expected)
        last = max(work.epoch for work in mine)
        may_overlap = not opened.lock_step and any(work.complete for work in mine)  # otherwise nobody knows the rest
        held = HeldLedger(opened, max(opened.epoch, last - 1 if may_overlap else last), [], 0, [])
        return rebuild({rank: held}, works, num_slices, expected, {})[0]

    def _works_of(self, store: int) -> dict[int, list[SliceWork]]:
        return {index: [work for work in found if work.store == store] for index, found in self._works.items()}

    def _close_before(self, number: _Number, rank: int) -> list[Send]:
        """Close all ledgers before one for a worker: it has closed them, but the message may have been lost."""
        store, index = number
        closed = self._num_closed.setdefault(store, {})
        closed[rank] = max(index, closed.get(rank, 0))
        earlier = [one for one, ledger in self._ledgers.items() if one < number and one[0] == store]
        return [send for one in earlier for send in self._close(one, rank)]

    def _close(self, number: _Number, rank: int) -> list[Send]:
        ledger = self._ledgers.get(number)
        if ledger is None or rank not in ledger.members:
            return []
        return self._send(number, ledger.close(rank, told=self._membership.is_leaving(rank)))

    def _pass_on(self, ledger: Ledger, rank: int, message: FromWorker) -> list[ToWorker]:
        match message:
            case TakeLease(request=request, clock=clock):
                return ledger.take(rank, request, clock)
            case Trained(lease=lease, count=count, seconds=seconds):
                return ledger.trained(rank, lease, count, seconds)
            case GiveBack(lease=lease):
                return ledger.give_back(rank, lease)
            case CloseLedger(store=store, ledger=index):
                self._num_closed.setdefault(store, {})[rank] = index + 1
                return ledger.close(rank, told=self._membership.is_leaving(rank))
            case Cut():
                return ledger.cut(rank, message)
        raise AssertionError(message)

    def settle(self, number: int, report: Settled) -> list[Send]:
        """Take a server's report about a worker that left."""
        member = self._membership.member(number)
        if member is None:
            return []
        if member.role != SERVER:
            raise Forbidden("it settles a worker, which only servers do")
        numbers = [number for number in self._ledgers if report.store in (None, number[0])]
        return [send for number in numbers for send in self._send(number, self._ledgers[number].settle(report))]

    def store_opened(self, connection: int, store: int) -> None:
        """Record that a worker has opened a store, and will open its ledgers. A late one counts from its first one."""
        rank = self._membership.worker(connection)
        if rank is not None and rank in self._membership.workers_of(store):
            self._num_closed.setdefault(store, {}).setdefault(rank, 0)

    def store_closed(self, rank: int, store: int) -> list[Send]:
        """Remove a worker that has closed a store."""
        return self._remove(rank, [store], self._membership.view, closed=True)

    def returned(self, connection: int, report: Return) -> list[Send]:
        """Close the ledgers that a worker has closed while its connection was lost."""
        rank = self._membership.worker(connection) if report.member.role == WORKER else None
        if rank is None:
            return []
        sends = []
        for state in (state for state in report.stores if state.num_closed_ledgers):
            sends += self._close_before((state.number, state.num_closed_ledgers), rank)
        return sends

    def _remove(self, rank: int, stores: Iterable[int], view: int, *, closed: bool = False) -> list[Send]:
        """Remove a worker from the ledgers that it uses or would have opened."""
        sends: list[Send] = []
        told = closed and self._membership.is_leaving(rank)
        for store in stores:
            if (num_closed := self._num_closed.get(store, {}).pop(rank, None)) is None:
                continue
            for number in [number for number in self._ledgers if number[0] == store and number[1] >= num_closed]:
                if number in self._ledgers:  # those before it may be the reason that it was kept
                    sends += self._send(number, self._ledgers[number].lose(rank, view, closed=closed, told=told))
            self._forget_unused(store)
        return sends

    def follow(self) -> list[Send]:
        """Follow the view: remove the workers that have left, and note slices whose new server knows nothing."""
        view, before = self._membership.last_view, self._view
        if view is None or (before is not None and view.number == before.number):
            return []
        self._view = view
        if before is None:
            return []
        tokens = {member.token for member in view.members}
        gone = [m.rank for m in before.members if m.role == WORKER and m.token not in tokens]
        sends = []
        for number, ledger in list(self._ledgers.items()):
            for index in _replaced_slices(before, view):
                sends += self._send(number, ledger.forget_slice(index))
        for rank in gone:
            sends += self._remove(rank, list(self._num_closed), before.number + 1)
        if self._membership.over:
            for number, ledger in self._ledgers.items():
                self._report_untrained(number, ledger)
        return sends

    def _report_untrained(self, number: _Number, ledger: Ledger) -> None:
        """Record that the result is not whole, unless all samples are trained or the last worker ended its loop."""
        if ledger.untrained and (ledger.was_told or not ledger.was_closed):
            where = "epoch {} (store {}, ledger {})".format(ledger.epoch, *number)
            why = "was told to end" if ledger.was_told else "was lost"
            defect = f"{ledger.untrained} samples of {where} were not trained: the last worker that could {why}"
            self._membership.note_defect(defect)

    def rebuild(self, reports: Sequence[Return], missing: Iterable[int]) -> list[Send]:
        """Restore the ledgers from the reports of the living, after a restart. `missing`: workers that did not return.

        The view that the ledgers follow from now on is the present one.
        """
        held: dict[_Number, dict[int, HeldLedger]] = {}  # by rank
        for report in reports:
            for part in (part for part in report.held if part.is_primary):
                self._works[part.slice] = part.work
            for state in report.stores:
                if state.takes_part or state.num_closed_ledgers or state.ledger is not None:
                    self._num_closed.setdefault(state.number, {})[report.member.rank] = state.num_closed_ledgers
                self._num_over[state.number] = max(self._num_over.get(state.number, 0), state.num_over_ledgers)
                if state.ledger is not None:
                    number = state.number, state.ledger.opened.ledger
                    held.setdefault(number, {})[report.member.rank] = state.ledger
        for store, closed in self._num_closed.items():
            self._num_over[store] = max(self._num_over[store], min(closed.values()))
        view = max((report.view for report in reports), default=0) + 1
        self._view = self._membership.last_view
        sends: list[Send] = []
        for number, by_rank in sorted(held.items()):
            if number[1] < self._num_over[number[0]]:
                continue  # its workers are told so when they ask for the next lease
            left = dict.fromkeys(missing, view)
            ledger, news = rebuild(by_rank, self._works_of(number[0]), len(self._membership.slices), (), left)
            self._ledgers[number] = ledger
            self._membership.has_ledger = True
            store, index = number
            self._events.write("ledger_rebuilt", store=store, ledger=index, untrained=ledger.untrained)
            sends += self._send(number, news)
        return sends

    def _send(self, number: _Number, news: Sequence[ToWorker]) -> list[Send]:
        """Return messages for connections. Write complete epochs to the event log, and forget unused ledgers."""
        store, index = number
        for state in {id(message): message for _, message in news if isinstance(message, LedgerState)}.values():
            self._events.write("epoch_trained", store=store, ledger=index, epochs=state.epoch, partial=state.partial)
        num_over = self._count_over(store)  # a worker keeps it for the case that the scheduler is lost
        self._forget_unused(store)
        connections = self._membership.worker_connections()
        sends = []
        for rank, message in news:
            known = replace(message, num_over=num_over) if isinstance(message, Lease | LedgerEnded) else message
            sends += [Send(connections[rank], known)] if rank in connections else []
        return sends

    def _count_over(self, store: int) -> int:
        """Return how many ledgers of a store are over: those that are forgotten, and the next ones that have ended."""
        first = self._num_over.get(store, 0)
        return next(n for n in count(first) if (store, n) not in self._ledgers or not self._ledgers[store, n].has_ended)

    def _forget_unused(self, store: int, *, lost: bool = False) -> None:
        """Forget the ledgers of a store that are over and that no worker has open, the earliest ones first.

        `lost`: also those whose last worker was lost. Otherwise they are kept, because it may be started again.
        """
        awaited = min(self._num_closed.get(store, {}).values(), default=None)  # the first that a worker may need
        for number in sorted(number for number in self._ledgers if number[0] == store):
            index, ledger = number[1], self._ledgers[number]
            is_awaited = awaited is not None and awaited <= index
            if awaited is not None and self._num_over.get(store, 0) <= awaited < index:
                return  # a worker will open an earlier one, which nobody has open now
            if ledger.members or not (ledger.has_ended or ((ledger.was_closed or lost) and not is_awaited)):
                return
            del self._ledgers[number]
            self._num_over[store] = index + 1
            if ledger.untrained:
                self._events.write("ledger_left", store=store, ledger=index, untrained=ledger.untrained)
            self._report_untrained(number, ledger)


def _replaced_slices(before: View, now: View) -> list[int]:
    """Return the slices that are stored by a new process, which has none of their earlier steps."""
    found = []
    for index, (old, new) in enumerate(zip(before.slices, now.slices, strict=False)):
        knew = {_server(before, old.primary), _server(before, old.backup) if old.in_sync else None}
        if new.primary is not None and _server(now, new.primary) not in knew:
            found.append(index)
    return found


def _server(view: View, rank: int | None) -> str | None:
    """Return the token of a server."""
    return next((m.token for m in view.members if m.role == SERVER and m.rank == rank), None)
