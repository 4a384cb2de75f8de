"""The text of MXNet 1.9's log lines, which other programs read, and the rule that says when a speed line is due.

One function a line, each the only place where that text is written. Epochs and batches count from 0 here, as in MXNet's
logs; its checkpoint files and parse_log's tables count epochs from 1. A speed is that of one worker.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable, Mapping

from echelon.errors import UsageError


def start_line(options: Mapping[str, object]) -> str:
    """The first line of a worker: what it was told."""
    return f"start with arguments {Namespace(**options)}"


def resize_line(num_batches: int) -> str:
    """Lock-step workers all make this many steps an epoch, whatever their part of the data has."""
    return f"Resizing training data to {num_batches} batches per machine"


def loaded_line(prefix: str, epoch: int) -> str:
    """Training goes on from a checkpoint; MXNet's line has an underscore where the file's name has a dash."""
    return f"Loaded model {prefix}_{epoch:04d}.params"


def speed_line(epoch: int, first: int, last: int, samples_per_s: float, values: Mapping[str, float]) -> str:
    """The batches after `first` up to `last`: their speed, and the metrics of these batches only."""
    shown = "".join(f"\t{name}={value:f}" for name, value in values.items())
    return f"Epoch[{epoch}] Batch [{first}-{last}]\tSpeed: {samples_per_s:.2f} samples/sec{shown}"


def io_line(batch: int, samples_per_s: float) -> str:
    """`--test-io 1`: the speed of reading alone."""
    return f"Batch [{batch}]\tSpeed: {samples_per_s:.2f} samples/sec"


def train_line(epoch: int, name: str, value: float) -> str:
    """A metric over the whole epoch."""
    return f"Epoch[{epoch}] Train-{name}={value:f}"


def time_line(epoch: int, seconds: float) -> str:
    """How long the epoch's training steps took, without checkpoint and validation."""
    return f"Epoch[{epoch}] Time cost={seconds:.3f}"


def saved_line(file: str) -> str:
    """A checkpoint is on disk."""
    return f'Saved checkpoint to "{file}"'


def validation_line(epoch: int, name: str, value: float, batch: int | None = None) -> str:
    """A metric over the validation data; with `batch`, after so many of the epoch, which MXNet has no line for."""
    where = "" if batch is None else f" Batch [{batch}]"
    return f"Epoch[{epoch}]{where} Validation-{name}={value:f}"


class Speedometer:
    """When a speed line is due: at every multiple of `every`, but the first batch of an epoch only starts the clock.

    MXNet knows a new epoch by a batch number that went down, so epochs of one batch go wrong there; here they are told
    apart by their number. After a start in mid-epoch, the first line is about the batches that were there.
    """

    def __init__(self, batch_size: int, every: int, clock: Callable[[], float] = time.perf_counter) -> None:
        if every < 1:
            raise UsageError(f"--disp-batches {every}: give a number of 1 or more")
        self._batch_size = batch_size
        self._every = every
        self._clock = clock
        self._epoch: int | None = None
        self._first = 0
        self._began = 0.0

    def tick(self, epoch: int, batch_index: int) -> tuple[int, int, float] | None:
        """A batch is done: `speed_line`'s first, last and samples a second, if a line is due."""
        if epoch != self._epoch:
            self._epoch = epoch
            self._start(batch_index, self._clock())
            return None
        if batch_index % self._every:
            return None
        now, first, began = self._clock(), self._first, self._began
        self._start(batch_index, now)
        return first, batch_index, self._speed(batch_index - first, now - began)

    def _start(self, batch_index: int, now: float) -> None:
        self._first, self._began = batch_index, now

    def _speed(self, batches: int, seconds: float) -> float:
        return batches * self._batch_size / seconds if seconds > 0 else float("inf")
