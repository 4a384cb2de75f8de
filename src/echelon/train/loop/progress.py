"""A moving line under the log on a terminal: which epoch, how far, how fast, how long still. Elsewhere nothing.

The log's lines stay what they are, byte for byte: they go through the same console, above the moving line.
"""

from __future__ import annotations

import logging
import sys
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.segment import Segment, Segments


class TrainingProgress:
    """Follows the steps of a run. Use as a context."""

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
        """Where the log goes: plain, or above the moving line."""
        return _Above(self._console) if self._console.is_terminal else logging.StreamHandler(self._console.file)

    def step(self, epoch: int, num_epochs: int, done: int, per_epoch: int) -> None:
        """`done` of an epoch's batches are done."""
        if self._bar is None:
            return
        if self._task is None:
            self._task = self._bar.add_task("", total=per_epoch)
        if epoch != self._epoch:
            self._epoch = epoch
            self._bar.reset(self._task, total=per_epoch, description=f"epoch {epoch + 1} of {num_epochs}")
        self._bar.update(self._task, completed=done)


class _Above(logging.Handler):
    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        print_verbatim(self._console, self.format(record))


def print_verbatim(console: Console, line: str) -> None:
    """Print a line byte for byte above what moves: as text, it would lose its tabs."""
    console.print(Segments([Segment(f"{line}\n")]), soft_wrap=True)
