"""A progress bar below the log on a terminal: epoch, batches, remaining time. Nothing if there is no terminal.

The log lines are not changed by a single byte: they are printed through the same console, above the bar.
"""

from __future__ import annotations

import logging
import sys
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.segment import Segment, Segments


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


class _AboveBar(logging.Handler):
    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        print_verbatim(self._console, self.format(record))


def print_verbatim(console: Console, line: str) -> None:
    """Print a line unchanged above a live display; rich would otherwise expand its tabs."""
    console.print(Segments([Segment(f"{line}\n")]), soft_wrap=True)
