"""The live display of a run, from its events: one row per worker, or plain lines if there is no terminal."""

from __future__ import annotations

import textwrap
import time
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from echelon.observe.events import EventReader
from echelon.report import lines
from echelon.report.columns import GAP, Cells, table_cells
from echelon.report.state import JobInfo, RunState
from echelon.train.loop.reporting import print_verbatim

PLAIN_FIRST_S = 5.0  # between two lines without a terminal, at first
PLAIN_LAST_S = 60.0  # and in a long run
NEWS_SHOWN = 3
MIN_ROWS = 3
MIN_BAR = 4
HEADING_LINES = 2


class Display:
    """Shows a run. The launcher calls `update` several times per second."""

    def __init__(self, directory: Path, info: JobInfo, console: Console | None = None) -> None:
        self.state = RunState()
        self._reader = EventReader(directory)
        self._info = info
        self._console = console or Console()
        self._live: Live | None = None
        self._began = time.time()
        self._plain = _PlainLines(self._console, info)

    def __enter__(self) -> Display:
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(self._screen(), console=self._console, refresh_per_second=5, transient=True)
            self._live.start()
        else:
            self._plain.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.state.take(self._reader.poll())
        if self._live is not None:
            self._live.stop()
        if self.state.has_trained:
            cells = table_cells(self.state, self._info, self._console.width, at_end=True)
            self._console.print(_line(self._info.title, "bold"), render_table(cells), sep="\n")

    def update(self) -> None:
        """Read new events and show them."""
        self.state.take(self._reader.poll())
        if self._live is not None:
            self._live.update(self._screen())
        else:
            self._plain.update(self.state, time.time())

    def print(self, name: str, text: str) -> None:
        """Print a line that a process of the job wrote."""
        print_verbatim(self._console, f"[{name}] {text}")

    def _screen(self) -> RenderableType:
        return screen(self._info, self.state, time.time(), self._began, self._console.width, self._console.height)


class _PlainLines:
    """Lines for a pipe or a file: what happens at the start, then the progress at growing intervals.

    News are not repeated: the processes print them.
    """

    def __init__(self, console: Console, info: JobInfo) -> None:
        self._console = console
        self._info = info
        self._phase = ""
        self._began = self._last = time.time()

    def start(self) -> None:
        self._print(self._info.title)
        self._print(lines.start_line(self._info))
        self._phase = lines.phase_of_start(self._info, RunState())

    def update(self, state: RunState, now: float) -> None:
        if state.has_trained:
            if now - self._last >= min(PLAIN_LAST_S, max(PLAIN_FIRST_S, (now - self._began) / 10)):
                self._last = now
                self._print(lines.progress_line(state, now))
        elif (phase := lines.phase_of_start(self._info, state)) != self._phase:
            self._phase = phase
            self._print(phase)

    def _print(self, line: str) -> None:
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)


def screen(info: JobInfo, state: RunState, now: float, began: float, width: int, height: int) -> RenderableType:
    """Return what a terminal of this size shows at the time `now` of a run that was started at `began`."""
    parts: list[RenderableType] = [Text(info.title, "bold")]
    news = [_line(text, "yellow") for text in lines.news_lines(state, NEWS_SHOWN)]
    if not state.has_trained:
        parts.append(_line(f"{lines.phase_of_start(info, state)}… {lines.duration(now - began)}"))
        parts += map(Text, lines.processes_lines(info, state))
        return Group(*parts, *news)
    metrics = [_progress(state, now, width), *map(_line, lines.metric_lines(state, width))]
    title_lines = len(textwrap.wrap(info.title, width, break_on_hyphens=False))
    max_rows = height - title_lines - len(metrics) - HEADING_LINES - len(news) - 1  # the cursor's line stays free
    table = render_table(table_cells(state, info, width, max(MIN_ROWS, max_rows)))
    return Group(*parts, *metrics, table, *news)


def _progress(state: RunState, now: float, width: int) -> RenderableType:
    """Return one line: what runs, a bar, and how much is left."""
    fraction, tail = state.fraction_done, ""
    if (label := lines.validation_text(state)) is not None and state.validating is not None:
        done, total = state.validating["done"], state.validating["total"]
        fraction, tail = done / max(1, total), f"{done} of {total}"
    elif not state.active:
        return _line("the workers have ended; measuring and saving the final weights…")
    else:
        label = lines.epoch_text(state)
        left = state.seconds_left(now)
        tail = f"{fraction or 0.0:>4.0%}" + ("" if left is None else f"  {lines.duration(left)} left")
    bar = min(40, width - len(label) - len(tail) - 2 * GAP)
    if bar < MIN_BAR:
        whole = f"{label}  {tail.strip()}"
        return _line(whole if len(whole) <= width else tail.strip())
    grid = Table.grid(padding=(0, GAP, 0, 0))
    grid.add_row(_line(label), ProgressBar(total=1.0, completed=fraction or 0.0, width=bar), _line(tail))
    return grid


def render_table(cells: Cells) -> Table:
    """Return the cells as a table with a line under the headings."""
    table = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False, header_style="bold underline")
    for column in cells.columns:
        table.add_column(column.heading, justify="left" if column.left else "right", vertical="bottom", no_wrap=True)
    for row in cells.rows:
        table.add_row(*row)
    return table


def _line(text: str, style: str = "") -> Text:
    """Return a line that is cut off with an ellipsis where the terminal ends."""
    return Text(text, style, no_wrap=True, overflow="ellipsis")
