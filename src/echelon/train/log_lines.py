"""The text of MXNet 1.9's log lines, which other programs read, and the rule for when to log the speed.

There is one function per line, and no other place writes that text. Epochs and batches count from 0, as in MXNet's
logs; checkpoint files and parse_log's tables count epochs from 1. Speeds are those of one worker.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable, Mapping


def start_line(options: Mapping[str, object]) -> str:
    """The first line of a worker: its options."""
    return f"start with arguments {Namespace(**options)}"


def resize_line(num_batches: int) -> str:
    """All lock-step workers run this many steps per epoch, whatever the size of their share of the data."""
    return f"Resizing training data to {num_batches} batches per machine"


def loaded_line(file: str) -> str:
    """Training resumes from a checkpoint. MXNet's line names a file that its own name does not match."""
    return f"Loaded model {file}"


def speed_line(epoch: int, first: int, last: int, samples_per_s: float, values: Mapping[str, float]) -> str:
    """The speed and the metrics of the batches after `first` up to `last`."""
    shown = "".join(f"\t{name}={value:f}" for name, value in values.items())
    return f"Epoch[{epoch}] Batch [{first}-{last}]\tSpeed: {samples_per_s:.2f} samples/sec{shown}"


def io_line(batch: int, samples_per_s: float) -> str:
    """`--test-io 1`: the speed of reading without training."""
    return f"Batch [{batch}]\tSpeed: {samples_per_s:.2f} samples/sec"


def train_line(epoch: int, name: str, value: float) -> str:
    """A metric over the whole epoch."""
    return f"Epoch[{epoch}] Train-{name}={value:f}"


def time_line(epoch: int, seconds: float) -> str:
    """The duration of the training steps of an epoch, without checkpoint and validation."""
    return f"Epoch[{epoch}] Time cost={seconds:.3f}"


def saved_line(file: str) -> str:
    """A checkpoint has been written."""
    return f'Saved checkpoint to "{file}"'


def validation_line(epoch: int, name: str, value: float, batch: int | None = None) -> str:
    """A metric over the validation data; with `batch`, in the middle of an epoch, for which MXNet has no line."""
    where = "" if batch is None else f" Batch [{batch}]"
    return f"Epoch[{epoch}]{where} Validation-{name}={value:f}"


class Speedometer:
    """Decides when to log the speed: every `every` batches; the first batch of an epoch only starts the clock.

    MXNet detects a new epoch by a smaller batch number, which fails for epochs of one batch; this class compares epoch
    numbers. If training starts in the middle of an epoch, the first line covers only the batches since then.
    """

    def __init__(self, batch_size: int, every: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._batch_size = batch_size
        self._every = every
        self._clock = clock
        self._epoch: int | None = None
        self._first = 0
        self._start_s = 0.0

    def tick(self, epoch: int, batch_index: int) -> tuple[int, int, float] | None:
        """Count a batch; if a line is due, returns its first batch, last batch and samples per second."""
        if epoch != self._epoch:
            self._epoch = epoch
            self._start(batch_index, self._clock())
            return None
        if batch_index % self._every:
            return None
        now, first, start_s = self._clock(), self._first, self._start_s
        self._start(batch_index, now)
        return first, batch_index, self._speed(batch_index - first, now - start_s)

    def _start(self, batch_index: int, now: float) -> None:
        self._first, self._start_s = batch_index, now

    def _speed(self, batches: int, seconds: float) -> float:
        return batches * self._batch_size / seconds if seconds > 0 else float("inf")
