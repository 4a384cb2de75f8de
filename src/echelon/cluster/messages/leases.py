"""Messages of the ledger: who trains which samples.

A store has one ledger after the other, numbered from 0: each call of `Trainer.samples` is one. All messages of a
worker can be repeated without effect, because a worker whose connection was lost sends the latest ones again.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from echelon.cluster.messages.common import Interval, Intervals, Message, Name, Rank, StoreNumber, Work
from echelon.cluster.placement import Natural

MAX_BATCHES = 1 << 12  # of one lease
MAX_SAMPLES = 1 << 48  # of one epoch
MAX_EPOCHS = 1 << 32
MAX_HELD = 64  # leases that a worker reports
Count = Annotated[int, Meta(ge=0, lt=1 << 53)]
Seconds = Annotated[float, Meta(ge=0)]

# --- process -> scheduler


class OpenLedger(Message, frozen=True):
    """What the workers of a store train: the epochs from `epoch` to before `num_epochs`, of `num_samples` each.

    The scheduler adopts the first one and compares those of later workers with it.

    ledger          the number of the ledger in its store
    done            the positions that an earlier run has trained, from the start of `epoch` on
    lock_step       workers make rounds together, so all of them get batches of every round
    by_speed        batches of a round are sized so that the workers end it together
    max_batch       no batch is larger, with `by_speed`: the workers have memory for so many samples; 0: no limit
    order           what the order of the samples depends on, such as "seed 0, shuffled"; it gives positions a meaning
    complete_every  after so many epochs, all samples are trained before the next epoch begins; 0: epochs may overlap
    """

    store: StoreNumber
    num_samples: Annotated[int, Meta(ge=1, lt=MAX_SAMPLES)]
    batch_size: Annotated[int, Meta(ge=1, lt=MAX_SAMPLES)]
    num_epochs: Annotated[int, Meta(ge=0, lt=MAX_EPOCHS)]
    epoch: Annotated[int, Meta(ge=0, lt=MAX_EPOCHS)] = 0
    done: Intervals = []
    lock_step: bool = False
    by_speed: bool = False
    ledger: Natural = 0
    order: Name = ""
    max_batch: Annotated[int, Meta(ge=0, lt=MAX_SAMPLES)] = 0
    complete_every: Annotated[int, Meta(ge=0, lt=MAX_EPOCHS)] = 0


class TakeLease(Message, frozen=True):
    """Asks for the next batches. The answer is `Lease` or `LedgerEnded`; it may wait for the end of an epoch.

    request   counts the requests of this worker for this ledger, from 1; a repeated one gets the same answer
    clock     in lock-step: of the first push that would use the lease
    """

    store: StoreNumber
    ledger: Natural
    request: Count
    clock: Count = 0


class Trained(Message, frozen=True):
    """The first `count` batches of a lease have been applied by all servers; they took `seconds` of own time."""

    store: StoreNumber
    ledger: Natural
    lease: Count
    count: Count
    seconds: Seconds = 0.0


class GiveBack(Message, frozen=True):
    """This worker will not train the rest of a lease."""

    store: StoreNumber
    ledger: Natural
    lease: Count


class CloseLedger(Message, frozen=True):
    """This worker takes no more leases of a ledger. It has no step in flight; its leases return to the pool."""

    store: StoreNumber
    ledger: Natural


class Settled(Message, frozen=True):
    """Sent by the primary of a slice when nothing of a worker that left in `view` waits on it any more.

    `applied`: the latest steps of that worker that were applied to all keys of the slice; `touched`: to some of them.
    `store` None: of all stores, because a new server has none of them yet. `has_keys`: False if no step pushes anything
    to this slice, because other slices store all keys.
    """

    store: StoreNumber | None
    slice: Natural
    view: Natural
    worker: Rank
    applied: Annotated[list[Work], Meta(max_length=MAX_BATCHES)]
    touched: Annotated[list[Work], Meta(max_length=MAX_BATCHES)]
    has_keys: bool = True


class Cut(Message, frozen=True):
    """Says which cut this worker needs: that no lease is out, so that a checkpoint has whole steps only.

    `CutReady` answers. Nobody gets a lease until this worker needs no cut any more. Each message replaces the one
    before, and has all that the worker needs, so it can be repeated: it gets another answer then, but asks for nothing
    that the worker has had.

    number   counts the changes of what this worker needs; the answer has it, too
    now      a cut as soon as possible, or the one at which the worker is
    end_of   a cut when this epoch is complete, before the next one begins
    """

    store: StoreNumber
    ledger: Natural = 0
    number: Count = 0
    now: bool = False
    end_of: Count | None = None


# --- what a scheduler that was started again learns from the living: parts of `Return`


class HeldLease(msgspec.Struct, frozen=True, array_like=True):
    """A lease of a worker. The first `trained` of its batches are applied."""

    number: Count
    epoch: Count
    batches: Annotated[list[Interval], Meta(max_length=MAX_BATCHES)]
    trained: Count


class HeldLedger(msgspec.Struct, frozen=True, array_like=True):
    """A worker's part of a ledger: what it knows of the present epoch, and its latest leases, finished ones included.

    `done`: positions from the start of the present epoch on. `answered`: the latest request for a lease that was
    answered. `clock`: in lock-step, of the first push after these leases. `cut`: the latest one that this worker has
    sent; no lease may be given before it is known again.
    """

    opened: OpenLedger
    epoch: Count
    done: Intervals
    partial: Count
    leases: Annotated[list[HeldLease], Meta(max_length=MAX_HELD)]
    answered: Count = 0
    clock: Count = 0
    cut: Cut | None = None


class SliceWork(msgspec.Struct, frozen=True, array_like=True):
    """The steps of an epoch that a slice has applied.

    waiting   steps of workers that have left, whose gradients still wait or were applied to some keys only
    complete  whether the server knows all steps of the epoch: not if its process was started again meanwhile
    has_keys  False: no step pushes anything to this slice; ledger and epoch have no meaning then
    """

    store: StoreNumber
    ledger: Natural
    epoch: Count
    applied: Intervals
    waiting: Annotated[list[Work], Meta(max_length=MAX_BATCHES)] = []
    complete: bool = True
    has_keys: bool = True


# --- scheduler -> worker


class Lease(Message, frozen=True):
    """Batches for this worker, each as the positions [start, stop) of the order of an epoch; one may be empty.

    request      of the TakeLease that this answers
    first_clock  in lock-step: of the step of the first batch; the worker makes empty steps until then
    present      the present epoch: all before it are complete. It may be the one before `epoch`
    done         the positions from the start of the present epoch on that are applied by now, for the case that the
                 scheduler is lost
    partial      how many steps of lost workers were applied in part, and their samples trained again
    num_over     so many ledgers of the store are over: no worker needs to train samples of them
    """

    store: int
    ledger: int
    request: int
    number: int
    epoch: int
    batches: list[Interval]
    first_clock: int = 0
    present: int = 0
    done: list[Interval] = []
    partial: int = 0
    num_over: int = 0


class LedgerEnded(Message, frozen=True):
    """All samples of all epochs are trained. `num_over`: as in `Lease`."""

    store: int
    ledger: int = 0
    num_over: int = 0


class LedgerState(Message, frozen=True):
    """An epoch is complete: `epoch` epochs are trained, and how many steps were partial. Sent to all workers."""

    store: int
    ledger: int
    epoch: int
    partial: int = 0


class LedgerRefused(Message, frozen=True):
    """This worker's ledger differs from that of the others."""

    store: int
    ledger: int
    reason: str


class CutReady(Message, frozen=True):
    """No lease is out. What is trained is exactly this: `epoch` epochs, and the positions `done` from there on.

    `number`: of the `Cut` that this answers.
    """

    store: int
    ledger: int
    epoch: int
    done: list[Interval]
    partial: int = 0
    number: int = 0
