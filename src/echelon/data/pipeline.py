"""The loader: samples of a source, decoded, augmented and batched on threads of its own, in an order fixed beforehand.

The consumer's thread only hands out finished batches and asks for new ones; each batch is cut into chunks that the
threads work off, so that the first batch is ready after batch_size / threads images, and a slow image delays only its
batch. libjpeg-turbo, torch and NumPy let go of the interpreter lock while they work; what holds it is about 0.1 ms an
image where a JPEG is cut, half of that elsewhere. At most `prefetch` batches, plus the one in the consumer's hands,
exist at a time.

What comes out depends on (seed, epoch, sample counter) alone: not on threads, prefetch or timing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, Literal, Protocol, Self, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from echelon.data.augment import AugmentConfig, Augmenter, Normaliser, num_lanes
from echelon.data.buffers import BufferPool
from echelon.data.order import Batch, Sampling, State, uniforms
from echelon.data.sources import Source
from echelon.errors import DataError, UsageError

Output: TypeAlias = Literal["float32", "uint8"]

log = logging.getLogger(__name__)

_MAX_CHUNK = 16
_KEPT_REPORTS = 100
_SHOWN_REPORTS = 10
_START_TIMEOUT_S = 60.0
_starting = threading.Lock()


class Batches(Protocol):
    """What a trainer needs of any loader: epochs of (images, labels), and where it stands."""

    state: State

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the rest of the current epoch."""

    def __len__(self) -> int:
        """Return the batches of a whole epoch."""

    def close(self) -> None:
        """Stop; leave no thread."""


@dataclass(slots=True)
class _Pending:
    """A batch in the making: its memory, its draws, and the futures of its chunks."""

    batch: Batch
    images: Tensor
    draws: list[list[float]]
    labels: list[Any]
    bad: dict[int, str] = field(default_factory=dict)
    futures: list[Future[None]] = field(default_factory=list)


class _Tools(threading.local):
    """What each thread has for itself."""

    augmenter: Augmenter
    normaliser: Normaliser


def _equip(tools: _Tools, augment: AugmentConfig, fast: bool) -> None:
    tools.augmenter = Augmenter(augment, fast)
    tools.normaliser = Normaliser(augment)


class Loader:
    """Batches of augmented images. Iterating yields the rest of the current epoch; iterate again for the next one.

    `output`: "float32" gives normalised (N, C, H, W); "uint8" gives (N, H, W, C) for a GPU to normalise, in pinned
    memory where there is CUDA. Labels are int64 class numbers, or float32 rows where records have several.
    `exact` gives the pixels of a full decode, without shortcuts that change them (see `decode`): for validation.
    With `skip_bad_records` a sample that cannot be read is left out of its batch and counted in `num_bad`; the first
    few are logged with their places, and their number at the end of every epoch.
    """

    def __init__(
        self,
        source: Source,
        augment: AugmentConfig,
        sampling: Sampling,
        *,
        threads: int = 4,
        prefetch: int = 2,
        output: Output = "float32",
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
        size = sampling.batch_size
        self._ahead = max(prefetch, -(-2 * threads // size))
        self._chunk = max(1, min(_MAX_CHUNK, size * self._ahead // (2 * threads)))
        self._pool = self._make_pool()
        self._batches = sampling.batches(self.state)
        self._pending: deque[_Pending] = deque()
        self._tools = _Tools()
        # The threads must not hold the loader: one that is dropped without close() then still ends them.
        equip = partial(_equip, self._tools, augment, not exact)
        self._executor: ThreadPoolExecutor | None = _start_threads(threads, equip)

    def __len__(self) -> int:
        return self.sampling.batches_per_epoch

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        epoch = self.state.epoch
        while self.state.epoch == epoch:
            batch = self._take()
            if batch is not None:
                yield batch

    def close(self) -> None:
        """Drop what is under way and end the threads."""
        executor, self._executor = self._executor, None
        self._pending.clear()
        if executor is not None:
            executor.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _make_pool(self) -> BufferPool:
        channels, height, width = self.augment.shape
        size = self.sampling.batch_size
        if self._output == "uint8":
            return BufferPool((size, height, width, channels), np.uint8, self._ahead + 3, torch.cuda.is_available())
        return BufferPool((size, channels, height, width), np.float32, self._ahead + 3)

    def _take(self) -> tuple[Tensor, Tensor] | None:
        """Return the next batch, or None if all of it was bad."""
        if self._executor is None:
            raise UsageError("this loader is closed; make a new one with its state to go on")
        while len(self._pending) < self._ahead:
            self._pending.append(self._begin(self._executor, next(self._batches)))
        pending = self._pending.popleft()
        try:
            for future in pending.futures:
                future.result()
            batch = _finish(pending)
        except BaseException:
            self.close()
            raise
        self._report(pending.bad, ends_epoch=pending.batch.after.epoch != pending.batch.epoch)
        self.state = pending.batch.after
        return batch

    def _begin(self, executor: ThreadPoolExecutor, batch: Batch) -> _Pending:
        draws = uniforms(self.sampling.seed, batch.epoch, batch.counters, num_lanes(self.augment)).tolist()
        size = len(batch.records)
        pending = _Pending(batch, self._pool.take()[:size], draws, [None] * size)
        starts = range(0, size, self._chunk)
        pending.futures = [executor.submit(self._work, pending, start) for start in starts]
        return pending

    def _work(self, pending: _Pending, start: int) -> None:
        """Make the samples of one chunk. Runs on the loader's threads."""
        images: NDArray[Any] = pending.images.numpy()
        records = pending.batch.records[start : start + self._chunk].tolist()
        for place, number in enumerate(records, start):
            if self._executor is None:
                return
            try:
                pending.labels[place] = self._make(number, pending.draws[place], images[place])
            except DataError as error:
                if not self._skip:
                    raise
                pending.bad[place] = str(error)

    def _make(self, number: int, draws: list[float], out: NDArray[Any]) -> int | NDArray[np.float32]:
        sample = self.source.read(number)
        try:
            pixels = self._tools.augmenter.augment(sample.payload, draws)
            label = _class_number(sample.label) if isinstance(sample.label, float) else sample.label
        except DataError as error:
            raise DataError(f"{self.source.where(number)}: {error}") from error
        if self._output == "uint8":
            np.copyto(out, pixels)
        else:
            self._tools.normaliser.into(out, pixels)
        return label

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


def _finish(pending: _Pending) -> tuple[Tensor, Tensor] | None:
    good = [place for place in range(len(pending.labels)) if place not in pending.bad]
    if not good:
        return None
    labels = [pending.labels[place] for place in good]
    images = pending.images if not pending.bad else pending.images[torch.tensor(good)]
    widths = {np.size(label) for label in labels}
    if len(widths) > 1:
        raise DataError(f"images of one batch have different numbers of labels: {sorted(widths)}")
    if isinstance(labels[0], int):
        return images, torch.tensor(labels, dtype=torch.int64)
    return images, torch.from_numpy(np.stack(labels))


def _class_number(label: float) -> int:
    if not label.is_integer():
        raise DataError(f"its label {label} is no class number")
    return int(label)


def _start_threads(threads: int, equip: Callable[[], None]) -> ThreadPoolExecutor:
    """Start all threads, each with torch's own parallelism off; the rest of the process keeps it.

    torch.set_num_threads holds for the calling thread and for threads that have not used torch yet, so the value is
    put back here once every thread has taken its own.
    """
    started = threading.Barrier(threads + 1)

    def begin() -> None:
        torch.get_num_threads()  # Makes torch take its default now; later it would overwrite the next line's.
        torch.set_num_threads(1)
        equip()

    with _starting:
        before = torch.get_num_threads()
        executor = ThreadPoolExecutor(threads, "echelon-data", begin)
        for _ in range(threads):
            executor.submit(started.wait, _START_TIMEOUT_S)
        started.wait(_START_TIMEOUT_S)
        torch.set_num_threads(before)
    return executor


def measure_io(batches: Batches, disp_batches: int = 20) -> Iterator[str]:
    """Run an epoch of a loader alone, for `--test-io 1`; yield MXNet's log line every `disp_batches`."""
    start, samples = time.perf_counter(), 0
    for index, (images, _) in enumerate(batches):
        samples += len(images)
        if (index + 1) % disp_batches == 0:
            now = time.perf_counter()
            yield f"Batch [{index}]\tSpeed: {samples / (now - start):.2f} samples/sec"
            start, samples = time.perf_counter(), 0
