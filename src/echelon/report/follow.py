"""Follows a run folder while its job writes to it, for whoever watches: `echelon top` and `echelon dash`.

A follower only reads, in pieces of bounded size: a log of a million events needs no more memory than its state. The
folder may be a link such as `runs/latest`: when the link names another run, the follower starts again with that run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from echelon.errors import UsageError
from echelon.observe.events import FILE_NAME as EVENTS
from echelon.observe.events import EventReader
from echelon.report.runs import ROOT
from echelon.report.state.run import Event, RunState
from echelon.report.state.schema import check_event
from echelon.report.summary import FILE_NAME as SUMMARY

PIECE_BYTES = 1 << 20  # of the log, between two looks at a request or a key


@dataclass(frozen=True, slots=True)
class RunFiles:
    """What is known about a run besides its events."""

    folder: Path
    exists: bool = True
    read_bytes: int = 0  # of events.jsonl
    total_bytes: int = 0
    last_event: float | None = None  # Unix seconds
    unreadable: int = 0  # lines that are cut off, or that this version of Echelon cannot interpret
    exit_status: int | None = None  # of a run that has ended, from its summary

    @property
    def fraction_read(self) -> float:
        """How much of the log has been read, from 0 to 1."""
        return min(1.0, self.read_bytes / self.total_bytes) if self.total_bytes else 1.0


class _Summary(msgspec.Struct):
    exit_status: int


class RunFollower:
    """Reads the events of a run as they are written. `on_event` receives the state and each event that it has taken."""

    def __init__(self, folder: Path, on_event: Callable[[RunState, Event], None] | None = None) -> None:
        self._given = folder
        self._on_event = on_event
        self._start(folder.resolve())

    def _start(self, folder: Path) -> None:
        self._folder = folder
        self._reader = EventReader(folder)
        self._last_event: float | None = None
        self._not_understood = 0
        self._exit_status: int | None = None
        self.state = RunState()

    def read(self, most_bytes: int = PIECE_BYTES) -> bool:
        """Take the next events into `state`; returns whether more can be read at once."""
        folder = self._given.resolve()
        if folder != self._folder and folder.is_dir():
            self._start(folder)
        elif self._reader.was_replaced:  # the folder was deleted, and a new run has its name
            self._start(self._folder)
        before = self._reader.offset
        for event in self._reader.poll(most_bytes):
            try:
                check_event(event)
                self.state.take([event])
                if self._on_event is not None:
                    self._on_event(self.state, event)
                self._last_event = max(self._last_event or 0.0, event["at"])
            except (KeyError, TypeError, ValueError):  # written by another version, or by hand
                self._not_understood += 1
        return self._reader.offset > before and self._reader.offset < self._reader.size

    def read_all(self) -> None:
        """Take all events that have been written so far."""
        while self.read():
            pass

    @property
    def files(self) -> RunFiles:
        """The folder as it is now."""
        return RunFiles(
            self._folder,
            self._folder.is_dir(),
            self._reader.offset,
            self._reader.size,
            self._last_event,
            self._reader.torn + self._not_understood,
            self._read_exit_status(),
        )

    def _read_exit_status(self) -> int | None:
        if self._exit_status is None:
            try:
                self._exit_status = msgspec.json.decode(
                    (self._folder / SUMMARY).read_bytes(), type=_Summary
                ).exit_status
            except (OSError, msgspec.MsgspecError):
                return None
        return self._exit_status


def run_folder(given: str | None) -> Path:
    """Return the folder of a run, by default that of the newest run. Raises UsageError if there is none.

    A run may be given as its folder, as a file in it, or by its name under `runs/`.
    """
    if given is None:
        if (ROOT / "latest").is_dir():
            return ROOT / "latest"
        raise UsageError(
            f"there is no run in {ROOT.absolute()}; start one with echelon train, or name the folder of another run"
        )
    for folder in (Path(given), ROOT / given):
        if folder.is_dir():
            return folder
        if folder.name in (EVENTS, SUMMARY) and folder.is_file():
            return folder.parent
    if Path(given).exists():
        raise UsageError(f"{given} is not a folder; give the folder of a run, which has an {EVENTS}")
    raise UsageError(f"there is no folder {given}; {_existing_runs()}")


def _existing_runs() -> str:
    newest = sorted((path for path in ROOT.glob("*/") if not path.is_symlink()), key=lambda path: path.stat().st_mtime)
    if not newest:
        return "the folder of a run is made by echelon train, and by echelon launch --run-dir"
    return f"the newest runs here are {', '.join(str(path) for path in newest[:-4:-1])}"
