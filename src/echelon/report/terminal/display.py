"""The live display of a run, from its events: one row per worker, or plain lines if there is no terminal."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from rich.console import Console, RenderableType
from rich.live import Live

from echelon.observe.events import EventReader
from echelon.report.state.run import JobInfo, RunState
from echelon.report.terminal import lines
from echelon.report.terminal.columns import table_cells
from echelon.report.terminal.screen import line, render_table, screen
from echelon.train.loop.reports.reporting import print_verbatim

PLAIN_FIRST_S = 5.0  # between two lines without a terminal, at first
PLAIN_LAST_S = 60.0  # and in a long run


def stdout_console() -> Console:
    """Return the console of this process's output, which prints `?` for characters that its encoding lacks."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    return Console()


class Display:
    """Shows a run. The launcher calls `update` several times per second."""

    def __init__(self, directory: Path, info: JobInfo, console: Console | None = None) -> None:
        self.state = RunState()
        self._reader = EventReader(directory)
        self._info = info
        self._console = console or stdout_console()
        self._live: Live | None = None
        self._began = time.time()
        self._plain = PlainLines(self._console, info, self._began)

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
            self._console.print(line(self._info.title, "bold"), render_table(cells), sep="\n")

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


class PlainLines:
    """Lines for a pipe or a file: what happens at the start, then the progress at growing intervals.

    News are not repeated: the processes print them.
    """

    def __init__(self, console: Console, info: JobInfo, began: float) -> None:
        self._console = console
        self.info = info
        self._phase = ""
        self._began = self._last = began

    def start(self) -> None:
        """Print which processes are started."""
        self._print(self.info.title)
        self._print(lines.start_line(self.info))
        self._phase = lines.phase_of_start(self.info, RunState())

    def update(self, state: RunState, now: float) -> None:
        """Print what is due at the time `now`."""
        if state.has_trained:
            if now - self._last >= min(PLAIN_LAST_S, max(PLAIN_FIRST_S, (now - self._began) / 10)):
                self._last = now
                self._print(lines.progress_line(state, now))
        else:
            self.say(lines.phase_of_start(self.info, state))

    def say(self, phase: str) -> None:
        """Print what the job does before its first step, if that is new."""
        if phase != self._phase:
            self._phase = phase
            self._print(phase)

    def _print(self, text: str) -> None:
        self._console.print(lines.printable(text), highlight=False, markup=False, soft_wrap=True)
