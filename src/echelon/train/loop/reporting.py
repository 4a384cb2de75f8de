"""What one process of a run reports: MXNet's log lines, TensorBoard curves, the progress bar and the run's events."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from echelon.observe.events import EventLog
from echelon.train import log_lines
from echelon.train.loop.progress import TrainingProgress
from echelon.train.loop.tensorboard import ScalarWriter
from echelon.train.recipe.options import TrainOptions

log = logging.getLogger(__name__)


class Reporter:
    """Reports the progress of one process. Only device 0 of a worker logs, and only rank 0 writes curves."""

    def __init__(
        self,
        options: TrainOptions,
        events: EventLog,
        progress: TrainingProgress | None,
        *,
        logs: bool,
        is_rank_0: bool,
    ) -> None:
        self._num_epochs = options.num_epochs
        self._events = events
        self._progress = progress
        self._logs = logs
        self._curves = ScalarWriter.open(options.tensorboard if is_rank_0 else None)

    def info(self, line: str) -> None:
        """Log a line."""
        if self._logs:
            log.info(line)

    def event(self, kind: str, **values: Any) -> None:
        """Write an event for `echelon train` and the summary."""
        self._events.write(kind, **values)

    def step(self, epoch: int, done: int, per_epoch: int) -> None:
        """Move the progress bar to `done` batches of an epoch."""
        if self._progress is not None:
            self._progress.step(epoch, self._num_epochs, done, per_epoch)

    def speed(self, epoch: int, due: tuple[int, int, float], values: Mapping[str, float], num_steps: int) -> None:
        """Report the speed and the metrics of the batches since the last such line. `due` is `Speedometer.tick`'s."""
        self.info(log_lines.speed_line(epoch, *due, values))
        self._curves.write("samples/s", due[2], num_steps)

    def epoch_end(self, epoch: int, means: Mapping[str, float], seconds: float) -> None:
        """Report the training metrics and the duration of an epoch."""
        for name, value in means.items():
            self.info(log_lines.train_line(epoch, name, value))
            self._curves.write(f"train/{name}", value, epoch + 1)
        self.info(log_lines.time_line(epoch, seconds))

    def validation(self, epoch: int, batch: int | None, values: Mapping[str, float]) -> None:
        """Report validation metrics, after `batch` batches of an epoch or, with None, at its end."""
        for name, value in values.items():
            self.info(log_lines.validation_line(epoch, name, value, batch))
            if batch is None:
                self._curves.write(f"validation/{name}", value, epoch + 1)

    def close(self) -> None:
        """Flush the curves."""
        self._curves.close()
