"""How batches reach a captured step.

A replayed graph reads the same memory every time. So a batch from the host is copied into a fixed buffer before the
replay. A loader that has its data on the device gathers the batch inside the graph, and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from echelon.data.loading.loader import Batches
from echelon.train.step.eager import Batch


@runtime_checkable
class DeviceBatches(Protocol):
    """A loader that gathers its batches on the device."""

    def begin(self) -> int:
        """Start the rest of an epoch; returns the number of its batches."""

    def gather(self) -> tuple[Tensor, Tensor]:
        """Return the next batch, with device operations only."""

    def advance(self) -> int:
        """Count one batch as used."""


class BatchInput:
    """The batch that a captured step reads: gathered by `loader` on the device, or else copied into `buffer`."""

    def __init__(self, device: torch.device) -> None:
        self.loader: DeviceBatches | None = None
        self.buffer: Batch | None = None
        self._device = device
        self._copied: Tensor | None = None  # the images that were copied last

    def batches(self, loader: Batches) -> Iterator[Batch | None]:
        """Yield the rest of an epoch: each batch to copy in, or None for each batch of a loader on the device."""
        if not isinstance(loader, DeviceBatches):
            yield from loader
            return
        self.loader = loader
        for _ in range(loader.begin()):
            loader.advance()
            yield None

    def copy_in(self, batch: Batch) -> None:
        """Copy a batch into the buffer. Synthetic data is always the same batch, which is copied once."""
        if self.buffer is None:
            images = batch[0].to(self._device, memory_format=torch.channels_last, copy=True)
            self.buffer = images, batch[1].to(self._device, copy=True)
        elif batch[0] is not self._copied:
            self.buffer[0].copy_(batch[0], non_blocking=True)
            self.buffer[1].copy_(batch[1], non_blocking=True)
        self._copied = batch[0]

    def read(self) -> Batch:
        """Return the batch of this step, with device operations only."""
        if self.loader is not None:
            return self.loader.gather()
        assert self.buffer is not None
        return self.buffer
