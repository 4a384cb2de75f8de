"""The order of the samples of each epoch, which all workers compute from the same seed."""

from __future__ import annotations

import torch
from torch import Tensor

from echelon.data.loading.order import Sampling
from echelon.train.trainer.leased import LeasedBatch


class EpochOrder:
    """The orders of the epochs; that of the present epoch is kept."""

    def __init__(self, num_samples: int, seed: int, shuffle: bool) -> None:
        self._sampling = Sampling(num_samples, 1, seed, shuffle)
        self.description = f"seed {seed}, shuffled" if shuffle else "not shuffled"  # the same on all workers
        self._epoch = -1
        self._order = torch.empty(0, dtype=torch.int64)

    def indices(self, batch: LeasedBatch) -> Tensor:
        """Return the samples of a batch."""
        if batch.epoch != self._epoch:
            self._epoch, self._order = batch.epoch, torch.from_numpy(self._sampling.order(batch.epoch))
        return self._order[batch.start : batch.stop].clone()
