"""A batch that is being assembled: its buffer, which samples it consists of, their labels, and which were bad.

The loader's threads fill a BatchInProgress, each its own samples; `finish` turns it into a RawBatch on the consumer's
thread.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from echelon.data.loading.order import BatchPlan
from echelon.errors import DataError


class RawBatch(NamedTuple):
    """A batch before mirroring: `mirrors` says which images (N, H, W, C) are to be mirrored; None means none."""

    images: Tensor
    labels: Tensor
    mirrors: Tensor | None


def mirrored(images: Tensor, mirrors: Tensor | None) -> Tensor:
    """Mirror some images (N, H, W, C) on their device, without synchronising with the host."""
    if mirrors is None:
        return images
    return torch.where(mirrors[:, None, None, None], images.flip(2), images)


@dataclass(slots=True)
class BatchInProgress:
    """A batch whose samples are being decoded. If `mirrors` is given, the decoders do not mirror."""

    plan: BatchPlan
    images: Tensor
    draws: list[list[float]]
    mirrors: NDArray[np.bool_] | None
    labels: list[Any]
    bad: dict[int, str] = field(default_factory=dict)
    futures: list[Future[None]] = field(default_factory=list)

    def wait(self) -> None:
        """Wait until every sample is decoded or bad; raise what a thread raised."""
        for future in self.futures:
            future.result()

    @property
    def is_all_bad(self) -> bool:
        """Whether no sample could be decoded."""
        return len(self.bad) == len(self.labels)

    def finish(self, full: bool) -> RawBatch:
        """Return the batch of the good samples, of which there must be one, in the same buffer.

        A bad sample is left out. If the batch must be `full`, the next good sample takes its place.
        """
        places = self._replacements() if full else self._good()
        images: NDArray[Any] = self.images.numpy()
        for to, place in enumerate(places):
            if to != place:
                images[to] = images[place]
        mirrors = None if self.mirrors is None else torch.from_numpy(self.mirrors[places])
        return RawBatch(self.images[: len(places)], _label_tensor([self.labels[place] for place in places]), mirrors)

    def _good(self) -> list[int]:
        return [place for place in range(len(self.labels)) if place not in self.bad]

    def _replacements(self) -> list[int]:
        """For each place, the first good one from there on; after the last good one, the first of all."""
        good = self._good()
        following = np.searchsorted(good, np.arange(len(self.labels))) % len(good)
        return [good[index] for index in following]


def _label_tensor(labels: list[Any]) -> Tensor:
    widths = {np.size(label) for label in labels}
    if len(widths) > 1:
        raise DataError(f"images of one batch have different numbers of labels: {sorted(widths)}")
    if isinstance(labels[0], int):
        return torch.tensor(labels, dtype=torch.int64)
    return torch.from_numpy(np.stack(labels))
