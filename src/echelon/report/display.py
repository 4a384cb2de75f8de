"""The live display of a run, from its events: one row per worker, or plain lines if there is no terminal."""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from echelon.observe.events import EventReader
from echelon.report.summary import RunState
from echelon.train.loop.reporting import print_verbatim

PLAIN_EVERY_S = 5.0
BAR = 36


class Display:
    """Shows a run. The launcher calls `update` several times per second."""

    def __init__(self, directory: Path, title: str, console: Console | None = None) -> None:
        self.state = RunState()
        self._reader = EventReader(directory)
        self._title = title
        self._console = console or Console()
        self._live: Live | None = None
        self._last_plain = time.monotonic()

    def __enter__(self) -> Display:
        if self._console.is_terminal:
            self._live = Live(self.table(), console=self._console, refresh_per_second=5, transient=True)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.state.take(self._reader.poll())
        if self._live is not None:
            self._live.stop()
        if self.state.has_trained:
            self._console.print(self.table())

    def update(self) -> None:
        """Read new events and show them."""
        self.state.take(self._reader.poll())
        if self._live is not None:
            self._live.update(self.table())
        elif time.monotonic() - self._last_plain > PLAIN_EVERY_S and self.state.workers:
            self._last_plain = time.monotonic()
            self._console.print(self.line(), highlight=False, soft_wrap=True)

    def print(self, name: str, text: str) -> None:
        """Print a line that a process of the job wrote."""
        print_verbatim(self._console, f"[{name}] {text}")

    def line(self) -> str:
        """Return the state of the run in one line."""
        rate = sum(worker.rate for worker in self.state.workers.values() if not worker.finished)
        clocks = ", ".join(str(w.clock) for w in sorted(self.state.workers.values(), key=lambda w: w.rank))
        shown = f"{self.state.samples} samples, {rate:.0f} samples/s, clocks {clocks}"
        if self.state.validations:
            shown += f", accuracy {self.state.validations[-1]['accuracy']:.4f}"
        return shown

    def table(self) -> RenderableType:
        """Return a table with one row per worker."""
        table = Table(title=self._title, title_justify="left")
        for heading in ("worker", "samples/s", "clock", "samples", "staleness", "waiting"):
            table.add_column(heading, justify="right")
        for worker in sorted(self.state.workers.values(), key=lambda w: w.rank):
            elapsed = max(1e-9, worker.reported_at - (self.state.began or 0.0))
            table.add_row(
                str(worker.rank),
                f"{worker.samples / elapsed:.0f}" if worker.finished else f"{worker.rate:.0f}",
                str(worker.clock),
                str(worker.samples),
                f"{worker.mean_staleness:.2f}",
                f"{worker.wait_s:.1f} s ({worker.wait_s / elapsed:.0%})",
            )
        if not self.state.validations:
            return table
        latest = self.state.validations[-1]
        shown = f"validation accuracy {latest['accuracy']:.4f} at epoch {latest['epoch']:g}, {latest['seconds']:.1f} s"
        return Group(table, Text(shown))


def histogram_lines(histogram: dict[int, int]) -> list[str]:
    """Return the histogram of staleness as bars of text."""
    total = sum(histogram.values())
    widest = max(histogram.values(), default=1)
    return [
        f"  {value:>3} {'█' * max(1, round(BAR * count / widest))} {count} ({count / total:.0%})"
        for value, count in histogram.items()
    ]
