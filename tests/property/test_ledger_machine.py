"""The ledger under deaths, joins, give-backs, cuts and restarts of the scheduler, against a model that counts samples.

The model trains sample by sample: each slice remembers which step of which worker it has applied, completely or to some
of its keys only. However events are mixed, each position of each epoch must be applied by all slices exactly once,
beside the steps that were applied in part, which the ledger must have counted.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from msgspec.structs import replace

from echelon.cluster.ledger.axis import Axis
from echelon.cluster.ledger.intervals import IntervalSet
from echelon.cluster.ledger.ledger import Ledger, ToWorker
from echelon.cluster.ledger.recovery import rebuild
from echelon.cluster.messages import (
    Cut,
    CutReady,
    HeldLease,
    HeldLedger,
    Lease,
    LedgerEnded,
    LedgerState,
    OpenLedger,
    Settled,
    SliceWork,
    Work,
)

SLICES = 2
RANKS = 4
FINISH_ROUNDS = 3000

workers = st.integers(0, RANKS - 1)


@dataclass
class Worker:
    """What a worker process knows."""

    leases: list[HeldLease] = field(default_factory=list)  # the latest ones, finished ones included
    done: list[tuple[int, int]] = field(default_factory=list)
    epoch: int = 0
    partial: int = 0
    request: int = 0
    waits: bool = False
    ended: bool = False
    needs: Cut = field(default_factory=lambda: Cut(0))  # its latest message about cuts
    cut: CutReady | None = None  # at which it is
    reported: set[int] = field(default_factory=set)  # the leases whose last step was reported

    def keep(self, lease: HeldLease) -> None:
        """Add a lease, and forget the older ones that are finished. A real worker reports each step that it records."""
        finished = [one for one in self.leases if one.number in self.reported or not one.batches]
        self.leases = [one for one in self.leases if one not in finished[:-4]]
        self.leases.append(lease)

    def unfinished(self) -> HeldLease | None:
        return next((lease for lease in self.leases if lease.trained < len(lease.batches)), None)


@dataclass
class Slice:
    """A slice of the servers: the steps that it has applied, by worker."""

    applied: dict[int, list[Work]] = field(default_factory=dict)
    touched: dict[int, list[Work]] = field(default_factory=dict)
    everything: list[Work] = field(default_factory=list)
    departed: list[Work] = field(default_factory=list)  # steps of workers that left, applied to some keys only


class Jobs(RuleBasedStateMachine):
    """Workers, slices and a scheduler with a ledger; each rule is an event at one of them."""

    lock_step = False

    @initialize(
        samples=st.integers(1, 60),
        batch=st.integers(1, 7),
        epochs=st.integers(1, 4),
        first=st.integers(1, RANKS),
        complete_every=st.integers(0, 2),
    )
    def start(self, samples: int, batch: int, epochs: int, first: int, complete_every: int) -> None:
        self.opened = OpenLedger(0, samples, batch, epochs, lock_step=self.lock_step, complete_every=complete_every)
        self.ledger = Ledger(self.opened, SLICES, range(first))
        self.workers: dict[int, Worker] = {}
        self.slices = [Slice() for _ in range(SLICES)]
        self.view = 1
        self.counts: Counter[tuple[int, int]] = Counter()  # (epoch, position) -> times that all slices applied it
        self.partial_steps = 0
        self.unsettled: list[Settled] = []  # reports on their way
        self.num_restarts = 0
        for rank in range(first):
            self.join(rank)

    # --- the wires

    def deliver(self, sends: list[ToWorker]) -> None:
        for rank, message in sends:
            worker = self.workers.get(rank)
            if worker is None:
                continue
            match message:
                case Lease(_, _, request, number, epoch, batches, _, present, done, partial):
                    if request == worker.request and worker.waits:
                        worker.waits = False
                        is_empty = all(start == stop for start, stop in batches)
                        assert is_empty or all(one.cut is None for one in self.workers.values()), "a lease in a cut"
                        self.check_overlap(epoch, present)
                        worker.keep(HeldLease(number, epoch, batches, 0))
                        worker.epoch, worker.done, worker.partial = present, done, partial
                case LedgerState(_, _, epoch, partial):
                    worker.done = Axis(self.opened.num_samples).after(epoch - worker.epoch, worker.done)
                    worker.epoch, worker.partial = epoch, partial
                case LedgerEnded():
                    worker.waits, worker.ended = False, True
                case CutReady():
                    self.check_cut(message)
                    assert message.number == worker.needs.number, "the answer to an earlier request"
                    worker.cut = message
                    worker.needs = replace(worker.needs, now=True, end_of=None)  # if it is repeated

    def check_overlap(self, epoch: int, present: int) -> None:
        opened = self.opened
        begins_alone = opened.lock_step or (opened.complete_every and epoch % opened.complete_every == 0)
        assert present == epoch or (present == epoch - 1 and not begins_alone)
        for earlier in range(present):
            assert all(self.counts[earlier, at] for at in range(opened.num_samples)), f"epoch {earlier} is not complete"

    def check_cut(self, ready: CutReady) -> None:
        num_samples, done = self.opened.num_samples, IntervalSet(ready.done)
        for position in range(2 * num_samples):
            applied = self.counts[ready.epoch + position // num_samples, position % num_samples]
            assert applied == done.covers(position, position + 1), "a cut has whole steps only"

    # --- events

    @rule(rank=workers)
    def join(self, rank: int) -> None:
        if rank not in self.workers:
            self.view += 1
            self.workers[rank] = Worker()
            self.deliver(self.ledger.open(rank, self.opened))

    @rule(rank=workers)
    def take(self, rank: int) -> None:
        worker = self.workers.get(rank)
        if worker is not None and not worker.waits and not worker.ended:
            held = [lease for lease in worker.leases if lease.trained < len(lease.batches)]
            if len(held) < 2:
                worker.request, worker.waits = worker.request + 1, True
                self.deliver(self.ledger.take(rank, worker.request, 0))

    @rule(rank=workers)
    def take_again(self, rank: int) -> None:
        """A request is sent a second time, because the connection was lost."""
        worker = self.workers.get(rank)
        if worker is not None and worker.request and rank in self.ledger.members:
            self.deliver(self.ledger.take(rank, worker.request, 0))

    @rule(rank=workers, report=st.booleans(), twice=st.booleans())
    def step(self, rank: int, report: bool, twice: bool) -> None:
        """All slices apply a step; the worker reports it at once or with a later one."""
        worker = self.workers.get(rank)
        lease = worker.unfinished() if worker is not None else None
        if worker is None or lease is None:
            return
        self.apply(rank, lease, SLICES)
        self.replace(worker, lease, HeldLease(lease.number, lease.epoch, lease.batches, lease.trained + 1))
        if report:
            for _ in range(1 + twice):
                self.report(rank)

    @rule(rank=workers)
    def report(self, rank: int) -> None:
        for lease in list(self.workers[rank].leases) if rank in self.workers else ():
            if lease.trained == len(lease.batches):
                self.workers[rank].reported.add(lease.number)
            self.deliver(self.ledger.trained(rank, lease.number, lease.trained, 0.5))

    @rule(rank=workers)
    def give_back(self, rank: int) -> None:
        worker = self.workers.get(rank)
        lease = worker.unfinished() if worker is not None else None
        if worker is not None and lease is not None:
            self.report(rank)
            worker.leases.remove(lease)
            self.deliver(self.ledger.give_back(rank, lease.number))

    @rule(rank=workers, slices=st.integers(0, SLICES), touched=st.booleans())
    def die(self, rank: int, slices: int, touched: bool) -> None:
        """A worker is killed in a step that only some slices, or some keys of a slice, have applied."""
        worker = self.workers.get(rank)
        if worker is None:
            return
        if (lease := worker.unfinished()) is not None:
            self.apply(rank, lease, slices, touched=touched)
        self.leave(rank)

    @rule(rank=workers)
    def close(self, rank: int) -> None:
        """A worker ends its loop early, and leaves the job."""
        if rank in self.workers:
            self.report(rank)
            self.workers[rank].cut = None  # it makes no checkpoint any more
            self.deliver(self.ledger.close(rank))
            self.leave(rank)

    @rule(number=st.integers(0, 50))
    def settle(self, number: int) -> None:
        """A slice's report about a lost worker arrives."""
        if self.unsettled:
            self.deliver(self.ledger.settle(self.unsettled.pop(number % len(self.unsettled))))

    @rule(rank=workers, at_end=st.booleans())
    def cut(self, rank: int, at_end: bool) -> None:
        worker = self.workers.get(rank)
        if worker is not None and rank in self.ledger.members and worker.cut is None:
            needs = {"end_of": worker.epoch} if at_end else {"now": True}
            worker.needs = replace(worker.needs, number=worker.needs.number + 1, **needs)
            self.deliver(self.ledger.cut(rank, worker.needs))

    @rule(rank=workers)
    def cut_again(self, rank: int) -> None:
        """A request is sent a second time, because the connection was lost."""
        if rank in self.workers and rank in self.ledger.members:
            self.deliver(self.ledger.cut(rank, self.workers[rank].needs))

    @rule(rank=workers)
    def end_cut(self, rank: int) -> None:
        worker = self.workers.get(rank)
        if worker is not None and rank in self.ledger.members:
            worker.cut, worker.needs = None, Cut(0, number=worker.needs.number + 1)
            self.deliver(self.ledger.cut(rank, worker.needs))

    @rule(lost=st.sets(workers, max_size=2))
    def restart_scheduler(self, lost: set[int]) -> None:
        """The scheduler is killed, and started again. Some workers do not return, and are settled later."""
        held = {rank: self.held(worker) for rank, worker in self.workers.items() if rank not in lost}
        if not held or self.ledger.has_ended:
            return
        reports = {index: self.slice_work(index) for index in range(SLICES)}
        missing = {rank: self.view + 1 for rank in lost if rank in self.workers}
        self.num_restarts += 1
        self.unsettled.clear()  # settled workers are part of the slices' reports
        assert self.workers.keys() == held.keys() | missing.keys()
        for rank in missing:
            self.workers[rank].cut = None  # it does not make its checkpoint
        self.ledger, sends = rebuild(held, reports, SLICES, (), missing)
        self.deliver(sends)
        for rank in missing:
            self.leave(rank, told=True)
        for rank in held:
            self.deliver(self.ledger.open(rank, self.opened))
            worker = self.workers[rank]
            self.report(rank)
            self.cut_again(rank)
            if worker.waits:
                self.deliver(self.ledger.take(rank, worker.request, 0))

    # --- the model

    def apply(self, rank: int, lease: HeldLease, slices: int, *, touched: bool = False) -> None:
        start, stop = lease.batches[lease.trained]
        if start == stop:
            return
        work = Work(lease.epoch, start, stop)
        for index in range(slices):
            self.slices[index].applied.setdefault(rank, []).append(work)
            self.slices[index].everything.append(work)
        is_touched = touched and slices < SLICES
        if is_touched:
            self.slices[slices].touched.setdefault(rank, []).append(work)
        if slices == SLICES:
            self.counts.update((lease.epoch, position) for position in range(start, stop))
        elif slices or is_touched:
            self.partial_steps += 1

    def replace(self, worker: Worker, old: HeldLease, new: HeldLease) -> None:
        worker.leases[worker.leases.index(old)] = new

    def leave(self, rank: int, *, told: bool = False) -> None:
        self.view += 1
        del self.workers[rank]
        for index, part in enumerate(self.slices):
            applied, touched = part.applied.pop(rank, []), part.touched.pop(rank, [])
            part.departed += touched
            self.unsettled.append(Settled(0, index, self.view, rank, applied[-64:], touched))
        if not told:
            self.deliver(self.ledger.lose(rank, self.view))

    def held(self, worker: Worker) -> HeldLedger:
        answered = worker.request - worker.waits
        known = self.opened, worker.epoch, worker.done, worker.partial
        return HeldLedger(*known, list(worker.leases), answered, cut=worker.needs)

    def slice_work(self, index: int) -> list[SliceWork]:
        part = self.slices[index]
        epochs = {work.epoch for work in (*part.everything, *part.departed)}
        return [
            SliceWork(
                0,
                0,
                epoch,
                list(IntervalSet((work.start, work.stop) for work in part.everything if work.epoch == epoch)),
                [work for work in part.departed if work.epoch == epoch],
            )
            for epoch in epochs
        ]

    @invariant()
    def no_position_is_trained_twice(self) -> None:
        if hasattr(self, "counts"):
            twice = [position for position, count in self.counts.items() if count > 1]
            assert not twice, f"(epoch, position) {twice[0]} was trained twice"

    def teardown(self) -> None:
        """Let one worker more join, and all train to the end: nothing may be missing then."""
        if not hasattr(self, "counts"):
            return
        self.join(0)
        for rank in list(self.workers):
            self.end_cut(rank)
        for number in range(FINISH_ROUNDS):
            if all(worker.ended for worker in self.workers.values()):
                break
            self.settle(0)
            for rank in list(self.workers):
                self.take(rank)
                self.step(rank, report=number % 2 == 0, twice=False)
                self.report(rank)
        assert all(worker.ended for worker in self.workers.values()), "the ledger does not end"
        every = {(epoch, at) for epoch in range(self.opened.num_epochs) for at in range(self.opened.num_samples)}
        assert self.counts == dict.fromkeys(every, 1), "each sample once per epoch"
        most = self.partial_steps * (1 + self.num_restarts)  # each restart may count a step again
        assert self.ledger.partial <= most, "no whole step is counted as partial"
        assert self.num_restarts or self.ledger.partial == self.partial_steps
        self.no_position_is_trained_twice()


class LockStepJobs(Jobs):
    """The same with blocks of rounds."""

    lock_step = True


@pytest.mark.parametrize("machine", [Jobs, LockStepJobs])
def test_each_sample_is_trained_once_per_epoch_whatever_happens(machine: type[Jobs]) -> None:
    run_state_machine_as_test(machine, settings=settings(max_examples=150, stateful_step_count=30))
