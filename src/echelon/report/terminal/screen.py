"""What a terminal shows of a run: a pure function of the state, the time and the size of the terminal."""

from __future__ import annotations

import textwrap

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from echelon.report.state.run import JobInfo, RunState
from echelon.report.terminal import lines
from echelon.report.terminal.columns import GAP, Cells, table_cells

MIN_ROWS = 3
MIN_BAR, MAX_BAR = 4, 40
HEADING_LINES = 2
VALIDATION_SHOWN_S = 1.0  # a validation that is shorter would only make the lines below it jump


def screen(info: JobInfo, state: RunState, now: float, began: float, width: int, height: int) -> RenderableType:
    """Return what a terminal of this size shows at the time `now` of a run that was started at `began`."""
    title = Text(lines.printable(info.title), "bold")
    news = [line(text, "yellow") for text in lines.news_lines(state, now, lines.NEWS_SHOWN)]
    if not state.has_trained:
        doing = line(f"{lines.phase_of_start(info, state)}… {lines.duration(now - began)}")
        return Group(title, doing, *map(Text, lines.processes_lines(info, state)), *news)
    above = [*_progress_lines(state, now, width), *map(line, lines.metric_lines(state, width))]
    title_lines = len(textwrap.wrap(info.title, width, break_on_hyphens=False))
    max_rows = height - title_lines - len(above) - HEADING_LINES - len(news) - 1  # the cursor's line stays free
    table = render_table(table_cells(state, info, width, max(MIN_ROWS, max_rows)))
    return Group(title, *above, table, *news)


def _progress_lines(state: RunState, now: float, width: int) -> list[RenderableType]:
    """Return how far training is, and validation if one takes long."""
    shown: list[RenderableType] = []
    if state.active:
        done, left = state.fraction_done or 0.0, state.seconds_left(now)
        tail = f"{done:>4.0%}" + ("" if left is None else f"  {lines.duration(left)} left")
        shown.append(_bar_line(lines.epoch_text(state), done, tail, width))
    elif not state.validating:
        shown.append(line(f"{lines.ENDED}…"))
    if state.validating and (not state.active or now - state.validating_since >= VALIDATION_SHOWN_S):
        measured, total = state.validating["done"], state.validating["total"]
        shown.append(_bar_line(lines.validation_text(state), measured / total, f"{measured} of {total}", width))
    return shown


def _bar_line(label: str, done: float, tail: str, width: int) -> RenderableType:
    """Return a label, a bar and a text in one line; a narrow terminal has no bar, and a very narrow one no label."""
    bar = min(MAX_BAR, width - len(label) - len(tail) - 2 * GAP)
    if bar < MIN_BAR:
        whole = f"{label}  {tail.strip()}"
        return line(whole if len(whole) <= width else tail.strip())
    grid = Table.grid(padding=(0, GAP, 0, 0))
    grid.add_row(line(label), ProgressBar(total=1.0, completed=done, width=bar), line(tail))
    return grid


def render_table(cells: Cells) -> Table:
    """Return the cells as a table without borders, which would take a third of a narrow terminal."""
    table = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False)
    for column in cells.columns:
        table.add_column(column.heading, justify="left" if column.left else "right", vertical="bottom", no_wrap=True)
    for row in cells.rows:
        table.add_row(*row)
    return table


def line(text: str, style: str = "") -> Text:
    """Return a line that is cut off with an ellipsis where the terminal ends."""
    return Text(lines.printable(text), style, no_wrap=True, overflow="ellipsis")
