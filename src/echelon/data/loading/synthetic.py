"""Synthetic batches for `--benchmark 1`: one random batch, made once and handed out every step.

Measures a network or a store without any data pipeline, as MXNet's benchmark does: images uniform in -1 ... 1, labels
uniform over the classes, an epoch of num_examples // batch_size batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from echelon.data.loading.order import State


@dataclass(frozen=True, slots=True)
class SyntheticSource:
    """Data that exists only as its shape."""

    shape: tuple[int, int, int]
    num_classes: int
    num_examples: int

    def __len__(self) -> int:
        return self.num_examples


class SyntheticLoader:
    """The same batch every step; in pinned memory where there is CUDA."""

    def __init__(
        self,
        source: SyntheticSource,
        batch_size: int,
        *,
        seed: int = 0,
        num_batches: int | None = None,
        state: State | None = None,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.images = torch.rand((batch_size, *source.shape), generator=generator).mul_(2).sub_(1)
        self.labels = torch.randint(source.num_classes, (batch_size,), generator=generator)
        if torch.cuda.is_available():
            self.images, self.labels = self.images.pin_memory(), self.labels.pin_memory()
        self.state = state or State()
        self._num_batches = num_batches or max(1, source.num_examples // batch_size)

    def __len__(self) -> int:
        return self._num_batches

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        epoch, size = self.state.epoch, len(self.images)
        for index in range(self.state.position // size, self._num_batches):
            last = index + 1 == self._num_batches
            self.state = State(epoch + 1, 0) if last else State(epoch, (index + 1) * size)
            yield self.images, self.labels

    def close(self) -> None:
        """Nothing runs, so there is nothing to stop."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
