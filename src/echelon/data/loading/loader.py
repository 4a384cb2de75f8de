"""The loader: decodes and augments the samples of a source on its own threads and yields them in batches.

The consumer's thread only takes finished batches and requests new ones. Each batch is divided into chunks of a few
samples for the threads or decode processes (`decode_pool`), so the first batch is ready after batch_size / threads
images, and a slow image delays only its own batch. At most `prefetch` batches, plus the one the consumer has, exist at
a time.

The batches depend only on (seed, epoch, sample counter), not on threads, processes, prefetch or timing.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Literal, NamedTuple, Protocol, Self, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from echelon.data.images.config import AugmentConfig
from echelon.data.images.geometry import mirrors_of, num_draws
from echelon.data.loading.buffers import BufferPool
from echelon.data.loading.decode_pool import DecodePool
from echelon.data.loading.decode_process import BadSample, DecodeSettings
from echelon.data.loading.order import BatchPlan, EndlessPlans, Plans, Sampling, State, uniforms
from echelon.data.loading.sources import Source
from echelon.errors import DataError, UsageError

Output: TypeAlias = Literal["float32", "uint8"]

log = logging.getLogger(__name__)

_MAX_CHUNK = 16
_KEPT_REPORTS = 100
_SHOWN_REPORTS = 10


class Batches(Protocol):
    """What a trainer needs from any loader: epochs of (images, labels), and the state to resume from.

    `plan` is that of the batch that was yielded last, if batches are leased.
    """

    state: State
    plan: BatchPlan | None

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the rest of the current epoch."""

    def __len__(self) -> int:
        """Return the number of batches in a whole epoch."""

    def close(self) -> None:
        """Stop, and end all threads and processes."""


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
    """A batch that is being assembled: the pool's threads fill it, each its own samples, and the consumer finishes it.

    If `mirrors` is given, the decoders do not mirror.
    """

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


class Loader:
    """Batches of augmented images. Iterating yields the rest of the current epoch; iterate again for the next one.

    - `output`: "float32" yields normalised (N, C, H, W). "uint8" yields (N, H, W, C) for a device to normalise;
      `pin_memory` allocates them in pinned memory, and `raw_batches` yields them before mirroring. Labels are int64
      class numbers, or float32 rows where records have several labels.
    - `processes`: every thread has a decode process. The source must be picklable.
    - `exact`: decode without shortcuts that change pixels (see `images.decode`). Use it for validation.
    - `skip_bad_records`: leave a sample that cannot be read out of its batch and count it in `num_bad`. The first few
      are logged with their location, and their number at the end of every epoch. Where the sampling promises full
      batches (so that no worker waits for a step that never comes), the next good sample of the batch takes the place
      of a bad one, and a batch without good samples is replaced by the next batch that has some.
    - `plans`: batches of leases instead of those of the sampling. Iterating then ends where the plans say so. A batch
      may be empty, and one without good samples is, because each must be used.
    """

    def __init__(
        self,
        source: Source,
        augment: AugmentConfig,
        sampling: Sampling,
        *,
        threads: int = 4,
        processes: bool = False,
        prefetch: int = 2,
        output: Output = "float32",
        pin_memory: bool = False,
        exact: bool = False,
        skip_bad_records: bool = False,
        state: State | None = None,
        plans: Plans | None = None,
    ) -> None:
        if threads < 1 or prefetch < 1:
            raise UsageError(
                f"a loader needs at least 1 thread and 1 prefetched batch, got threads {threads}, prefetch {prefetch}"
            )
        if output not in ("float32", "uint8"):
            raise UsageError(f"output must be float32 or uint8, got {output!r}")
        if sampling.num_samples != len(source):
            raise UsageError(f"the source has {len(source)} samples, but the sampling is for {sampling.num_samples}")
        self.source, self.augment, self.sampling = source, augment, sampling
        self.state = state or State()
        self.num_bad = self._num_bad_in_epoch = 0
        self.bad_records: deque[str] = deque(maxlen=_KEPT_REPORTS)
        self._output, self._skip = output, skip_bad_records
        size = sampling.batch_size
        self._num_ahead = max(prefetch, -(-2 * threads // size))
        self._chunk_size = max(1, min(_MAX_CHUNK, size * self._num_ahead // (2 * threads)))
        self._buffers = self._make_buffers(pin_memory, processes)
        self._full = sampling.num_batches is not None or sampling.last_batch != "keep"
        self.plan: BatchPlan | None = None
        self.is_leased = plans is not None
        self._plans = plans or EndlessPlans(sampling.batches(self.state))
        self._ahead: deque[BatchInProgress] = deque()
        self._decoders_mirror = augment.random_mirror and output == "float32"
        config = replace(augment, random_mirror=self._decoders_mirror)
        settings = DecodeSettings(source, config, fast=not exact, normalise=output == "float32")
        self._decoders = DecodePool(settings, self._buffers, threads, processes=processes)

    def __len__(self) -> int:
        return self.sampling.batches_per_epoch

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for images, labels, mirrors in self.raw_batches():
            yield mirrored(images, mirrors), labels

    def raw_batches(self) -> Iterator[RawBatch]:
        """Yield the rest of the current epoch; "uint8" images are not mirrored yet."""
        if self.is_leased:
            while (batch := self.next_raw(wait=True)) is not None:
                yield batch
            return
        first, found = self.state, False
        while self.state.epoch == first.epoch:
            batch = self.next_raw(wait=True)
            if batch is not None:
                found = True
                yield batch
        if not found and not first.position:
            raise self._all_bad(self.bad_records[0])

    def close(self) -> None:
        """Drop the prefetched batches, end threads and processes, and free the buffers."""
        self._ahead.clear()
        self._decoders.close()
        self._buffers.clear()

    def wait(self) -> None:
        """Wait until the prefetched batches are complete."""
        for batch in self._ahead:
            batch.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _make_buffers(self, pin_memory: bool, shared: bool) -> BufferPool:
        channels, height, width = self.augment.shape
        size, limit = self.sampling.batch_size, self._num_ahead + 3
        if self._output == "uint8":
            return BufferPool((size, height, width, channels), np.uint8, limit, pin_memory, shared=shared)
        return BufferPool((size, channels, height, width), np.float32, limit, pin_memory, shared=shared)

    def next_raw(self, *, wait: bool) -> RawBatch | None:
        """Return the next batch, or None: all its samples are bad and it may be left out, or there is no plan for it.

        `wait`: the consumer has used all batches, so plans that depend on this can be waited for.
        """
        if self._decoders.is_closed:
            raise UsageError("this loader is closed; create a new one with its state to continue")
        for _ in range(self._plans.drop_lost(len(self._ahead))):
            self._ahead.pop()
        while len(self._ahead) < self._num_ahead:
            plan = self._plans.take(wait=wait and not self._ahead)
            if plan is None:
                break
            self._ahead.append(self._begin(plan))
        if not self._ahead:
            if wait:  # the plans end here: of leases, only they know which batch of an epoch is the last one
                self._report_epoch()
            return None
        batch = self._ahead.popleft()
        try:
            batch.wait()
            finished = self._finish(batch)
        except BaseException:
            self.close()
            raise
        self._report(batch.bad)
        if batch.plan.after.epoch != batch.plan.epoch:
            self._report_epoch()
        self.state, self.plan = batch.plan.after, batch.plan
        return finished

    def _finish(self, batch: BatchInProgress) -> RawBatch | None:
        if batch.is_all_bad and self.is_leased:
            return RawBatch(batch.images[:0], torch.zeros(0, dtype=torch.int64), None)
        if batch.is_all_bad:
            if not self._full:
                return None
            batch = self._next_good(batch)
        raw = batch.finish(self._full)
        # A consumer that keeps all batches would keep a file descriptor for each shared buffer, so it gets a copy.
        return raw if self._buffers.will_reuse(raw.images) else raw._replace(images=raw.images.clone())

    def _next_good(self, bad: BatchInProgress) -> BatchInProgress:
        """Decode the next batch that has a good sample. The regular batches are not affected."""
        for plan in islice(self.sampling.batches(bad.plan.after), 2 * len(self)):
            batch = self._begin(plan)
            batch.wait()
            if not batch.is_all_bad:
                log.warning("no record of a batch can be read; the next batch with a good record is used twice")
                return batch
        raise self._all_bad(bad.bad[0])

    def _all_bad(self, first: str) -> DataError:
        self.close()
        return DataError(f"no record of this worker's part can be read; one of them: {first}")

    def _begin(self, plan: BatchPlan) -> BatchInProgress:
        draws = uniforms(self.sampling.seed, plan.epoch, plan.counters, num_draws(self.augment))
        mirrors = mirrors_of(draws) if self.augment.random_mirror and not self._decoders_mirror else None
        size = len(plan.records)
        batch = BatchInProgress(plan, self._buffers.take()[:size], draws.tolist(), mirrors, [None] * size)
        starts = range(0, size, self._chunk_size)
        batch.futures = [self._decoders.submit(self._decode_chunk, batch, start) for start in starts]
        return batch

    def _decode_chunk(self, batch: BatchInProgress, start: int) -> None:
        """Decode a few samples of a batch. Runs on the pool's threads."""
        part = slice(start, start + self._chunk_size)
        results = self._decoders.decode(batch.plan.records[part].tolist(), batch.draws[part], batch.images, start)
        for place, result in enumerate(results, start):
            if not isinstance(result, BadSample):
                batch.labels[place] = result
            elif self._skip:
                batch.bad[place] = result.reason
            else:
                raise DataError(result.reason)

    def _report(self, bad: dict[int, str]) -> None:
        for _, message in sorted(bad.items()):
            self.num_bad += 1
            self.bad_records.append(message)
            if self.num_bad <= _SHOWN_REPORTS:
                log.warning("skipped bad record %d: %s", self.num_bad, message)
        self._num_bad_in_epoch += len(bad)

    def _report_epoch(self) -> None:
        if self._num_bad_in_epoch:
            log.warning("bad records skipped in this epoch: %d", self._num_bad_in_epoch)
            self._num_bad_in_epoch = 0


def measure_io(batches: Batches, disp_batches: int = 20) -> Iterator[tuple[int, float]]:
    """Run one epoch of a loader alone, for `--test-io 1`.

    Yields (batch index, samples per second) every `disp_batches` batches and at the end.
    """
    start, samples, index = time.perf_counter(), 0, 0
    for index, (images, _) in enumerate(batches):
        samples += len(images)
        if (index + 1) % disp_batches == 0:
            yield index, samples / (time.perf_counter() - start)
            start, samples = time.perf_counter(), 0
    if samples:
        yield index, samples / (time.perf_counter() - start)
