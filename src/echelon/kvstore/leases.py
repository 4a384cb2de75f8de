"""Which samples this worker trains next: leases of batches, each an interval of positions of an epoch's order.

`Leases` is what a Trainer uses. A store with servers gets its leases from the ledger of the scheduler
(`servers/leases.py`). Without servers each worker computes its equal part of every round (`EqualLeases`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from echelon.cluster.ledger.axis import Axis
from echelon.cluster.ledger.intervals import IntervalSet
from echelon.cluster.ledger.rounds import sizes_of, take_block
from echelon.cluster.messages import CutReady, Lease, OpenLedger


class Leases:
    """A worker's leases of one ledger. `epoch`, the present one, and `partial` are the newest that it knows."""

    def __init__(self, opened: OpenLedger) -> None:
        self.opened = opened
        self.epoch = opened.epoch
        self.partial = 0  # steps of lost workers that were applied in part, and whose samples are trained again
        self.ended = False  # whether all samples of all epochs are trained
        self.is_interrupted: Callable[[], bool] = lambda: False  # whether this worker waits for leases no longer

    def take(self, *, wait: bool) -> Lease | None:
        """Return the next lease. None: all epochs are trained (`ended`), or without `wait`: there is none yet."""
        raise NotImplementedError

    def ask(self, clock: int) -> None:
        """Ask for the next lease, without waiting. `clock`: in lock-step, of the first push that will use it."""

    def trained(self, lease: int, count: int, seconds: float) -> None:
        """Report that all servers have applied the first `count` batches of a lease. `seconds`: of own time."""

    def give_back(self, lease: int) -> None:
        """Return the batches of a lease that are not trained. No step of them may be in flight."""

    def request_cut(self, *, at_end: bool = False) -> None:
        """Ask that no worker has a lease. `cut` is set when that is so; until `end_cut`, nobody gets one.

        `at_end`: not now, but when the present epoch is complete.
        """

    @property
    def cut(self) -> CutReady | None:
        """What is trained at the cut that this worker has asked for; None: it is not reached yet."""
        return None

    def end_cut(self) -> None:
        """Let leases be given again."""

    def away(self) -> AbstractContextManager[None]:
        """Return a context in which no worker waits for this one, unless all workers make the same rounds."""
        return nullcontext()

    def close(self) -> None:
        """Take no more leases. Those that this worker has return to the pool. No step may be in flight."""


class EqualLeases(Leases):
    """Equal parts of every round, which each worker computes by itself: nobody may be lost."""

    def __init__(self, opened: OpenLedger, workers: Sequence[int], rank: int) -> None:
        super().__init__(opened)
        self._workers = sorted(workers)
        self._rank = rank
        self._number = 0
        self._pool = self._begin()

    def _begin(self) -> IntervalSet:
        opened = self.opened
        self.ended = self.epoch >= opened.num_epochs
        done = Axis(opened.num_samples).after(self.epoch - opened.epoch, opened.done)
        return IntervalSet([(0, 0 if self.ended else opened.num_samples)]).without(done)

    def take(self, *, wait: bool) -> Lease | None:
        while not self._pool and not self.ended:
            self.epoch += 1
            self._pool = self._begin()
        if self.ended:
            return None
        epoch = self.epoch
        shares = take_block(self._pool, sizes_of(self._workers, self.opened.batch_size))
        self._number += 1
        return Lease(self.opened.store, self.opened.ledger, 0, self._number, epoch, shares[self._rank])
