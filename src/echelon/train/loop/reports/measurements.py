"""Writes the training metrics of one process to the event log, about once per second and at the end of each epoch."""

from __future__ import annotations

import time
from collections.abc import Callable

from torch import Tensor

from echelon.observe.events import EventLog
from echelon.train.step.metrics import Metrics

EVERY_S = 1.0  # reading the sums waits for the device, so not at every step


class Measurements:
    """The metrics of the samples since the last event. Without an event log nothing is read from the device."""

    def __init__(
        self, events: EventLog, rank: int, metrics: Metrics, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._events = events
        self._rank = rank
        self._metrics = metrics
        self._clock = clock
        self._written_s = float("-inf")
        self._written: Tensor | None = None  # the sums at the last event of this epoch

    def step(self, epoch: float, sums: Tensor) -> None:
        """Write an event if one is due. `epoch`: epochs done, with a fraction; `sums`: since the epoch began."""
        if self._events.is_open and self._clock() - self._written_s >= EVERY_S:
            self._write(epoch, sums)

    def end_epoch(self, epoch: float, sums: Tensor) -> None:
        """Write an event for the rest of the epoch; the next sums start at zero."""
        if self._events.is_open:
            self._write(epoch, sums)
        self._written = None

    def _write(self, epoch: float, sums: Tensor) -> None:
        now = sums.detach().to("cpu", copy=True)
        new = now if self._written is None else now - self._written
        self._written, self._written_s = now, self._clock()
        if samples := int(new[-1]):
            means = self._metrics.values(new)
            self._events.write(
                "training",
                rank=self._rank,
                epoch=round(epoch, 4),
                samples=samples,
                accuracy=means["accuracy"],
                loss=means.get("cross-entropy"),
            )
