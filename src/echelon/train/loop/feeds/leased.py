"""Batches from the leases of a ledger: each sample of an epoch is trained once, by whichever worker gets to it.

`LeasedPlans` gives a loader the leased batches of one epoch after the other. `LeasedFeed` is the loop's view of them:
epochs, the schedule and the positions of checkpoints.

Epochs overlap in the relaxed schemes: this worker is in the next one while others have the last leases of the present
one, and samples of a lost worker can come later than the first ones of the next epoch.

A checkpoint must hold the updates of exactly the samples that its position names. In lock-step nobody completes a step
while the first worker saves, because all steps need its gradient. In the other schemes, and in the middle of an epoch,
the ledger makes a cut: no worker has a lease until the values are copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import numpy as np
import torch

from echelon.cluster.ledger.intervals import IntervalSet
from echelon.cluster.messages import CutReady
from echelon.data.loading.order import BatchPlan, Indices, Sampling, State
from echelon.data.sets.datasets import Dataset
from echelon.train.checkpoint.saver import RunPosition
from echelon.train.loop.feeds.feeds import Batch, BatchReader
from echelon.train.loop.feeds.inputs import train_loader
from echelon.train.recipe.options import TrainOptions
from echelon.train.trainer.leased import LeasedBatch, LeasedBatches

OnCut = Callable[[RunPosition], None]


class LeasedPlans:
    """The leased batches of one worker. They end with each epoch, until `next_epoch` is called."""

    def __init__(self, batches: LeasedBatches, sampling: Sampling, epoch: int) -> None:
        self.epoch = epoch
        self._batches = batches
        self._sampling = sampling
        self.epoch_has_ended = False  # no batch of this epoch is left; otherwise the wait for one was interrupted
        self._order: tuple[int, Indices] | None = None

    def take(self, *, wait: bool) -> BatchPlan | None:
        """See `Plans`."""
        while self._continues() or (wait and self._waits_for_more()):
            if (batch := self._batches.take(wait=False)) is not None:  # None: the last ones were empty steps
                return self._plan(batch)
        return None

    def drop_lost(self, limit: int) -> int:
        """See `Plans`. They are lost if this worker was removed from the job and has joined it again."""
        return self._batches.drop_lost(limit)

    def _waits_for_more(self) -> bool:
        """Wait for a batch, and return whether it belongs to this epoch."""
        has_batch = self._batches.wait_for_batch()
        self.epoch_has_ended = not self._continues() and (has_batch or self._batches.ended)
        return has_batch and not self.epoch_has_ended

    def _continues(self) -> bool:
        """Return whether there is a batch now. Samples of a lost worker may come after the end of their epoch."""
        epoch = self._batches.next_epoch()
        return epoch is not None and epoch <= self.epoch

    def next_epoch(self) -> None:
        """Begin the next epoch. It ends at once if this worker gets no batch of it."""
        self.epoch += 1
        self.epoch_has_ended = False

    def _plan(self, batch: LeasedBatch) -> BatchPlan:
        epoch, start, stop = batch
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, self._sampling.order(epoch))
        positions = np.arange(start, stop, dtype=np.int64)
        return BatchPlan(epoch, self._order[1][start:stop], positions, State(epoch, stop))


class LeasedFeed:
    """The batches of one process from leases. `on_cut` is called at a cut, between steps, to save the position."""

    def __init__(
        self,
        options: TrainOptions,
        dataset: Dataset,
        batches: LeasedBatches,
        round_size: int,
        device: torch.device,
        on_cut: OnCut,
        is_interrupted: Callable[[], bool],
        *,
        is_late: bool = False,
    ) -> None:
        """`round_size`: the samples that one step of all workers uses, for the schedule.

        `is_interrupted`: whether this worker stops, also while it waits for a lease. `is_late`: it joins a running job.
        """
        opened = batches.leases.opened
        self._num_samples = opened.num_samples
        self._num_epochs = opened.num_epochs
        self._lock_step = opened.lock_step
        self._round = round_size
        self.per_epoch = -(-self._num_samples // round_size)
        largest = min(opened.max_batch if opened.by_speed else opened.batch_size, self._num_samples)
        sampling = Sampling(len(dataset.train), largest, seed=options.seed)
        self._batches = batches
        if is_late:
            batches.wait_for_batch()  # it says which epoch the others train
        epoch = self._num_epochs if batches.ended else batches.epoch
        self._plans = LeasedPlans(batches, sampling, epoch)
        self._loader = train_loader(options, dataset, sampling, device, plans=self._plans)
        resumes = self._plans.epoch == opened.epoch
        done = IntervalSet(opened.done).within(IntervalSet([(0, self._num_samples)]))
        self._resumed = len(done) if resumes else 0  # samples of this epoch
        self._position = self._resumed  # in the order of the epoch: where the newest batch begins, or the epoch ends
        batches.on_cut = lambda cut: on_cut(position_of(cut))
        batches.leases.is_interrupted = is_interrupted

    @property
    def epoch(self) -> int:
        return self._plans.epoch

    @property
    def first(self) -> int:
        return self._resumed // self._round

    def batches(self, step: BatchReader) -> Iterator[Batch | None]:
        self._position = self._resumed
        for batch in step.batches(self._loader):
            plan = self._loader.plan
            assert plan is not None
            if plan.epoch == self.epoch:
                self._position = max(self._position, int(plan.counters[0]))
            yield batch
        if self._plans.epoch_has_ended:
            self._batches.report()  # what follows may take long, such as a validation
            self._position, self._resumed = self._num_samples, 0
            self._plans.next_epoch()

    def num_steps(self, epoch: int, done: int) -> int:
        in_epoch = self.per_epoch if self._position == self._num_samples else self._position // self._round
        return epoch * self.per_epoch + in_epoch

    def epochs(self, epoch: int, done: int) -> float:
        return epoch + self._position / self._num_samples

    def epochs_at(self, position: RunPosition) -> float:
        return position.epoch + position.samples_done / self._num_samples

    def ends_epoch(self, done: int) -> bool:
        return False

    @property
    def is_leased(self) -> bool:
        return True

    # --- positions

    def prepare_save(self, epoch: int) -> None:
        """Let no worker begin the next epoch before this one has saved the end of the present one, at a cut."""
        if not self.saves_end(epoch) and self._batches.epoch == epoch:
            self._batches.leases.request_cut(at_end=True)

    def saves_end(self, epoch: int) -> bool:
        return self._lock_step or epoch + 1 == self._num_epochs

    def save_here(self, epoch: int, done: int) -> RunPosition | None:
        self._batches.leases.request_cut()
        return None

    def stop(self, epoch: int, done: int) -> RunPosition:
        """Return the leases of this worker, and the position when all workers have returned theirs."""
        cut = self._batches.stop()
        return RunPosition(self._num_epochs) if cut is None else position_of(cut)

    def away(self) -> AbstractContextManager[None]:
        return self._batches.leases.away()

    def resume_line(self, saved: RunPosition) -> str | None:
        if not saved.samples_done:
            return None
        return f"resuming epoch {saved.epoch} after {saved.samples_done} samples"

    def close(self) -> None:
        self._loader.close()
        self._batches.close()


def position_of(cut: CutReady) -> RunPosition:
    """Return the position that a checkpoint of a cut stores."""
    done = tuple((start, stop) for start, stop in cut.done)
    return RunPosition(cut.epoch, 0, sum(stop - start for start, stop in done), done)
