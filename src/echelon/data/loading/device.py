"""Batches on the device of the network: copies uint8 pixels to it, or keeps a whole set there, and augments there.

`DeviceLoader` copies the batches of a `Loader`. uint8 pixels are a quarter of the bytes of floats: 19 MB instead of 77
for 128 images of 224x224. Batches are (N, H, W, C), so the permuted result is in torch's channels-last order without a
copy, which fast convolutions need. The GPU copies the next batch from pinned memory while the network computes, which
takes no host time. Images arrive cropped, because the decoder decodes only the region of the crop
(docs/decisions/0009); they are mirrored and normalised here.

`DeviceMemoryLoader` keeps a small set on the device (CIFAR-10: 240 MB padded). The crops of an epoch are chosen on the
CPU and copied once per epoch (1 MB), so a batch takes three small kernels and no copy.

The values are those of `MemoryLoader` and `Loader`, except for the rounding of the device's dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from echelon.data.images.augment import Normaliser
from echelon.data.images.config import AugmentConfig
from echelon.data.loading.buffers import CopiesInFlight
from echelon.data.loading.loader import Loader, RawBatch, mirrored
from echelon.data.loading.memory import MemorySource, check_fits, choose_crops
from echelon.data.loading.order import BatchPlan, Plans, Sampling, State

_MAX_COPIES_IN_FLIGHT = 2
_Copied: TypeAlias = tuple[RawBatch, torch.cuda.Event | None, State, BatchPlan | None]


class DeviceNormaliser:
    """Converts uint8 (N, H, W, C) to normalised (N, C, H, W) of `dtype`, in channels-last order."""

    def __init__(self, config: AugmentConfig, device: torch.device | str, dtype: torch.dtype = torch.float32) -> None:
        normaliser = Normaliser(config)
        self._scale = torch.from_numpy(normaliser.scale).to(device)
        self._offset = torch.from_numpy(normaliser.offset).to(device)
        self._dtype = dtype

    def __call__(self, images: Tensor) -> Tensor:
        """Normalise in float32, then round once to `dtype`."""
        return images.permute(0, 3, 1, 2).float().mul_(self._scale).add_(self._offset).to(self._dtype)


def crop_mirror(
    images: Tensor, records: Tensor, tops: Tensor, lefts: Tensor, mirrors: Tensor, size: tuple[int, int]
) -> Tensor:
    """Return crops of `size` (height, width) from images (N, H, W, C): one per record, some of them mirrored."""
    down = torch.arange(size[0], device=images.device)
    across = torch.arange(size[1], device=images.device)
    rows = tops[:, None] + down
    columns = lefts[:, None] + torch.where(mirrors[:, None], size[1] - 1 - across, across)
    return images[records[:, None, None], rows[:, :, None], columns[:, None, :]]


class DeviceLoader:
    """Copies the uint8 batches of a loader to a device, one batch ahead, and mirrors and normalises them there.

    On CUDA the copy runs on its own stream while the network computes, if the loader uses pinned memory. The memory is
    held until the copy is done.
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
            self._stream = torch.cuda.Stream(self._device)
        self.state = batches.state
        self.plan: BatchPlan | None = None

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        if self._batches.is_leased:
            yield from self._leased()
            return
        ahead: _Copied | None = None
        for batch in self._batches.raw_batches():
            copied = self._copied(batch)
            if ahead is not None:
                yield self._finish(*ahead)
            ahead = copied
        if ahead is not None:
            yield self._finish(*ahead)

    def _leased(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches of leases. It waits for the next one only when the consumer has used all before it."""
        ahead: _Copied | None = None
        while True:
            batch = self._batches.next_raw(wait=ahead is None)
            copied = None if batch is None else self._copied(batch)
            if ahead is not None:
                yield self._finish(*ahead)
            elif copied is None:
                return
            ahead = copied

    def _copied(self, batch: RawBatch) -> _Copied:
        return *self._copy(batch), self._batches.state, self._batches.plan

    def _copy(self, batch: RawBatch) -> tuple[RawBatch, torch.cuda.Event | None]:
        """Start to copy a batch; return it with the event that is set when the copy is done."""
        if self._stream is None:
            return batch, None
        with torch.cuda.stream(self._stream):
            images = batch.images.to(self._device, non_blocking=True)
            labels = self._copy_few(batch.labels)
            mirrors = self._copy_few(batch.mirrors) if batch.mirrors is not None else None
            done = torch.cuda.Event()
            done.record(self._stream)
        self._copies.hold(batch.images, done)
        return RawBatch(images, labels, mirrors), done

    def _copy_few(self, values: Tensor) -> Tensor:
        """Copy a small tensor. pin_memory() makes a pinned copy, whose memory torch manages."""
        return values.pin_memory().to(self._device, non_blocking=True)

    def _finish(
        self, batch: RawBatch, done: torch.cuda.Event | None, state: State, plan: BatchPlan | None
    ) -> tuple[Tensor, Tensor]:
        if done is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(done)
            for tensor in batch:
                if tensor is not None:
                    tensor.record_stream(current)
        self.state, self.plan = state, plan
        return self._normalise(mirrored(batch.images, batch.mirrors)), batch.labels

    def close(self) -> None:
        """Close the loader whose batches are copied, and wait for the copies."""
        self._batches.close()
        self._copies.wait()


class DeviceMemoryLoader:
    """Batches of a small set that is kept on the device: pads, crops, mirrors and normalises there.

    `gather` returns the batch at a cursor, which is on the device too, and advances the cursor. It needs nothing from
    the host, so a whole training step can be compiled or captured together with its data: `begin` copies an epoch's
    crops to the device, and `advance` updates the host's state after each replayed batch. Iterating calls all three.
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
        plans: Plans | None = None,
    ) -> None:
        """`plans`: batches of leases; the sampling then has all samples, because any of them may be leased."""
        check_fits(source, augment, sampling)
        self.source, self.augment, self.sampling = source, augment, sampling
        self.state = state or State()
        self.plan: BatchPlan | None = None
        self._plans = plans
        self._device = torch.device(device)
        pad = augment.pad_size
        images = torch.from_numpy(source.images).to(self._device)
        self._images = torch.nn.functional.pad(images, (0, 0, pad, pad, pad, pad), value=augment.fill_value)
        self._labels = torch.from_numpy(source.labels).to(self._device)
        self._normalise = DeviceNormaliser(augment, self._device, dtype)
        self._counters = sampling.counters()
        self._num_mine = len(self._counters)
        size = sampling.batch_size
        rows = -(-self._num_mine // size) * size  # whole batches; the rows after the last sample are cut off again
        self._choices = torch.zeros((rows, 4), dtype=torch.int64, device=self._device)
        self.cursor = torch.zeros((), dtype=torch.int64, device=self._device)  # where `gather` reads
        self._within = torch.arange(size, device=self._device)

    def __len__(self) -> int:
        return self.sampling.batches_per_epoch

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        if self._plans is not None:
            yield from self._leased(self._plans)
            return
        for _ in range(self.begin()):
            images, labels = self.gather()
            count = self.advance()
            yield images[:count], labels[:count]

    def _leased(self, plans: Plans) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches of leases, which may begin anywhere and have any size."""
        epoch: int | None = None
        while (plan := plans.take(wait=True)) is not None:
            if plan.epoch != epoch:
                epoch = plan.epoch
                self._choices[: self._num_mine].copy_(torch.from_numpy(self._epoch(epoch)))
            rows = self._choices[torch.from_numpy(plan.counters).to(self._device)]
            self.state, self.plan = plan.after, plan
            yield self._batch_of(rows)

    def begin(self) -> int:
        """Copy the crops of the current epoch to the device; return how many batches are left in it."""
        choices = self._epoch(self.state.epoch)
        self._choices[: len(choices)].copy_(torch.from_numpy(choices))
        self.cursor.fill_(self.state.position)
        return -(-(self._num_mine - self.state.position) // self.sampling.batch_size)

    def gather(self) -> tuple[Tensor, Tensor]:
        """Return the batch at the cursor and advance the cursor, with device operations only."""
        at = (self.cursor + self._within).clamp(max=len(self._choices) - 1)
        batch = self._batch_of(self._choices[at])
        self.cursor.add_(self.sampling.batch_size)
        return batch

    def _batch_of(self, choices: Tensor) -> tuple[Tensor, Tensor]:
        records, tops, lefts, mirrors = choices.unbind(1)
        pixels = crop_mirror(self._images, records, tops, lefts, mirrors.bool(), self.augment.shape[1:])
        return self._normalise(pixels), self._labels[records]

    def advance(self) -> int:
        """Advance the state by one gathered batch; return the number of its samples."""
        epoch, position = self.state.epoch, self.state.position
        count = min(self.sampling.batch_size, self._num_mine - position)
        done = position + count == self._num_mine
        self.state = State(epoch + 1, 0) if done else State(epoch, position + count)
        return count

    def _epoch(self, epoch: int) -> NDArray[np.int64]:
        """Return (record, top, left, mirrored) of each of this worker's samples of an epoch."""
        order, counters = self.sampling.order(epoch), self._counters
        _, height, width, _ = self.source.images.shape
        crops = choose_crops(self.augment, height, width, self.sampling.seed, epoch, counters)
        return np.stack([order[counters], crops.tops, crops.lefts, crops.mirrors.astype(np.int64)], axis=1)

    def close(self) -> None:
        """Do nothing: there are no threads."""
