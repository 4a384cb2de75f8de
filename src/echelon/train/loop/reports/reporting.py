"""What one process of a run reports: MXNet's log lines, curves for experiment trackers and a progress bar.

On a terminal the bar is below the log: epoch, batches, remaining time. The log lines are not changed by a single byte:
they are printed through the same console, above the bar. Without a terminal there is no bar.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.segment import Segment, Segments

from echelon.train import log_lines
from echelon.train.loop.reports.trackers import Trackers
from echelon.train.recipe.options import TrainOptions

log = logging.getLogger(__name__)

VALIDATION_LINE_S = 10.0


class Reporter:
    """Reports the progress of one process. Only device 0 of a worker logs.

    Only the first living process writes curves. It opens them at the start, so that their errors come at the start, or
    when it becomes the first one.
    """

    def __init__(
        self, options: TrainOptions, progress: TrainingProgress | None, *, logs: bool, is_first: Callable[[], bool]
    ) -> None:
        self._options = options
        self._num_epochs = options.num_epochs
        self._progress = progress
        self._logs = logs
        self._is_first = is_first
        self._curves = Trackers(options) if is_first() else None
        self._validation_line_s = 0.0

    def info(self, line: str) -> None:
        """Log a line."""
        if self._logs:
            log.info(line)

    def step(self, epoch: int, done: int, per_epoch: int) -> None:
        """Move the progress bar to `done` batches of an epoch."""
        if self._progress is not None:
            self._progress.step(epoch, self._num_epochs, done, per_epoch)

    def speed(self, epoch: int, due: tuple[int, int, float], values: Mapping[str, float], num_steps: int) -> None:
        """Report the speed and the metrics of the batches since the last such line. `due` is `Speedometer.tick`'s."""
        self.info(log_lines.speed_line(epoch, *due, values))
        self._write("samples/s", due[2], num_steps)

    def epoch_end(self, epoch: int, means: Mapping[str, float], seconds: float) -> None:
        """Report the training metrics and the duration of an epoch."""
        for name, value in means.items():
            self.info(log_lines.train_line(epoch, name, value))
            self._write(f"train/{name}", value, epoch + 1)
        self.info(log_lines.time_line(epoch, seconds))

    def validation(self, epoch: int, batch: int | None, values: Mapping[str, float]) -> None:
        """Report validation metrics, after `batch` batches of an epoch or, with None, at its end."""
        for name, value in values.items():
            self.info(log_lines.validation_line(epoch, name, value, batch))
            if batch is None:
                self._write(f"validation/{name}", value, epoch + 1)

    def validating(self, done: int, total: int) -> None:
        """Show the progress of a validation: in the bar, and as a line at most every few seconds."""
        now = time.monotonic()
        if not done:
            self._validation_line_s = now
        elif done < total and now - self._validation_line_s >= VALIDATION_LINE_S:
            self._validation_line_s = now
            self.info(f"validated {done} of {total} samples")
        if self._progress is not None:
            self._progress.validating(done, total)

    def _write(self, name: str, value: float, step: int) -> None:
        """Add one point to one curve, in the first living process."""
        if self._is_first():
            self._curves = self._curves or Trackers(self._options)
            self._curves.write(name, value, step)

    def close(self) -> None:
        """Flush the curves."""
        if self._curves is not None:
            self._curves.close()


class TrainingProgress:
    """Shows the steps of a run. Use it as a context manager."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(file=sys.stderr)
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._epoch = -1

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=self._console, transient=True, refresh_per_second=5)
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def handler(self) -> logging.Handler:
        """Return a handler that prints log lines above the bar, or plainly if there is no terminal."""
        return _AboveBar(self._console) if self._console.is_terminal else logging.StreamHandler(self._console.file)

    def step(self, epoch: int, num_epochs: int, done: int, per_epoch: int) -> None:
        """Show that `done` batches of an epoch are completed."""
        if self._bar is None:
            return
        if self._task is None:
            self._task = self._bar.add_task("", total=per_epoch)
        if epoch != self._epoch:
            self._epoch = epoch
            self._bar.reset(self._task, total=per_epoch, description=f"epoch {epoch + 1} of {num_epochs}")
        self._bar.update(self._task, completed=done)

    def validating(self, done: int, total: int) -> None:
        """Show that `done` of `total` samples are validated. The next step shows its epoch again."""
        if self._bar is None or self._task is None:
            return
        if not done:
            self._bar.reset(self._task, total=total, description="validation")
            self._epoch = -1
        self._bar.update(self._task, completed=done)


class _AboveBar(logging.Handler):
    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        print_verbatim(self._console, self.format(record))


def print_verbatim(console: Console, line: str) -> None:
    """Print a line unchanged above a live display; rich would otherwise expand its tabs."""
    console.print(Segments([Segment(f"{line}\n")]), soft_wrap=True)
