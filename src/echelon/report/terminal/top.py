"""`echelon top`: a run in a terminal, seen from outside its job: workers, servers, who is slow, the last decisions."""

from __future__ import annotations

import textwrap
import time

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table

from echelon.report.follow import RunFiles, RunFollower
from echelon.report.state.job import job_info_of
from echelon.report.state.run import RunState
from echelon.report.state.slowness import slow_workers
from echelon.report.terminal import lines
from echelon.report.terminal.columns import GAP, table_cells
from echelon.report.terminal.display import PlainLines
from echelon.report.terminal.screen import line, render_table, screen
from echelon.report.terminal.status import BAD, BUSY, DONE, GOOD, WARN, Status, run_status

READ_S = 0.5
NO_LIMIT = 10_000  # lines
_STYLES = {GOOD: "green", BUSY: "cyan", WARN: "yellow", BAD: "red", DONE: "dim"}


def top_screen(state: RunState, files: RunFiles, now: float, width: int, height: int) -> RenderableType:
    """Return what a terminal of this size shows of a run at the time `now`."""
    status, info = run_status(state, files, now), job_info_of(state)
    head = line(f"{files.folder.name}: {status.word}", f"bold {_STYLES[status.tone]}")
    shown: list[RenderableType] = [head]
    if status.message:
        shown.append(line(status.message, _STYLES[status.tone]))
    slow = slow_lines(state) if status.is_live else []
    below: list[RenderableType] = [line(text, "yellow") for one in slow for text in textwrap.wrap(one, width)]
    below += [line(text) for one in decision_lines(state) for text in textwrap.wrap(one, width)]
    used = len(shown) + len(below) + (len(state.servers) + 1 if state.servers else 0)
    if state.servers:
        below.append(_servers(state))
    if status.is_live:
        shown.append(screen(info, state, now, (state.job or {}).get("at", now), width, height - used))
    elif state.has_trained:
        news = [line(text, "yellow") for text in lines.news_lines(state, now, lines.NEWS_SHOWN)]
        shown += [line(info.title, "bold"), *map(line, lines.metric_lines(state, width))]
        shown += [render_table(table_cells(state, info, width, at_end=True)), *news]
    return Group(*shown, *below)


def slow_lines(state: RunState) -> list[str]:
    """Return which workers are slow, and why."""
    return [f"worker {one.rank} is {one.factor:.1f}x slower: {one.why}" for one in slow_workers(state)]


def decision_lines(state: RunState) -> list[str]:
    """Return the last decision of the scheme of each store, with its reason."""
    found = []
    for number, store in sorted(state.stores.items()):
        newest = state.newest_decision(number)
        found.append(f"{store.get('name')} ({store.get('scheme')}): {newest or 'no decision yet'}")
    return found


def _servers(state: RunState) -> Table:
    table = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False)
    for heading in ("server", "updates/s", "held", "CPU", "memory", "received", "sent"):
        table.add_column(heading, justify="right", no_wrap=True)
    for rank, server in sorted(state.servers.items()):
        amounts = (server.memory_bytes, server.received, server.sent)
        numbers = (f"{server.updates_per_s:.0f}", str(server.held), f"{server.cpu_load:.0%}")
        table.add_row(str(rank), *numbers, *map(lines.bytes_text, amounts))
    return table


class Top:
    """Shows a run until it has ended: as a live screen, or as lines if there is no terminal."""

    def __init__(self, follower: RunFollower, console: Console) -> None:
        self._follower = follower
        self._console = console

    def print(self) -> None:
        """Print the run as it is now."""
        self._follower.read_all()
        self._console.print(self._screen(NO_LIMIT))

    def show(self) -> None:
        """Show the run until it has ended, then print it as it is."""
        self._follower.read_all()
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            with Live(self._screen(), console=self._console, refresh_per_second=4, transient=True) as live:
                while not self._status().has_ended:
                    time.sleep(READ_S)
                    self._follower.read_all()
                    live.update(self._screen())
        else:
            self._print_lines()
        self.print()

    def _print_lines(self) -> None:
        plain = PlainLines(self._console, job_info_of(self._follower.state), time.time())
        while not (status := self._status()).has_ended:
            if self._follower.files.last_event is None:
                plain.say(status.message)
            else:
                plain.info = job_info_of(self._follower.state)
                plain.update(self._follower.state, time.time())
            time.sleep(READ_S)
            self._follower.read_all()

    def _status(self) -> Status:
        return run_status(self._follower.state, self._follower.files, time.time())

    def _screen(self, height: int | None = None) -> RenderableType:
        follower, console = self._follower, self._console
        return top_screen(follower.state, follower.files, time.time(), console.width, height or console.height)
