"""Where the loop gets its batches from. `SharedFeed` reads a fixed share of the data; `leased.LeasedFeed` reads leases.

A feed knows how far the run is: the epoch, the number of the next update for the learning rate schedule, and the
position that a checkpoint stores.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, TypeAlias

import torch

from echelon.data.loading.loader import Batches
from echelon.data.loading.order import Sampling, State
from echelon.data.sets.datasets import Dataset
from echelon.train.checkpoint.saver import RunPosition
from echelon.train.loop.feeds.inputs import train_loader
from echelon.train.recipe.options import TrainOptions
from echelon.train.recipe.plan import ProcessRank, resume_line, state_at

Batch: TypeAlias = tuple[torch.Tensor, torch.Tensor]


class BatchReader(Protocol):
    """A step, as far as it reads its batches itself; a captured one reads from the memory of the device."""

    def batches(self, loader: Batches) -> Iterable[Batch | None]:
        """Return the rest of an epoch."""


class Feed(Protocol):
    """The batches of one process. `per_epoch` is the number of steps of an epoch, as the schedule counts them."""

    per_epoch: int

    @property
    def epoch(self) -> int:
        """The present epoch, from 0."""

    @property
    def first(self) -> int:
        """The number of this process's batches of the present epoch that are done."""

    def batches(self, step: BatchReader) -> Iterable[Batch | None]:
        """Yield the rest of the present epoch. A batch counts as trained when the next one is asked for."""

    def num_steps(self, epoch: int, done: int) -> int:
        """Return the steps before the next batch, since the beginning of the run, as the schedule counts them."""

    def epochs(self, epoch: int, done: int) -> float:
        """Return the epochs that are done after `done` batches of an epoch, with a fraction."""

    def epochs_at(self, position: RunPosition) -> float:
        """Return the epochs that are done at a position, with a fraction."""

    def ends_epoch(self, done: int) -> bool:
        """Return whether it is known that the present epoch ends after `done` batches."""

    def prepare_save(self, epoch: int) -> None:
        """Announce that this process will save the end of an epoch."""

    def saves_end(self, epoch: int) -> bool:
        """Return whether the end of an epoch is to be saved after its last batch; otherwise it was saved at a cut."""

    def save_here(self, epoch: int, done: int) -> RunPosition | None:
        """Return the position to save after `done` batches of an epoch; None: it will be saved at a cut."""

    def stop(self, epoch: int, done: int) -> RunPosition:
        """Return the position where all workers stop. This one has made `done` batches of an epoch."""

    @property
    def is_leased(self) -> bool:
        """Whether other workers train what this one does not."""

    def away(self) -> AbstractContextManager[None]:
        """Return a context in which other workers need not wait for this one, where the scheme allows it."""

    def resume_line(self, saved: RunPosition) -> str | None:
        """Return where a run that was stopped in the middle of an epoch continues; None if it was not."""

    def close(self) -> None:
        """End all threads and processes of the loader."""


class SharedFeed:
    """The batches of a fixed share of the data: the same number in every epoch."""

    def __init__(
        self,
        options: TrainOptions,
        dataset: Dataset,
        sampling: Sampling,
        place: ProcessRank,
        device: torch.device,
        start: RunPosition,
    ) -> None:
        self.per_epoch = sampling.batches_per_epoch
        self._sampling = sampling
        self._size = place.size
        self._start: State = state_at(sampling, start.epoch, start.samples_done, place.size)
        self._loader = train_loader(options, dataset, sampling, device, self._start)

    @property
    def epoch(self) -> int:
        return self._loader.state.epoch

    @property
    def first(self) -> int:
        return self._loader.state.position // self._sampling.batch_size

    def batches(self, step: BatchReader) -> Iterable[Batch | None]:
        return step.batches(self._loader)

    def num_steps(self, epoch: int, done: int) -> int:
        return epoch * self.per_epoch + done

    def epochs(self, epoch: int, done: int) -> float:
        return epoch + done / self.per_epoch

    def epochs_at(self, position: RunPosition) -> float:
        return self.epochs(position.epoch, position.batch)

    def ends_epoch(self, done: int) -> bool:
        return done == self.per_epoch

    def prepare_save(self, epoch: int) -> None:
        """Do nothing: each process saves its own position."""

    def saves_end(self, epoch: int) -> bool:
        return True

    def save_here(self, epoch: int, done: int) -> RunPosition | None:
        return self.stop(epoch, done)

    def stop(self, epoch: int, done: int) -> RunPosition:
        return RunPosition(epoch, done, done * self._sampling.batch_size * self._size)

    @property
    def is_leased(self) -> bool:
        return False

    def away(self) -> AbstractContextManager[None]:
        return nullcontext()

    def resume_line(self, saved: RunPosition) -> str | None:
        return resume_line(saved.epoch, saved.samples_done, self._start, self._size)

    def close(self) -> None:
        self._loader.close()
