"""The order in which the errors of a job's processes are shown: the cause first, and each error once.

When a process fails, others fail because of it, and often print their errors and exit before the first one has ended.
From the line that begins an error on, the lines of a process are therefore held until its end is handled, or for
`HOLD_S`. The supervisor handles ends in the order of their causes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

HOLD_S = 5.0  # a process that prints an error and still runs after this time may have handled the error

_SHORT_ERROR = re.compile(r"(?:\S+: )?error: ")  # of Echelon's commands and scripts
_STOPPED = re.compile(r"server (?:\d+ )?stops: |job stopped: ")  # of servers and the scheduler
_TRACEBACK = re.compile(r"(?:\[rank\d+\]: )?Traceback \(most recent call last\):$")  # torch labels those of a group
_DDP = re.compile(r"KeyError: '(?:RANK|WORLD_SIZE|LOCAL_RANK|MASTER_ADDR|MASTER_PORT)'|using env:// rendezvous")
_USE_A_TRAINER = (
    "\n    this program expects torchrun's variables, which 'echelon launch' does not set: start it with torchrun, or"
    "\n    replace init_process_group and DistributedDataParallel by echelon.Trainer(model, optimizer, 'dist_sync')"
)


@dataclass(slots=True)
class _Held:
    since: float
    lines: list[str] = field(default_factory=list)


class LastLines:
    """Passes lines to `show(name, text)`, and holds those that end with the process."""

    def __init__(self, show: Callable[[str, str], None]) -> None:
        self._show = show
        self._held: dict[str, _Held] = {}
        self._errors: dict[str, str] = {}  # short errors that were shown, and the process that printed them first
        self._last_cause: str | None = None  # the process whose error nothing but consequences has followed

    def take(self, name: str, text: str, now: float) -> None:
        """Show a line of a process, or hold it if it belongs to an error."""
        if name not in self._held and not _begins_error(text):
            self._show_line(name, text)
            return
        self._held.setdefault(name, _Held(now)).lines.append(text)

    def since(self, name: str) -> float | None:
        """Return when the error began that is held for a process, or None."""
        return self._held[name].since if name in self._held else None

    def waits_for_cause(self, name: str, running: Iterable[str], now: float) -> bool:
        """Return whether a process that still runs printed an error before this one, and may be its cause."""
        own = self.since(name)
        earlier = [since for other in running if (since := self.since(other)) is not None]
        return own is not None and any(since < own and now - since < HOLD_S for since in earlier)

    def release(self, name: str, *, is_cause: bool) -> None:
        """Show what is held for a process that has ended, but not that a server stops because of another process."""
        held = self._held.pop(name, None)
        lines = held.lines if held is not None else []
        if not is_cause:
            lines = [text for text in lines if not text.startswith("server ") or not _STOPPED.match(text)]
        self._show_error(name, lines)
        if is_cause:
            self._last_cause = name

    def release_overdue(self, now: float) -> None:
        """Show what is held for processes that still run after `HOLD_S`."""
        for name in [name for name, held in self._held.items() if now - held.since >= HOLD_S]:
            self._show_error(name, self._held.pop(name).lines)

    def ends_with_error(self, name: str, last: str) -> bool:
        """Return whether the last thing shown, besides consequences, is the short error `last` of this process."""
        return last in self._errors and self._last_cause == name

    def _show_error(self, name: str, lines: list[str]) -> None:
        """Show the lines of an error, but not those of a short one that another process has shown."""
        is_short = not any(map(_TRACEBACK.match, lines))
        for text in lines:
            if not is_short or self._errors.setdefault(text, name) == name:
                self._show(name, text)

    def _show_line(self, name: str, text: str) -> None:
        self._last_cause = None
        self._show(name, text)


def is_short_error(text: str) -> bool:
    """Return whether a line is an error of one line, as Echelon prints them."""
    return _SHORT_ERROR.match(text) is not None


def advice_for(lines: Iterable[str]) -> str:
    """Return what to do about an error, to be appended to its line, or nothing."""
    return _USE_A_TRAINER if any(map(_DDP.search, lines)) else ""


def _begins_error(text: str) -> bool:
    return is_short_error(text) or _TRACEBACK.match(text) is not None or _STOPPED.match(text) is not None
