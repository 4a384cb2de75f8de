"""Crop, mirror and normalise on the device the network runs on, from uint8 that is there already or just arriving.

Over the bus go uint8 pixels, a quarter of the floats: 19 MB instead of 77 for 128 images of 224x224. Batches are
(N, H, W, C), so the permuted result is in torch's channels-last order without a copy, which is what fast convolutions
want. They lie in pages that the GPU copies from by itself, one ahead, while the network computes; such a copy costs no
host time. Decoding takes only the part around a crop, so there is nothing left to crop here (docs/decisions/0009). A
small set lives on the device whole (CIFAR-10: 240 MB padded); an epoch's crops are decided on the CPU and go
over once an epoch (1 MB), so a batch costs three small kernels and no traffic.

The numbers are those of `memory` and `pipeline`, up to the rounding of the device's type.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from echelon.data.images.augment import Normaliser
from echelon.data.images.config import AugmentConfig
from echelon.data.loading.batch import RawBatch, mirrored
from echelon.data.loading.buffers import CopiesInFlight
from echelon.data.loading.loader import Loader
from echelon.data.loading.memory import MemorySource, check_fits, places
from echelon.data.loading.order import Sampling, State

_MAX_COPIES_IN_FLIGHT = 2


class DeviceNormaliser:
    """Turns uint8 (N, H, W, C) into normalised (N, C, H, W) of `dtype`, in channels-last order."""

    def __init__(self, config: AugmentConfig, device: torch.device | str, dtype: torch.dtype = torch.float32) -> None:
        normaliser = Normaliser(config)
        self._scale = torch.from_numpy(normaliser.scale).to(device)
        self._offset = torch.from_numpy(normaliser.offset).to(device)
        self._dtype = dtype

    def __call__(self, images: Tensor) -> Tensor:
        """Normalise in float32, then round once to the type asked for."""
        return images.permute(0, 3, 1, 2).float().mul_(self._scale).add_(self._offset).to(self._dtype)


def crop_mirror(
    images: Tensor, records: Tensor, tops: Tensor, lefts: Tensor, mirrors: Tensor, size: tuple[int, int]
) -> Tensor:
    """Gather crops of `size` (height, width) of some of the images (N, H, W, C), each at its place, some mirrored."""
    down = torch.arange(size[0], device=images.device)
    across = torch.arange(size[1], device=images.device)
    rows = tops[:, None] + down
    columns = lefts[:, None] + torch.where(mirrors[:, None], size[1] - 1 - across, across)
    return images[records[:, None, None], rows[:, :, None], columns[:, None, :]]


class DeviceLoader:
    """Brings another loader's uint8 batches over, one ahead, and mirrors and normalises them there.

    On CUDA the copy runs on a stream of its own while the network computes, if the loader has pinned memory, which is
    held until the copy is over.
    """

    def __init__(
        self,
        batches: Loader,
        config: AugmentConfig,
        device: torch.device | str,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._batches = batches
        self._device = torch.device(device)
        self._normalise = DeviceNormaliser(config, self._device, dtype)
        self._copies = CopiesInFlight(_MAX_COPIES_IN_FLIGHT)
        self._stream: torch.cuda.Stream | None = None
        if self._device.type == "cuda":
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self.state = batches.state

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        ahead: tuple[RawBatch, torch.cuda.Event | None, State] | None = None
        for batch in self._batches.raw_batches():
            arriving = (*self._bring(batch), self._batches.state)
            if ahead is not None:
                yield self._hand_out(*ahead)
            ahead = arriving
        if ahead is not None:
            yield self._hand_out(*ahead)

    def _bring(self, batch: RawBatch) -> tuple[RawBatch, torch.cuda.Event | None]:
        """Begin the copy of a batch; the event tells when it is there."""
        if self._stream is None:
            return batch, None
        with torch.cuda.stream(self._stream):
            images = batch.images.to(self._device, non_blocking=True)
            labels = self._bring_few(batch.labels)
            mirrors = self._bring_few(batch.mirrors) if batch.mirrors is not None else None
            there = torch.cuda.Event()  # type: ignore[no-untyped-call]
            there.record(self._stream)
        self._copies.hold(batch.images, there)
        return RawBatch(images, labels, mirrors), there

    def _bring_few(self, values: Tensor) -> Tensor:
        """From a pinned copy of these few bytes; torch looks after that one's memory."""
        return values.pin_memory().to(self._device, non_blocking=True)

    def _hand_out(self, batch: RawBatch, there: torch.cuda.Event | None, state: State) -> tuple[Tensor, Tensor]:
        if there is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(there)
            for tensor in batch:
                if tensor is not None:
                    tensor.record_stream(current)
        self.state = state
        return self._normalise(mirrored(batch.images, batch.mirrors)), batch.labels

    def close(self) -> None:
        """Stop the loader behind this one."""
        self._batches.close()
        self._copies.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class DeviceMemoryLoader:
    """Batches of a small set that lives on the device: pad, crop, mirror and normalise there.

    `gather` makes the batch at a cursor that is on the device, too, and moves it on. It asks nothing of the host, so a
    whole training step can be compiled or captured with its data inside: `begin` puts an epoch's choices in place, and
    for each replayed batch `advance` keeps the host's account. Iterating does the three in turn.
    """

    def __init__(
        self,
        source: MemorySource,
        augment: AugmentConfig,
        sampling: Sampling,
        device: torch.device | str,
        dtype: torch.dtype = torch.float32,
        *,
        state: State | None = None,
    ) -> None:
        check_fits(source, augment, sampling)
        self.source, self.augment, self.sampling = source, augment, sampling
        self.state = state or State()
        self._device = torch.device(device)
        pad = augment.pad_size
        images = torch.from_numpy(source.images).to(self._device)
        self._images = torch.nn.functional.pad(images, (0, 0, pad, pad, pad, pad), value=augment.fill_value)
        self._labels = torch.from_numpy(source.labels).to(self._device)
        self._normalise = DeviceNormaliser(augment, self._device, dtype)
        self._num_mine = len(sampling.counters(np.arange(sampling.num_samples, dtype=np.int64)))
        size = sampling.batch_size
        rows = -(-self._num_mine // size) * size  # whole batches: what is beyond the last sample is cut off again
        self._choices = torch.zeros((rows, 4), dtype=torch.int64, device=self._device)
        self._cursor = torch.zeros((), dtype=torch.int64, device=self._device)
        self._within = torch.arange(size, device=self._device)

    def __len__(self) -> int:
        return self.sampling.batches_per_epoch

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(self.begin()):
            images, labels = self.gather()
            count = self.advance()
            yield images[:count], labels[:count]

    def begin(self) -> int:
        """Put the rest of the current epoch on the device; returns how many batches it has."""
        choices = self._epoch(self.state.epoch)
        self._choices[: len(choices)].copy_(torch.from_numpy(choices))
        self._cursor.fill_(self.state.position)
        return -(-(self._num_mine - self.state.position) // self.sampling.batch_size)

    def gather(self) -> tuple[Tensor, Tensor]:
        """Return the batch at the cursor and move on. Only device work."""
        at = (self._cursor + self._within).clamp(max=len(self._choices) - 1)
        records, tops, lefts, mirrors = self._choices[at].unbind(1)
        pixels = crop_mirror(self._images, records, tops, lefts, mirrors.bool(), self.augment.shape[1:])
        self._cursor.add_(self.sampling.batch_size)
        return self._normalise(pixels), self._labels[records]

    def advance(self) -> int:
        """Count a batch that was gathered; returns its samples."""
        epoch, position = self.state.epoch, self.state.position
        count = min(self.sampling.batch_size, self._num_mine - position)
        done = position + count == self._num_mine
        self.state = State(epoch + 1, 0) if done else State(epoch, position + count)
        return count

    def _epoch(self, epoch: int) -> NDArray[np.int64]:
        """This worker's records of an epoch, where their crops begin, and whether they are mirrored."""
        order = self.sampling.order(epoch)
        counters = self.sampling.counters(order)
        _, height, width, _ = self.source.images.shape
        place = places(self.augment, height, width, self.sampling.seed, epoch, counters)
        return np.stack([order[counters], place.tops, place.lefts, place.mirrors.astype(np.int64)], axis=1)

    def close(self) -> None:
        """Nothing runs, so there is nothing to stop."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
