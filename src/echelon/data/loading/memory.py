"""Small sets that are decoded once and kept in memory: a few array operations augment a whole batch.

CIFAR-10 takes 154 MB as uint8, and another 240 MB as padded planes. A batch of 128 takes about 0.25 ms on one core
(2 us per image, 500,000 images/s), so it is assembled on the caller's thread. Augmentations other than pad, crop and
mirror need `Loader`, which accepts a MemorySource like any other source. Both return the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from torch import Tensor

from echelon.data.images.augment import Normaliser
from echelon.data.images.config import AugmentConfig
from echelon.data.images.decode import Decoder, Pixels, inspect
from echelon.data.images.geometry import Draw, mirrors_of
from echelon.data.loading.buffers import BufferPool
from echelon.data.loading.order import BatchPlan, EndlessPlans, Indices, Plans, Sampling, State, uniforms
from echelon.data.loading.sources import Sample, Source, class_number
from echelon.errors import DataError, UsageError

OnBad: TypeAlias = Callable[[DataError], None]


class MemorySource:
    """Decoded images (count, height, width, channels) in uint8, with int64 labels. Also a Source."""

    def __init__(self, images: Pixels, labels: NDArray[np.int64], name: str = "memory") -> None:
        if images.ndim != 4 or images.dtype != np.uint8 or len(images) != len(labels):
            raise UsageError(
                f"expected uint8 images (count, height, width, channels) and as many labels, "
                f"got {images.dtype} {images.shape} and {len(labels)}"
            )
        self.images, self.labels, self.name = images, labels, name

    @classmethod
    def from_source(
        cls, source: Source, channels: int = 3, threads: int = 4, on_bad: OnBad | None = None
    ) -> MemorySource:
        """Decode a whole source, whose images must have the same size. With `on_bad`, bad samples are left out."""
        first = _first_shape(source, Decoder(channels), on_bad is not None)
        images = np.empty((len(source), *first), np.uint8)
        labels = np.empty(len(source), np.int64)
        is_good = np.ones(len(source), np.bool_)

        def load(start: int) -> None:
            decoder = Decoder(channels)
            for number in range(start, len(source), threads):
                try:
                    pixels, labels[number] = _decoded(source, number, decoder)
                except DataError as error:
                    if on_bad is None:
                        raise
                    on_bad(error)
                    is_good[number] = False
                    continue
                if pixels.shape != images.shape[1:]:
                    raise DataError(
                        f"{source.where(number)}: {pixels.shape[1]}x{pixels.shape[0]} pixels, but the first image has "
                        f"{images.shape[2]}x{images.shape[1]}; all images of this set must have the same size"
                    )
                images[number] = pixels

        with ThreadPoolExecutor(threads) as executor:
            list(executor.map(load, range(threads)))
        name = source.where(0).split(":")[0]
        return cls(images, labels, name) if is_good.all() else cls(images[is_good], labels[is_good], name)

    def __len__(self) -> int:
        return len(self.images)

    def read(self, number: int) -> Sample:
        """See Source."""
        return Sample(self.images[number], float(self.labels[number]))

    def where(self, number: int) -> str:
        """See Source."""
        return f"{self.name} (image {number})"


def _first_shape(source: Source, decoder: Decoder, skips_bad: bool) -> tuple[int, ...]:
    """Return the shape of the first image; with `skips_bad`, of the first that can be read."""
    for number in range(len(source)):
        try:
            return _decoded(source, number, decoder)[0].shape
        except DataError:
            if not skips_bad:
                raise
    raise DataError(f"{source.where(0)}: neither this image nor any other can be read")


def _decoded(source: Source, number: int, decoder: Decoder) -> tuple[Pixels, int]:
    payload, label = source.read(number)
    try:
        pixels = payload if isinstance(payload, np.ndarray) else decoder.decode(payload, inspect(payload))
        return pixels, class_number(label)
    except DataError as error:
        raise DataError(f"{source.where(number)}: {error}") from error


@dataclass(frozen=True, slots=True)
class Crops:
    """The top left corners of some samples' crops in the padded image, and which are mirrored."""

    tops: Indices
    lefts: Indices
    mirrors: NDArray[np.bool_]


def is_plain(config: AugmentConfig, height: int, width: int) -> bool:
    """Whether images of this size only need to be padded, cropped, mirrored and normalised."""
    needs_more = config.resize > 0 or config.warps or config.random_resized_crop or config.max_crop_size > 0
    fits = height + 2 * config.pad_size >= config.shape[1] and width + 2 * config.pad_size >= config.shape[2]
    return fits and not needs_more and not config.changes_colour


def choose_crops(config: AugmentConfig, height: int, width: int, seed: int, epoch: int, counters: Indices) -> Crops:
    """Choose crop and mirror of many samples at once, as `geometry.plan` does for one."""
    draws = uniforms(seed, epoch, counters, Draw.CROP_Y + 1)
    rooms = [have + 2 * config.pad_size - want for have, want in zip((height, width), config.shape[1:], strict=True)]
    if config.random_crop:
        tops, lefts = (
            (draws[:, lane] * (room + 1)).astype(np.int64)
            for lane, room in zip((Draw.CROP_Y, Draw.CROP_X), rooms, strict=True)
        )
    else:
        tops, lefts = (np.full(len(counters), room // 2, np.int64) for room in rooms)
    mirrors = mirrors_of(draws) if config.random_mirror else np.zeros(len(counters), np.bool_)
    return Crops(tops, lefts, mirrors)


class MemoryLoader:
    """Float32 batches (N, C, H, W) and int64 labels from a MemorySource, assembled on the caller's thread."""

    def __init__(
        self,
        source: MemorySource,
        augment: AugmentConfig,
        sampling: Sampling,
        *,
        state: State | None = None,
        plans: Plans | None = None,
    ) -> None:
        """`plans`: batches of leases instead of those of the sampling."""
        _, height, width, channels = source.images.shape
        check_fits(source, augment, sampling)
        self.source, self.augment, self.sampling = source, augment, sampling
        self.state = state or State()
        self.plan: BatchPlan | None = None
        self._leases = plans
        self._size = height, width
        pad = augment.pad_size
        planes = np.full((len(source), channels, height + 2 * pad, width + 2 * pad), augment.fill_value, np.uint8)
        planes[:, :, pad : pad + height, pad : pad + width] = source.images.transpose(0, 3, 1, 2)
        self._windows: NDArray[Any] = sliding_window_view(planes, augment.shape[1:], axis=(2, 3))
        self._normaliser = Normaliser(augment)
        self._pool = BufferPool((sampling.batch_size, *augment.shape), np.float32, 4)

    def __len__(self) -> int:
        return self.sampling.batches_per_epoch

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        epoch, plans = self.state.epoch, self._leases or EndlessPlans(self.sampling.batches(self.state))
        while (batch := plans.take(wait=True)) is not None:
            images = self._images(batch.records, batch.counters, batch.epoch)
            self.state, self.plan = batch.after, batch
            yield images, torch.from_numpy(self.source.labels[batch.records])
            if self._leases is None and self.state.epoch != epoch:
                return

    def _images(self, records: Indices, counters: Indices, epoch: int) -> Tensor:
        crops = choose_crops(self.augment, *self._size, self.sampling.seed, epoch, counters)
        pixels = self._windows[records, :, crops.tops, crops.lefts]
        pixels[crops.mirrors] = pixels[crops.mirrors][..., ::-1]
        images = self._pool.take()[: len(records)]
        out: NDArray[np.float32] = images.numpy()  # NumPy, because torch's threads would compete with the network's
        np.multiply(pixels, self._normaliser.scale, out=out)
        np.add(out, self._normaliser.offset, out=out)
        return images

    def close(self) -> None:
        """Do nothing: there are no threads."""


def check_fits(source: MemorySource, augment: AugmentConfig, sampling: Sampling) -> None:
    """Raise UsageError for settings that `MemoryLoader` does not support, or that do not match."""
    _, height, width, channels = source.images.shape
    if channels != augment.shape[0]:
        raise UsageError(f"{source.name} has images of {channels} channels, but the image shape is {augment.shape}")
    if not is_plain(augment, height, width):
        raise UsageError(f"MemoryLoader does not support these augmentations of {height}x{width} images; use Loader")
    if sampling.num_samples != len(source):
        raise UsageError(f"{source.name} has {len(source)} images, but the sampling is for {sampling.num_samples}")
