"""Who trains which samples: the ledger of one store. A pure state machine.

An epoch is the positions 0 … num_samples - 1 of an order that the workers compute from a seed. At any time each
position of an epoch that has begun is in exactly one place: in the pool, in a lease of a living worker, with a lost
worker that is not settled, or done. A position is done when the step that used it has been applied by all servers. The
present epoch is the first one with positions that are not done.

Epochs overlap: when the pool is empty, the next epoch begins, so that no worker waits for the last leases of the
others. At most two epochs have begun and are not complete. Epochs do not overlap in lock-step, where a checkpoint is
made at the end of an epoch (`complete_every`), and while a worker needs a cut.

The servers know what they have applied. When a worker is lost, each slice reports which of the worker's latest steps it
has applied (`Settled`). Batches that all slices have applied are done. The others return to the pool; those that some
slice has applied are counted as partial, because their samples will have been used more than once.

Each method returns the messages to send as (rank, message). Messages about leases that a worker does not have any more
are ignored, because it may have sent them before it was removed, or a second time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec.structs import replace

from echelon.cluster.ledger.axis import Axis
from echelon.cluster.ledger.intervals import Interval, IntervalSet
from echelon.cluster.ledger.rounds import Speeds, is_tail, sizes_of, take_block, take_lease
from echelon.cluster.messages import (
    Cut,
    CutReady,
    Forbidden,
    HeldLease,
    Lease,
    LedgerEnded,
    LedgerRefused,
    LedgerState,
    OpenLedger,
    Settled,
    Work,
)

MAX_LEASES = 16  # of one worker: a DataLoader reads ahead
LedgerMessage = Lease | LedgerEnded | LedgerState | LedgerRefused | CutReady


class ToWorker(NamedTuple):
    """A message for a worker."""

    rank: int
    message: LedgerMessage


@dataclass(slots=True)
class HandedOut:
    """A lease that a worker has, as points of the axis. The first `trained` of its batches are done."""

    worker: int
    batches: list[Interval]
    trained: int = 0

    @property
    def untrained(self) -> list[Interval]:
        return [batch for batch in self.batches[self.trained :] if batch[0] < batch[1]]


@dataclass(slots=True)
class Lost:
    """Points of workers that left, until all slices have reported what they applied of these workers' steps."""

    views: dict[int, int]  # worker -> the view in which it left
    points: IntervalSet
    missing: set[tuple[int, int]]  # (worker, slice) of the reports that have not come
    applied: dict[int, IntervalSet]  # by slice
    steps: set[Interval] = field(default_factory=set)  # that a slice has applied, to all of its keys or to some


@dataclass(slots=True)
class _Asked:
    """A worker's latest request for a lease, whether it waits, and its answer, unless a lost scheduler gave it."""

    request: int
    clock: int = 0
    waits: bool = True
    answer: LedgerMessage | None = None


class Ledger:
    """The state of one ledger. The scheduler calls one method per event. `pool` and `done` are points of the axis."""

    def __init__(self, opened: OpenLedger, num_slices: int, expected: Iterable[int]) -> None:
        """`expected`: the workers of the store. The first round of a lock-step ledger waits for all of them."""
        self.opened = opened
        self.epoch = opened.epoch  # the present one
        self.partial = 0  # steps of lost workers that were applied in part
        self._axis = Axis(opened.num_samples)
        self._num_begun = self._limit(opened.epoch + 1)  # the epochs before this number have begun
        self.done = IntervalSet(self._axis.points(opened.epoch, opened.done))  # from the present epoch on
        self.pool = self._undone(opened.epoch, self._num_begun)
        self.members: set[int] = set()
        self._refused: set[int] = set()  # workers with other settings, which may ask before they receive the answer
        self._num_slices = num_slices
        self._expected = set(expected)
        self._leases: dict[int, HandedOut] = {}
        self._last_lease = 0
        self._asked: dict[int, _Asked] = {}  # by worker
        self._lost: list[Lost] = []
        self._shares: dict[int, list[tuple[int, list[Interval]]]] = {}  # by worker: blocks to fetch, with first clocks
        self._next_clock = 0  # of the next block
        self._cuts: dict[int, Cut] = {}  # the cuts that workers need
        self._at_cut: set[int] = set()  # the workers that were told that their cut is reached
        self._speeds = Speeds()
        self.was_closed = False  # by the latest worker that left it; one that was lost may be started again
        self.was_told = False  # whether that worker was told to end, so that its loop was not at its end

    @property
    def has_ended(self) -> bool:
        """Whether all epochs are trained."""
        return self.epoch >= self.opened.num_epochs

    @property
    def untrained(self) -> int:
        """How many samples of the present epoch are not done."""
        return len(self._undone(self.epoch, self._limit(self.epoch + 1)))

    # --- events of workers

    def open(self, rank: int, opened: OpenLedger) -> list[ToWorker]:
        """Let a worker take part. Its settings must be those of the first one; `done` and `epoch` may be older."""
        ours = replace(self.opened, done=[], epoch=0)
        theirs = replace(opened, done=[], epoch=0)
        if ours != theirs:
            reason = f"the other workers have opened {_described(ours)}, but worker {rank} opens {_described(theirs)}"
            self._refused.add(rank)
            return [ToWorker(rank, LedgerRefused(opened.store, opened.ledger, reason))]
        self._refused.discard(rank)
        self.members.add(rank)
        self.was_closed = self.was_told = False
        self._expected.discard(rank)
        return self._advance()

    def take(self, rank: int, request: int, clock: int) -> list[ToWorker]:
        """Answer a worker's request for a lease, now or when there is one. A repeated request gets the same answer."""
        if rank in self._refused:
            return []
        self._check_member(rank)
        asked = self._asked.get(rank)
        if asked is not None and request < asked.request:
            return []
        if asked is not None and request == asked.request:
            return [ToWorker(rank, asked.answer)] if asked.answer is not None else []
        if (held := sum(lease.worker == rank for lease in self._leases.values())) >= MAX_LEASES:
            raise Forbidden(f"it takes a lease, but has {held} that it has not reported as trained")
        self._asked[rank] = _Asked(request, clock)
        return self._serve()

    def trained(self, rank: int, number: int, count: int, seconds: float = 0.0) -> list[ToWorker]:
        """Record that the first `count` batches of a lease are applied by all servers."""
        lease = self._lease(rank, number)
        if lease is None or count <= lease.trained:
            return []
        if count > len(lease.batches):
            raise Forbidden(f"it reports {count} batches of lease {number}, which has {len(lease.batches)}")
        new = lease.batches[lease.trained : count]
        lease.trained = count
        self._add_done(new)
        if count == len(lease.batches):
            del self._leases[number]
        self._speeds.measure(rank, sum(stop - start for start, stop in new), seconds)
        return self._advance()

    def give_back(self, rank: int, number: int) -> list[ToWorker]:
        """Return the untrained batches of a lease to the pool. Its worker has no step of them in flight."""
        lease = self._lease(rank, number)
        if lease is None:
            return []
        del self._leases[number]
        self._return(lease.untrained)
        return self._advance()

    def cut(self, rank: int, cut: Cut) -> list[ToWorker]:
        """Hand out no more leases while a worker needs a cut, and tell it when none is out."""
        self._cuts.pop(rank, None)
        self._at_cut.discard(rank)
        if cut.now or cut.end_of is not None:
            self._check_member(rank)
            self._cuts[rank] = cut
        return self._advance()

    # --- events of the job

    def lose(self, rank: int, view: int, *, closed: bool = False, told: bool = False) -> list[ToWorker]:
        """Remove a worker that was lost, or that `closed` the store. Its leases wait until the slices have settled it.

        It may also be one that has not opened the ledger yet. `told`: see `close`.
        """
        self._expected.discard(rank)
        if rank in self.members:
            self.was_closed, self.was_told = closed, told
        elif not closed:
            self.was_closed = False
        held = self._remove(rank)
        if held:
            self._await_settlement({rank: view}, IntervalSet(held))
        return self._advance()

    def close(self, rank: int, *, told: bool = False) -> list[ToWorker]:
        """Remove a worker that takes no more leases. It has no step in flight, so its leases return at once.

        `told`: it was told to end, and did not leave its loop by itself.
        """
        if rank in self.members:
            self.was_closed, self.was_told = True, told
        self._return(self._remove(rank))
        return self._advance()

    def settle(self, report: Settled) -> list[ToWorker]:
        """Take a slice's report about a worker that left."""
        applied, touched = self._own(report.applied), self._own(report.touched)
        for lost in self._lost:
            if (report.worker, report.slice) in lost.missing and lost.views[report.worker] <= report.view:
                lost.missing.discard((report.worker, report.slice))
                lost.steps.update(applied, touched)
                for start, stop in applied if report.has_keys else lost.points:
                    lost.applied[report.slice].add(start, stop)
        return self._finish_settled()

    def forget_slice(self, index: int) -> list[ToWorker]:
        """Stop waiting for a slice whose server was replaced by one that knows nothing of earlier steps."""
        for lost in self._lost:
            lost.missing = {(worker, slice_) for worker, slice_ in lost.missing if slice_ != index}
        return self._finish_settled()

    # --- after a restart of the scheduler

    def restore(self, epoch: int, num_begun: int, done: IntervalSet, partial: int, clock: int) -> None:
        """Continue with what the living know: `done`, from the present epoch on. All else is in the pool.

        num_begun  the epochs before this number may have begun: lost workers may have had leases of all of them
        clock      in lock-step, of the first push after the leases that the living have
        """
        self.epoch, self._num_begun, self.partial, self._next_clock = epoch, num_begun, partial, clock
        self.done = IntervalSet(done)
        self.pool = self._undone(epoch, num_begun)

    def restore_worker(self, rank: int, answered: int) -> None:
        """Let a living worker take part, whose latest request for a lease that was answered is `answered`."""
        self.members.add(rank)
        self._asked[rank] = _Asked(answered, waits=False)

    def restore_cut(self, rank: int, cut: Cut) -> None:
        """Restore the cut that a living worker needs. It may be at it, so this comes before any lease is given."""
        if cut.now or cut.end_of is not None:
            self._cuts[rank] = cut

    def restore_lease(self, rank: int, held: HeldLease) -> None:
        """Let a living worker keep a lease of the present epoch or of the next one."""
        number, trained, batches = held.number, held.trained, self._axis.points(held.epoch, held.batches)
        lease = HandedOut(rank, batches, trained)
        for start, stop in lease.untrained:
            self.pool.remove(start, stop)
        self._last_lease = max(self._last_lease, number)
        if trained < len(batches):
            self._leases[number] = lease

    def withhold(self, views: Mapping[int, int]) -> list[ToWorker]:
        """Keep the pool back until workers that did not return are settled, because they may be training it.

        Nobody living knows their leases. `views`: in which view each of them left.
        """
        if views and self.pool:
            self._await_settlement(views, self.pool)
            self.pool = IntervalSet()
        return self._advance()

    # --- inside

    def _limit(self, epoch: int) -> int:
        return min(epoch, self.opened.num_epochs)

    def _undone(self, first: int, stop: int) -> IntervalSet:
        """Return the points of the epochs from `first` to before `stop` that are not done."""
        return IntervalSet([self._axis.epochs(first, stop)]).without(self.done)

    def _lease(self, rank: int, number: int) -> HandedOut | None:
        lease = self._leases.get(number)
        return lease if lease is not None and lease.worker == rank else None

    def _check_member(self, rank: int) -> None:
        if rank not in self.members:
            raise Forbidden(f"it uses ledger {self.opened.ledger} of store {self.opened.store}, but has not opened it")

    def _own(self, works: Iterable[Work]) -> list[Interval]:
        """Return those of a slice's steps that belong to this ledger, as points."""
        mine = (work for work in works if work.ledger == self.opened.ledger)
        return [point for work in mine for point in self._axis.points(work.epoch, [(work.start, work.stop)])]

    def _return(self, batches: Iterable[Interval]) -> None:
        for start, stop in batches:
            self.pool.add(start, stop)

    def _remove(self, rank: int) -> list[Interval]:
        """Remove a worker. Return the untrained batches of its leases; those that it has not fetched return at once."""
        self.members.discard(rank)
        self._asked.pop(rank, None)
        self._cuts.pop(rank, None)
        self._at_cut.discard(rank)
        self._speeds.forget(rank)
        for _, batches in self._shares.pop(rank, ()):
            self._return(batches)
        held = [number for number, lease in self._leases.items() if lease.worker == rank]
        return [batch for number in held for batch in self._leases.pop(number).untrained]

    def _await_settlement(self, views: Mapping[int, int], points: IntervalSet) -> None:
        slices = range(self._num_slices)
        missing = {(worker, index) for worker in views for index in slices}
        self._lost.append(Lost(dict(views), points, missing, {index: IntervalSet() for index in slices}))

    def _finish_settled(self) -> list[ToWorker]:
        """Decide about the positions of lost workers that all slices have reported."""
        settled = [lost for lost in self._lost if not lost.missing]
        self._lost = [lost for lost in self._lost if lost.missing]
        for lost in settled:
            left = IntervalSet(lost.points)
            for applied in lost.applied.values():
                left = left.within(applied)
            self._add_done(left)
            returned = lost.points.without(left)
            self._return(returned)
            self.partial += sum(returned.meets(start, stop) for start, stop in lost.steps)
        return self._advance()

    def _add_done(self, points: Iterable[Interval]) -> None:
        for start, stop in points:
            self.done.add(start, stop)

    def _advance(self) -> list[ToWorker]:
        """Go on to the next epoch if the present one is complete, and serve who waits."""
        sends: list[ToWorker] = []
        while not self.has_ended and self.done.covers(*self._axis.epochs(self.epoch, self.epoch + 1)):
            self.done.remove(*self._axis.epochs(self.epoch, self.epoch + 1))
            self.epoch += 1
            if self._num_begun == self.epoch and not self.has_ended:
                self._begin_next()
            state = LedgerState(self.opened.store, self.opened.ledger, self.epoch, self.partial)
            sends += [ToWorker(rank, state) for rank in sorted(self.members)]
        return sends + self._answer_cuts() + self._serve()

    def _begin_next(self) -> None:
        begun = self._num_begun
        self._num_begun += 1
        self._return(self._undone(begun, begun + 1))

    def _overlaps(self, epoch: int) -> bool:
        """Return whether an epoch may begin although the one before it is not complete."""
        every = self.opened.complete_every
        if self.opened.lock_step or epoch >= self.opened.num_epochs or (every and epoch % every == 0):
            return False
        return all(cut.end_of is None or cut.end_of >= epoch for cut in self._cuts.values())

    def _answer_cuts(self) -> list[ToWorker]:
        """Answer the requests for a cut if no lease is out and none is to be fetched."""
        if self._leases or self._lost or any(self._shares.values()):
            return []
        waiting = [rank for rank, cut in self._cuts.items() if self._is_due(cut) and rank not in self._at_cut]
        self._at_cut.update(waiting)
        opened = self.opened
        ready = CutReady(opened.store, opened.ledger, self.epoch, self._done_positions(), self.partial)
        return [ToWorker(rank, replace(ready, number=self._cuts[rank].number)) for rank in waiting]

    def _is_due(self, cut: Cut) -> bool:
        return cut.now or (cut.end_of is not None and cut.end_of < self.epoch)

    @property
    def _is_stopped(self) -> bool:
        """Whether a worker needs a cut now, so that no lease is given."""
        return any(map(self._is_due, self._cuts.values()))

    def _serve(self) -> list[ToWorker]:
        """Answer the waiting requests for leases that can be answered now."""
        sends: list[ToWorker] = []
        for rank, asked in self._asked.items():
            if asked.waits and (answer := self._answer(rank, asked)) is not None:
                asked.waits, asked.answer = False, answer
                sends.append(ToWorker(rank, answer))
        return sends

    def _answer(self, rank: int, asked: _Asked) -> LedgerMessage | None:
        if self.has_ended:
            return LedgerEnded(self.opened.store, self.opened.ledger)
        found = self._next_share(rank, asked.clock) if self.opened.lock_step else self._next_lease(rank)
        if found is None:
            return None
        first_clock, batches = found
        self._last_lease += 1
        if batches:
            self._leases[self._last_lease] = HandedOut(rank, batches)
        epoch = next((self._axis.epoch_of(start) for start, stop in batches if start < stop), self.epoch)
        return Lease(
            self.opened.store,
            self.opened.ledger,
            asked.request,
            self._last_lease,
            epoch,
            self._axis.positions(epoch, batches),
            first_clock,
            self.epoch,
            self._done_positions(),
            self.partial,
        )

    def _done_positions(self) -> list[Interval]:
        return self._axis.positions(self.epoch, self.done)

    def _next_lease(self, rank: int) -> tuple[int, list[Interval]] | None:
        """Take the next lease of a store whose workers do not make rounds together."""
        if self._is_stopped or self.has_ended:
            return None
        size = self._sizes()[rank]
        overlaps = self._overlaps(self.epoch + 1)
        left = self._left_of(self.epoch)
        if not left and overlaps:
            left = self._left_of(self.epoch + 1)
        if not left or (not overlaps and self._others_should_train(rank, left, size)):
            return None
        batches = take_lease(left, size, self._speeds.share(rank, self.members))
        for batch in batches:
            self.pool.remove(*batch)
        return 0, batches

    def _left_of(self, epoch: int) -> IntervalSet:
        """Return the points of an epoch that are in the pool. The epoch begins, if it has not."""
        if epoch == self._num_begun:
            self._begin_next()
        return self.pool.within(IntervalSet([self._axis.epochs(epoch, epoch + 1)]))

    def _others_should_train(self, rank: int, left: IntervalSet, size: int) -> bool:
        """Return whether a worker must wait for the next epoch, because others finish what is left of it sooner."""
        if any(lease.worker == rank for lease in self._leases.values()) and is_tail(left, size, len(self.members)):
            return True
        return self._speeds.others_finish_sooner(rank, min(size, len(left)), len(left), self._held_samples())

    def _held_samples(self) -> dict[int, int]:
        """Return how many samples each worker has leased and not trained."""
        held = dict.fromkeys(self.members, 0)
        for lease in self._leases.values():
            if lease.worker in held:
                held[lease.worker] += sum(stop - start for start, stop in lease.untrained)
        return held

    def _next_share(self, rank: int, clock: int) -> tuple[int, list[Interval]] | None:
        """Return a worker's part of the next block that it has not fetched, with the clock of its first round.

        A worker that joined while the others are in the last block of the epoch gets no batches: it makes empty steps
        until that block ends, because the servers wait for its pushes.
        """
        if not self._shares.get(rank):
            if self.pool and not self._is_stopped and not self._expected:
                self._make_block(clock)
            elif self._is_behind(clock):
                return self._next_clock, []
        waiting = self._shares.get(rank)
        return waiting.pop(0) if waiting else None

    def _is_behind(self, clock: int) -> bool:
        return clock < self._next_clock and bool(self._leases or any(self._shares.values()))

    def _make_block(self, clock: int) -> None:
        first = max(self._next_clock, clock)
        shares = take_block(self.pool, self._sizes())
        for rank, batches in shares.items():
            self._shares.setdefault(rank, []).append((first, batches))
        self._next_clock = first + max(map(len, shares.values()))

    def _sizes(self) -> dict[int, int]:
        speeds = self._speeds.by_worker if self.opened.by_speed else None
        return sizes_of(sorted(self.members), self.opened.batch_size, speeds, self.opened.max_batch)


def _described(opened: OpenLedger) -> str:
    parts = [f"{opened.num_epochs} epochs of {opened.num_samples} samples in batches of {opened.batch_size}"]
    parts += [opened.order] if opened.order else []
    parts += ["in lock-step"] if opened.lock_step else []
    parts += ["with batches by speed"] if opened.by_speed else []
    return ", ".join(parts)
