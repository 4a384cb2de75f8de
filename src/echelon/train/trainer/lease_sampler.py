"""A batch sampler for torch's DataLoader, with the promise of `Trainer.samples`: each sample once per epoch.

    sampler = echelon.LeaseSampler(trainer, len(dataset), batch_size=32, epochs=3)
    loader = DataLoader(dataset, batch_sampler=sampler, num_workers=2, persistent_workers=True)
    while sampler.has_more:
        for images, labels in loader:
            …
            trainer.step()

A DataLoader asks for batches ahead of the steps that use them. Which samples are left can depend on these steps, so a
pass over the loader ends where the sampler would have to wait for them, at the end of an epoch at the latest. When the
loop has used all batches of the pass, `has_more` waits.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch.utils.data import Sampler

from echelon.train.trainer.base import Trainer
from echelon.train.trainer.epoch_order import EpochOrder
from echelon.train.trainer.leased import LeasedBatches


class LeaseSampler(Sampler[list[int]]):
    """Yields the indices of this worker's batches. Each step of the Trainer uses the next one."""

    def __init__(
        self,
        trainer: Trainer,
        num_samples: int,
        batch_size: int,
        *,
        epochs: int = 1,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        self._trainer = trainer
        self._order = order = EpochOrder(num_samples, seed, shuffle)
        self._leased: LeasedBatches = trainer._lease_epochs(num_samples, batch_size, epochs, order, reads_ahead=True)

    @property
    def epoch(self) -> int:
        """The epoch of the next batch for this worker. All batches of a pass over the sampler belong to one epoch."""
        epoch = self._leased.next_epoch()
        return self._leased.epoch if epoch is None else epoch

    @property
    def has_more(self) -> bool:
        """Whether there is another batch for this worker. Waits for it, if all batches so far were used.

        When all epochs are trained, the Trainer can be used with the next sampler. With servers, it is also False when
        SIGTERM has told this worker to end (`Trainer.stopped`).
        """
        more = not self._trainer.stopped and self._leased.wait_for_batch()
        if not more:
            self._trainer.end_leases()
        return more

    def __iter__(self) -> Iterator[list[int]]:
        batch = None if self._trainer.stopped else self._leased.take(wait=True)
        epoch = batch.epoch if batch is not None else 0
        while batch is not None:
            yield self._order.indices(batch).tolist()
            continues = not self._trainer.stopped and self._leased.next_epoch() == epoch
            batch = self._leased.take(wait=False) if continues else None
