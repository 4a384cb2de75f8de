"""A batch in the making: its memory, its samples' numbers, what came out of them, and what was bad.

The loader's threads fill in a Pending, each its own places; `finish` makes a Raw batch of it on the consumer's thread.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from echelon.data.loading.order import Batch
from echelon.errors import DataError


class Raw(NamedTuple):
    """A batch and what is still to be done to it: which images (N, H, W, C) to mirror, or None where none is."""

    images: Tensor
    labels: Tensor
    mirrors: Tensor | None


def mirrored(images: Tensor, mirrors: Tensor | None) -> Tensor:
    """Mirror some images (N, H, W, C), on the device they are on: two passes over bytes, and no word with the host."""
    if mirrors is None:
        return images
    return torch.where(mirrors[:, None, None, None], images.flip(2), images)


@dataclass(slots=True)
class Pending:
    """What threads are working on. Where `mirrors` is given, they leave images as they are."""

    batch: Batch
    images: Tensor
    draws: list[list[float]]
    mirrors: NDArray[np.bool_] | None
    labels: list[Any]
    bad: dict[int, str] = field(default_factory=dict)
    futures: list[Future[None]] = field(default_factory=list)

    def wait(self) -> None:
        """Until every place is good or bad; raises what a thread raised."""
        for future in self.futures:
            future.result()

    @property
    def is_lost(self) -> bool:
        """Whether no sample is good."""
        return len(self.bad) == len(self.labels)


def finish(pending: Pending, full: bool) -> Raw:
    """Make the batch of its good samples, in its own memory; one is there at least.

    A bad one is left out, or, where batches must be `full`, its place is taken by the next good one.
    """
    places = _stand_ins(pending) if full else _good(pending)
    images: NDArray[Any] = pending.images.numpy()
    for to, place in enumerate(places):
        if to != place:
            images[to] = images[place]
    mirrors = None if pending.mirrors is None else torch.from_numpy(pending.mirrors[places])
    return Raw(pending.images[: len(places)], _labels([pending.labels[place] for place in places]), mirrors)


def _good(pending: Pending) -> list[int]:
    return [place for place in range(len(pending.labels)) if place not in pending.bad]


def _stand_ins(pending: Pending) -> list[int]:
    """For each place the good one that is there, or comes next; behind the last, the first."""
    good = _good(pending)
    following = np.searchsorted(good, np.arange(len(pending.labels))) % len(good)
    return [good[index] for index in following]


def _labels(labels: list[Any]) -> Tensor:
    widths = {np.size(label) for label in labels}
    if len(widths) > 1:
        raise DataError(f"images of one batch have different numbers of labels: {sorted(widths)}")
    if isinstance(labels[0], int):
        return torch.tensor(labels, dtype=torch.int64)
    return torch.from_numpy(np.stack(labels))
