"""Chooses where a run gets its batches from: leases where these are possible, else a fixed share of the data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from echelon.data.loading.order import Sampling
from echelon.data.sets.builtin import SyntheticSource
from echelon.data.sets.datasets import Dataset
from echelon.schemes.stores import store_kind
from echelon.train.checkpoint.saver import RunPosition
from echelon.train.loop.feeds.feeds import Feed, SharedFeed
from echelon.train.loop.feeds.leased import LeasedFeed
from echelon.train.recipe.options import LEASES, TrainOptions
from echelon.train.recipe.plan import ProcessRank, choose_allocator, sampling_for
from echelon.train.step.choose import EngineChoice
from echelon.train.trainer.base import Trainer
from echelon.train.trainer.servers.trainer import ServerTrainer


@dataclass(frozen=True, slots=True)
class FeedPlan:
    """How the data of a run is divided.

    `options` name the allocator; `num_workers` are those that the job was started with; `sampling` is that of a fixed
    share. `in_lock_step`: all processes make the same number of steps.
    """

    options: TrainOptions
    place: ProcessRank
    num_workers: int
    num_examples: int
    in_lock_step: bool
    sampling: Sampling | None

    @property
    def batch_size(self) -> int:
        """The samples of one process in a step; the last batches of an epoch may have fewer."""
        return self.options.batch_size if self.sampling is None else self.sampling.batch_size

    @property
    def per_epoch(self) -> int:
        """The steps of an epoch, as the schedule counts them."""
        if self.sampling is not None:
            return self.sampling.batches_per_epoch
        return -(-self.num_examples // self._round_size)

    @property
    def _round_size(self) -> int:
        return self.num_workers * self.options.batch_size

    def open(
        self,
        dataset: Dataset,
        trainer: Trainer,
        device: torch.device,
        start: RunPosition,
        on_cut: Callable[[RunPosition], None],
        is_interrupted: Callable[[], bool],
        *,
        is_late: bool,
    ) -> Feed:
        """Open the data at a position. `is_interrupted` and `is_late`: see `LeasedFeed`."""
        if self.sampling is not None:
            return SharedFeed(self.options, dataset, self.sampling, self.place, device, start)
        batches = trainer.lease(
            self.num_examples,
            self.options.batch_size,
            num_epochs=self.options.num_epochs,
            epoch=start.epoch,
            done=start.done,
            by_speed=self.options.batch_by_speed,
            max_batch=self._round_size if self.options.batch_by_speed else 0,  # also if more workers join
            order=f"seed {self.options.seed}, shuffled",
            complete_every=0 if self.options.model_prefix is None else self.options.save_period,
        )
        return LeasedFeed(
            self.options, dataset, batches, self._round_size, device, on_cut, is_interrupted, is_late=is_late
        )


def plan_feed(
    options: TrainOptions,
    dataset: Dataset,
    trainer: Trainer,
    choice: EngineChoice,
    place: ProcessRank,
    num_workers: int,
) -> FeedPlan:
    """Plan the data of a run; raises UsageError for leases that are not possible."""
    num_samples = len(dataset.train)
    num_examples = min(options.num_examples or num_samples, num_samples)
    allocator = choose_allocator(
        options,
        with_servers=isinstance(trainer, ServerTrainer),
        num_devices=place.num_devices,
        fixed_batches=choice.captured or choice.compiled,
        synthetic=isinstance(dataset.train, SyntheticSource),
    )
    options = replace(options, data_allocator=allocator)
    in_lock_step = place.size > 1 and store_kind(trainer.kvstore.type).lock_step
    if allocator == LEASES:
        rank = trainer.kvstore.rank  # a worker that joins later has a rank of its own, too
        place = ProcessRank(rank, max(num_workers, rank + 1))
        return FeedPlan(options, place, num_workers, num_examples, in_lock_step, None)
    fixed = choice.captured or choice.compiled or in_lock_step
    sampling = sampling_for(options, num_samples, place, fixed=fixed)
    return FeedPlan(options, place, num_workers, num_examples, fixed and place.size > 1, sampling)
