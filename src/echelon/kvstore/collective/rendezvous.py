"""How the processes of a group find each other: at a TCP store, which the first of them hosts.

Whoever waits says so every `stall_seconds`, and for whom; after `timeout_s` that is the error. The waiting is done
here, not by torch, whose waits can neither be interrupted nor watched, and fill the screen when they miss a deadline.
"""

from __future__ import annotations

import os
import re
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_futures
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from echelon.errors import JobError

POLL_S = 0.02
KNOCK_S = 5.0
_meetings: Counter[tuple[str, int]] = Counter()  # how often this process has met others at an address


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where a group meets and who this process is in it. `listen_fd`: the address as a socket, for rank 0."""

    rank: int
    size: int
    host: str
    port: int
    names: Sequence[str]  # what to call the members in an error
    listen_fd: int | None = None
    hosted: bool = False  # somebody else has the store at this address already
    timeout_s: float = 600.0
    stall_seconds: float = 10.0

    @property
    def me(self) -> str:
        """What to call this process."""
        return self.names[self.rank]

    @property
    def where(self) -> str:
        """The address to show."""
        return f"{self.host}:{self.port}"

    @property
    def hosting(self) -> bool:
        """Whether this process has the store."""
        return self.rank == 0 and not self.hosted


class _Patience:
    """A process's wait for the others: how much of it is left, and what is said meanwhile."""

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting
        self._began = time.monotonic()
        self._end = self._began + meeting.timeout_s
        self._tell_at = self._began + meeting.stall_seconds

    @property
    def left_s(self) -> float:
        """Until the deadline; never quite nothing, which torch takes for ever."""
        return max(self._end - time.monotonic(), 0.1)

    @property
    def over(self) -> bool:
        """Whether the deadline has passed."""
        return time.monotonic() > self._end

    @property
    def due(self) -> bool:
        """Whether it is time to say something."""
        return time.monotonic() >= self._tell_at

    def tell(self, whom: str) -> None:
        """Say that this process waits."""
        self._tell_at += self._meeting.stall_seconds
        waited = time.monotonic() - self._began
        what = f"{self._meeting.me} (pid {os.getpid()}) has waited {waited:.1f} s for {whom}"
        limit = f"{self._meeting.timeout_s:g} s (ECHELON_TIMEOUT)"
        print(f"{what}, and waits up to {limit}", file=sys.stderr, flush=True)


def meet(meeting: Meeting) -> Store:
    """Host the store or find it, and wait until all are there."""
    _meetings[meeting.host, meeting.port] += 1
    prefix = f"meeting {_meetings[meeting.host, meeting.port]}"
    patience = _Patience(meeting)
    store = _opened(meeting, prefix, patience)
    keys = {f"here/{rank}": name for rank, name in enumerate(meeting.names)}
    try:
        store.set(f"here/{meeting.rank}", "")
        _wait_for(meeting, store, keys, patience)
    except JobError:
        raise
    except RuntimeError as error:
        raise _host_is_gone(meeting) from error
    return store


def gist(error: RuntimeError) -> str:
    """The first sentence of what torch says, without the place in its sources."""
    return re.sub(r"^\[\S+\] ", "", str(error)).splitlines()[0].split(". ")[0]


def _opened(meeting: Meeting, prefix: str, patience: _Patience) -> Store:
    """This meeting's store. One that breaks off is the last meeting's, whose host is about to go."""
    while True:
        store = PrefixStore(prefix, _connected(meeting, patience))
        try:
            if meeting.rank == 0:
                store.set("open", "")
            _wait_for(meeting, store, {"open": meeting.names[0]}, patience)
            return store
        except JobError:
            raise
        except RuntimeError as error:
            if patience.over:
                raise _host_is_gone(meeting) from error


def _connected(meeting: Meeting, patience: _Patience) -> Store:
    """The store at the address. The host may listen and not answer yet, and torch would then wait without an end."""
    if not meeting.hosting:
        _reach(meeting, patience)
    opening = _in_thread(lambda: _open(meeting, patience.left_s))
    while not wait_for_futures([opening], POLL_S).done:
        if patience.over:
            raise _no_host(meeting, f"it listens, but has not answered in {meeting.timeout_s:g} s")
        if patience.due:
            patience.tell(_the_host(meeting))
    try:
        return opening.result()
    except RuntimeError as error:
        raise _no_host(meeting, gist(error)) from error


def _reach(meeting: Meeting, patience: _Patience) -> None:
    """Wait until somebody listens: torch would fill the screen while it waits for that."""
    while True:
        try:
            socket.create_connection((meeting.host, meeting.port), min(KNOCK_S, patience.left_s)).close()
            return
        except OSError as error:
            if patience.over:
                raise _no_host(meeting, str(error)) from error
            if patience.due:
                patience.tell(f"{_the_host(meeting)} ({error})")
        time.sleep(POLL_S)


def _open(meeting: Meeting, timeout_s: float) -> Store:
    fd: dict[str, Any] = {}
    if meeting.hosting and meeting.listen_fd is not None:
        fd["master_listen_fd"] = _taken(meeting.listen_fd)
    timeout = timedelta(seconds=timeout_s)
    return TCPStore(meeting.host, meeting.port, None, meeting.hosting, timeout, wait_for_workers=False, **fd)


def _wait_for(meeting: Meeting, store: Store, keys: Mapping[str, str], patience: _Patience) -> None:
    """Until every key is in the store; each has a member's name."""

    def missing() -> str:
        return ", ".join(name for key, name in keys.items() if not store.check([key]))

    while not store.check(list(keys)):
        if patience.over:
            raise JobError(f"{meeting.me}: {missing()} did not come to {meeting.where} in {meeting.timeout_s:g} s")
        if patience.due:
            patience.tell(f"{missing()} to come to {meeting.where}")
        time.sleep(POLL_S)


def _in_thread(make: Callable[[], Store]) -> Future[Store]:
    """Called by a thread that nobody has to wait for, not even at the end of the process."""
    future: Future[Store] = Future()

    def body() -> None:
        try:
            future.set_result(make())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=body, name="echelon-meeting", daemon=True).start()
    return future


def _the_host(meeting: Meeting) -> str:
    return f"{meeting.names[0]}, who hosts the meeting at {meeting.where}"


def _no_host(meeting: Meeting, why: str) -> JobError:
    who = "this process cannot listen" if meeting.hosting else f"{meeting.names[0]}, who hosts the meeting, is not"
    return JobError(f"{meeting.me}: {who} at {meeting.where} ({why})")


def _host_is_gone(meeting: Meeting) -> JobError:
    return JobError(f"{meeting.me}: {_the_host(meeting)}, is gone")


def _taken(fd: int) -> int:
    """A copy of an inherited socket, which torch closes when it is done; the original serves the next time."""
    with socket.socket(fileno=fd) as inherited:
        copy = inherited.dup()
        inherited.detach()
    return copy.detach()
