"""Data sets that need no files: the digits that ship with the package, and synthetic batches.

The digits are scikit-learn's 8x8 handwritten digits; the demo and the tests use them.

Synthetic batches are for `--benchmark 1`: one random batch, yielded at every step. It measures a network or a store
without any data pipeline, as MXNet's benchmark does: images are uniform in -1 ... 1, labels are uniform over the
classes, and an epoch has num_examples // batch_size batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files

import numpy as np
import torch
from torch import Tensor

from echelon.data.loading.memory import MemorySource
from echelon.data.loading.order import BatchPlan, State

_NUM_VALIDATION = 360
_SPLIT_SEED = 1797  # the file is ordered by writer; a fixed shuffle puts every writer into both splits


def load_digits() -> tuple[MemorySource, MemorySource]:
    """Return (train, validation) digits: uint8 images of 8x8 pixels from 0 to 16."""
    with files("echelon.data").joinpath("assets/digits.npz").open("rb") as stream, np.load(stream) as archive:
        images, labels = archive["images"].astype(np.uint8)[..., None], archive["labels"].astype(np.int64)
    order = np.random.default_rng(_SPLIT_SEED).permutation(len(labels))
    train, validation = order[_NUM_VALIDATION:], order[:_NUM_VALIDATION]
    return (
        MemorySource(images[train], labels[train], "digits"),
        MemorySource(images[validation], labels[validation], "digits validation"),
    )


@dataclass(frozen=True, slots=True)
class SyntheticSource:
    """The shape of synthetic data; it has no samples to read."""

    shape: tuple[int, int, int]
    num_classes: int
    num_examples: int

    def __len__(self) -> int:
        return self.num_examples


class SyntheticLoader:
    """Yields the same batch at every step, in pinned memory if CUDA is available."""

    def __init__(
        self,
        source: SyntheticSource,
        batch_size: int,
        *,
        num_batches: int,
        seed: int = 0,
        state: State | None = None,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.images = torch.rand((batch_size, *source.shape), generator=generator).mul_(2).sub_(1)
        self.labels = torch.randint(source.num_classes, (batch_size,), generator=generator)
        if torch.cuda.is_available():
            self.images, self.labels = self.images.pin_memory(), self.labels.pin_memory()
        self.state = state or State()
        self.plan: BatchPlan | None = None
        self._num_batches = num_batches

    def __len__(self) -> int:
        return self._num_batches

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        epoch, size = self.state.epoch, len(self.images)
        for index in range(self.state.position // size, self._num_batches):
            last = index + 1 == self._num_batches
            self.state = State(epoch + 1, 0) if last else State(epoch, (index + 1) * size)
            yield self.images, self.labels

    def close(self) -> None:
        """Do nothing: there are no threads."""
