"""What the scheduler tells the launcher of its job: that it has started or is over, and who was declared dead.

A process that is stopped or cut off still exists when it was declared dead. The launcher restarts such a server, and
does not wait for such a worker at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from echelon.cluster.messages import Abort, ControlMessage, Departure, Finish, Member, Roster, View, shorten
from echelon.environment import Job
from echelon.observe.notes import add_note


class LauncherNotes:
    """Writes notes about the messages that the scheduler sends to all processes."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._members: set[Member] = set()
        self._is_over = False

    def record(self, message: ControlMessage, verdict: Callable[[], tuple[int, str]]) -> None:
        """Write what a message means for the launcher. A repeated message changes nothing.

        `verdict`: the exit status of the scheduler, and why, at the end of the job. It may be killed before it exits.
        """
        match message:
            case Roster(members, late=False):
                self._members = set(members)
                add_note(self._job, "job started")
            case View(members=members, departure=departure) if members:
                self._change(set(members), departure)
            case Finish() | Abort() if not self._is_over:
                self._is_over = True
                status, why = verdict()
                add_note(self._job, " ".join(f"job over {status} {shorten(why)}".split()))

    def _change(self, members: set[Member], departure: Departure) -> None:
        before, self._members = self._members, members
        if before and departure is Departure.DIED:
            self._write("lost", before - members)
        if before:
            self._write("back", members - before)

    def _write(self, what: str, members: Iterable[Member]) -> None:
        for member in members:
            add_note(self._job, f"{member.role} {member.rank} {what} {member.pid}")
