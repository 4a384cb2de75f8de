"""Which processes of a running job are started again after they failed, when, and how often. Pure.

A server or the scheduler that is killed or crashes can always be replaced: the others have what it needs. A worker can
be replaced only if the job has a ledger, because otherwise nobody trains the samples of the lost one. Nothing is
restarted before the job has started: such a failure is a mistake of the user or of a machine, and would repeat itself.
So would that of a worker that ended with UsageError or DataError, for example NaN under --check-finite: it ends a job
that would have restarted it otherwise.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from echelon.cluster.messages import WORKER
from echelon.launch.supervision.processes import RunningProcess

FIRST_WAIT_S = 0.2  # before the first restart of a process; each one after it waits twice as long
LONGEST_WAIT_S = 5.0
RAN_WELL_S = 60.0  # since its last restart: a process that fails after that probably has a new cause, and waits briefly
DELIBERATE = (0, 1, 2, 3)  # with these a server or the scheduler says how the job ended; others mean that it crashed


class Restart(NamedTuple):
    """A restart of a process: the `number`-th of at most `most`, at the time `at`."""

    number: int
    most: int
    at: float


class Restarts:
    """Counts the restarts of each process, and spaces them. All restarts count, however long the process ran."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._last: dict[str, Restart] = {}
        self._waits_s: dict[str, float] = {}  # before the last restart

    def next(self, name: str, now: float) -> Restart | None:
        """Return the next restart of a process that has failed now, or None if it has had all of them."""
        last = self._last.get(name)
        number = 1 if last is None else last.number + 1
        if number > self._most:
            return None
        if last is None or now - last.at >= RAN_WELL_S:
            wait_s = FIRST_WAIT_S
        else:
            wait_s = min(LONGEST_WAIT_S, 2 * self._waits_s[name])
        self._waits_s[name] = wait_s
        self._last[name] = Restart(number, self._most, now + wait_s)
        return self._last[name]


def is_replaceable(role: str, code: int, *, has_started: bool, has_ledger: bool, is_over: bool) -> bool:
    """Return whether a process of a role that ended with an exit code can be replaced in the present state of its job.

    A negative code is the number of the signal that killed it.
    """
    if not has_started or is_over or not code:
        return False
    return has_ledger if role == WORKER else code not in DELIBERATE


class Restarter(Protocol):
    """Starts processes of a job again. The supervisor calls it."""

    def plan(self, name: str, code: int, now: float) -> Restart | None:
        """Return when a process that ended with `code` is started again; None: not at all."""
        ...

    def ends_job(self, name: str) -> bool:
        """Return whether the failure of a process, which is not started again, would repeat, so that the job ends."""
        ...

    def start(self, name: str, number: int) -> RunningProcess:
        """Start a process for the `number`-th time again. Raises EchelonError or OSError if that is impossible."""
        ...


class NoRestarts:
    """Never restarts a process."""

    def plan(self, name: str, code: int, now: float) -> Restart | None:
        """Return None."""
        return None

    def ends_job(self, name: str) -> bool:
        """Return False."""
        return False

    def start(self, name: str, number: int) -> RunningProcess:
        """Never called."""
        raise NotImplementedError
