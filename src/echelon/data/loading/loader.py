"""The loader: samples of a source, decoded, augmented and batched on threads of its own, in an order fixed beforehand.

The consumer's thread only hands out finished batches and asks for new ones; each batch is cut into chunks that the
threads work off, so that the first batch is ready after batch_size / threads images, and a slow image delays only its
batch. With `processes`, each thread has a process that does the work, and only passes chunks on (`worker_process` says
why). At most `prefetch` batches, plus the one in the consumer's hands, exist at a time.

What comes out depends on (seed, epoch, sample counter) alone: not on threads, processes, prefetch or timing.
"""

from __future__ import annotations

import logging
import pickle
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import islice
from types import TracebackType
from typing import Literal, Protocol, Self, TypeAlias

import numpy as np
from torch import Tensor

from echelon.data.images.augment import AugmentConfig, num_lanes
from echelon.data.images.geometry import mirrors_of
from echelon.data.loading.buffers import BufferPool
from echelon.data.loading.chunks import Bad, Made, Maker, Recipe
from echelon.data.loading.decode_process import Chunk, Order
from echelon.data.loading.making import Pending, Raw, finish, mirrored
from echelon.data.loading.order import Batch, Sampling, State, uniforms
from echelon.data.loading.sources import Source
from echelon.data.loading.threads import start_threads
from echelon.data.loading.worker_process import WorkerProcess
from echelon.errors import DataError, UsageError

Output: TypeAlias = Literal["float32", "uint8"]

log = logging.getLogger(__name__)

_MAX_CHUNK = 16
_KEPT_REPORTS = 100
_SHOWN_REPORTS = 10


class Batches(Protocol):
    """What a trainer needs of any loader: epochs of (images, labels), and where it stands."""

    state: State

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the rest of the current epoch."""

    def __len__(self) -> int:
        """Return the batches of a whole epoch."""

    def close(self) -> None:
        """Stop; leave no thread."""


class _Tools(threading.local):
    """What each thread has for itself: one of the two."""

    maker: Maker
    process: WorkerProcess | None = None


def _equip(tools: _Tools, recipe: Recipe, processes: deque[WorkerProcess], order: bytes) -> None:
    """A process that cannot attach this one's memory is of no use: then the thread does the work."""
    process = processes.popleft() if processes else None
    if process is not None and process.begin(order):
        tools.process = process
    else:
        tools.maker = Maker(recipe)


def _start_processes(count: int, with_torch: bool) -> list[WorkerProcess]:
    """Start processes, or none where the system has no room for them."""
    try:
        return [WorkerProcess(with_torch=with_torch) for _ in range(count)]
    except OSError as error:
        log.warning("no processes to decode images can be started: %s; threads do it", error)
        return []


class Loader:
    """Batches of augmented images. Iterating yields the rest of the current epoch; iterate again for the next one.

    `output`: "float32" gives normalised (N, C, H, W); "uint8" gives (N, H, W, C) for a device to normalise, in pages
    that a GPU can copy from with `pin_memory`; `raw` gives these before they are mirrored. Labels are int64 class
    numbers, or float32 rows where records have several.
    `processes`: as many as threads do the work; the source must be one that can be pickled.
    `exact` gives the pixels of a full decode, without shortcuts that change them (see `decode`): for validation.
    With `skip_bad_records` a sample that cannot be read is left out of its batch and counted in `num_bad`; the first
    few are logged with their places, and their number at the end of every epoch. Where the sampling promises full
    batches, so that nobody waits for a step that does not come, the next good sample of the batch takes the bad one's
    place, and for a batch without any, the next one that has some comes twice.
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
    ) -> None:
        if threads < 1 or prefetch < 1:
            raise UsageError(f"a loader needs at least one thread and one batch ahead, got {threads} and {prefetch}")
        if output not in ("float32", "uint8"):
            raise UsageError(f"output must be float32 or uint8, got {output!r}")
        if sampling.num_samples != len(source):
            raise UsageError(f"the source has {len(source)} samples, the sampling is for {sampling.num_samples}")
        self.source, self.augment, self.sampling = source, augment, sampling
        self.state = state or State()
        self.num_bad = self._bad_of_epoch = 0
        self.bad_records: deque[str] = deque(maxlen=_KEPT_REPORTS)
        self._output, self._skip = output, skip_bad_records
        self._mirrors = augment.random_mirror and output == "float32"
        size = sampling.batch_size
        self._ahead = max(prefetch, -(-2 * threads // size))
        self._chunk = max(1, min(_MAX_CHUNK, size * self._ahead // (2 * threads)))
        self._pool = self._make_pool(pin_memory, processes)
        self._full = sampling.num_batches is not None or sampling.last_batch != "keep"
        self._batches = sampling.batches(self.state)
        self._pending: deque[Pending] = deque()
        self._tools = _Tools()
        recipe = Recipe(source, replace(augment, random_mirror=self._mirrors), not exact, output == "float32")
        self._processes = _start_processes(threads, recipe.needs_torch) if processes else []
        self._executor: ThreadPoolExecutor | None = None
        try:
            order = self._order(recipe) if processes else b""
            # The threads must not hold the loader: one that is dropped without close() then still ends them.
            equip = partial(_equip, self._tools, recipe, deque(self._processes), order)
            self._executor = start_threads(threads, equip)
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return self.sampling.batches_per_epoch

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for images, labels, mirrors in self.raw():
            yield mirrored(images, mirrors), labels

    def raw(self) -> Iterator[Raw]:
        """Yield the rest of the current epoch; "uint8" is yet to be mirrored, which is augmentation's last step."""
        began, found = self.state, False
        while self.state.epoch == began.epoch:
            batch = self._take()
            if batch is not None:
                found = True
                yield batch
        if not found and not began.position:
            raise self._all_bad(self.bad_records[0])

    def close(self) -> None:
        """Drop what is under way, end threads and processes, and let the memory go."""
        executor, self._executor = self._executor, None
        self._pending.clear()
        if executor is not None:
            executor.shutdown(wait=False, cancel_futures=True)
        while self._processes:  # before threads are waited for: one may wait for a process that is stuck
            self._processes.pop().close()
        if executor is not None:
            executor.shutdown(wait=True)
        self._pool.clear()

    def wait(self) -> None:
        """Wait until what was begun ahead of time is made."""
        for pending in self._pending:
            pending.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _make_pool(self, pin_memory: bool, shared: bool) -> BufferPool:
        channels, height, width = self.augment.shape
        size, limit = self.sampling.batch_size, self._ahead + 3
        if self._output == "uint8":
            return BufferPool((size, height, width, channels), np.uint8, limit, pin_memory, shared=shared)
        return BufferPool((size, channels, height, width), np.float32, limit, pin_memory, shared=shared)

    def _order(self, recipe: Recipe) -> bytes:
        pool = self._pool
        sample = pool.descriptor(pool.take())
        return pickle.dumps(Order(recipe, pool.shape, np.dtype(pool.dtype).name, pool.limit, sample))

    def _take(self) -> Raw | None:
        """Return the next batch, or None if all of it was bad and there may be fewer."""
        if self._executor is None:
            raise UsageError("this loader is closed; make a new one with its state to go on")
        while len(self._pending) < self._ahead:
            self._pending.append(self._begin(self._executor, next(self._batches)))
        pending = self._pending.popleft()
        try:
            pending.wait()
            batch = self._finish(self._executor, pending)
        except BaseException:
            self.close()
            raise
        self._report(pending.bad, ends_epoch=pending.batch.after.epoch != pending.batch.epoch)
        self.state = pending.batch.after
        return batch

    def _finish(self, executor: ThreadPoolExecutor, pending: Pending) -> Raw | None:
        if not pending.is_lost:
            return self._kept(finish(pending, self._full))
        return self._kept(finish(self._next_good(executor, pending), self._full)) if self._full else None

    def _kept(self, batch: Raw) -> Raw:
        """A consumer who keeps batches shall not keep a file descriptor for each: then it gets a copy."""
        return batch if self._pool.keeps(batch.images) else batch._replace(images=batch.images.clone())

    def _next_good(self, executor: ThreadPoolExecutor, lost: Pending) -> Pending:
        """Make the next batch that has a good sample, ahead of its time. It depends on nothing that was handed out."""
        for batch in islice(self.sampling.batches(lost.batch.after), 2 * len(self)):
            pending = self._begin(executor, batch)
            pending.wait()
            if not pending.is_lost:
                log.warning("no record of a batch can be read; the next batch that has a good one comes twice")
                return pending
        raise self._all_bad(lost.bad[0])

    def _all_bad(self, first: str) -> DataError:
        self.close()
        return DataError(f"no record of this worker's part can be read; one of them: {first}")

    def _begin(self, executor: ThreadPoolExecutor, batch: Batch) -> Pending:
        draws = uniforms(self.sampling.seed, batch.epoch, batch.counters, num_lanes(self.augment))
        mirrors = mirrors_of(draws) if self.augment.random_mirror and not self._mirrors else None
        size = len(batch.records)
        pending = Pending(batch, self._pool.take()[:size], draws.tolist(), mirrors, [None] * size)
        starts = range(0, size, self._chunk)
        pending.futures = [executor.submit(self._work, pending, start) for start in starts]
        return pending

    def _work(self, pending: Pending, start: int) -> None:
        """Make the samples of one chunk. Runs on the loader's threads."""
        part = slice(start, start + self._chunk)
        for place, made in enumerate(self._made(pending, part), start):
            if not isinstance(made, Bad):
                pending.labels[place] = made
            elif self._skip:
                pending.bad[place] = made.reason
            else:
                raise DataError(made.reason)

    def _made(self, pending: Pending, part: slice) -> list[Made]:
        records, draws = pending.batch.records[part].tolist(), pending.draws[part]
        if self._tools.process is None:
            return self._tools.maker.make(records, draws, pending.images[part].numpy())
        return self._tools.process.make(Chunk(records, draws, self._pool.descriptor(pending.images), part.start))

    def _report(self, bad: dict[int, str], ends_epoch: bool) -> None:
        for _, message in sorted(bad.items()):
            self.num_bad += 1
            self.bad_records.append(message)
            if self.num_bad <= _SHOWN_REPORTS:
                log.warning("skipped bad record %d: %s", self.num_bad, message)
        self._bad_of_epoch += len(bad)
        if ends_epoch and self._bad_of_epoch:
            log.warning("bad records skipped in this epoch: %d", self._bad_of_epoch)
            self._bad_of_epoch = 0


def measure_io(batches: Batches, disp_batches: int = 20) -> Iterator[str]:
    """Run an epoch of a loader alone, for `--test-io 1`; yield MXNet's log line every `disp_batches` and at its end."""
    start, samples, index = time.perf_counter(), 0, 0

    def line() -> str:
        return f"Batch [{index}]\tSpeed: {samples / (time.perf_counter() - start):.2f} samples/sec"

    for index, (images, _) in enumerate(batches):
        samples += len(images)
        if (index + 1) % disp_batches == 0:
            yield line()
            start, samples = time.perf_counter(), 0
    if samples:
        yield line()
