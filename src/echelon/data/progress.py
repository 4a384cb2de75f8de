"""A progress bar on a terminal. Elsewhere nothing is shown, so logs and pipes stay clean.

The code that does the work calls a function with the amount done since the last call.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

Advance: TypeAlias = Callable[[int], None]


@contextmanager
def bar(title: str, total: int | None, in_bytes: bool = False) -> Iterator[Advance]:
    """Show a bar on standard error while the block runs; yield the function that advances it."""
    if not sys.stderr.isatty():
        yield lambda amount: None
        return
    columns: list[ProgressColumn] = [DownloadColumn(), TransferSpeedColumn()] if in_bytes else [MofNCompleteColumn()]
    text = TextColumn("{task.description}", markup=False)
    with Progress(text, BarColumn(), *columns, TimeRemainingColumn(), console=Console(stderr=True)) as progress:
        task = progress.add_task(title, total=total)
        yield lambda amount: progress.advance(task, amount)
