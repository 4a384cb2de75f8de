"""Faults that a process does to itself when it reaches a named point, for tests.

A fault is addressed by role, rank, clock, point and start of the process. `Faults` holds those of one process: it finds
the fault that a point fires, appends a line to `faults.jsonl` of the run first, so that a test can prove that the fault
happened, and then acts. The points are calls of `fault_points.fault_point`; those of messages are in
`transport/faulty.py`, which changes the messages of a process.
"""

from __future__ import annotations

import enum
import errno
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from echelon.errors import UsageError

FILE_NAME = "faults.jsonl"


class Kind(enum.StrEnum):
    """What happens."""

    CRASH = "crash"  # SIGKILL
    STOP = "stop"  # SIGSTOP for `seconds`
    DELAY = "delay"  # the process, or one message, is late by `seconds`
    DROP = "drop"  # a message is lost
    DUPLICATE = "duplicate"  # a message arrives twice
    REPLAY = "replay"  # a message arrives again after the next one of its kind
    REORDER = "reorder"  # a message arrives after the next one to the same process
    CUT = "cut"  # the connection is closed after a message was sent
    PARTITION = "partition"  # requests and answers from and to `peers` are lost for `seconds`
    SLOW = "slow"  # messages leave at `bytes_per_s` for `seconds`
    DISK_FULL = "disk-full"  # a write of a file in the folder `below` fails with ENOSPC
    BIT_FLIP = "bit-flip"  # one bit of the file that was just written changes
    CALL = "call"  # only `on_fire` is called


MESSAGE_KINDS = (Kind.DROP, Kind.DUPLICATE, Kind.REPLAY, Kind.REORDER, Kind.DELAY, Kind.CUT)
POINT_KINDS = tuple(kind for kind in Kind if kind not in MESSAGE_KINDS or kind == Kind.DELAY)


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One fault and its address. None, or an empty point, means any."""

    kind: Kind
    role: str = "worker"
    rank: int | None = None
    clock: int | None = None
    point: str = ""
    after: int = 0  # how often the address is reached before the fault fires
    times: int = 1
    restarts: int = 0  # which start of the process: 0 is the first, so that a restarted process lives
    seconds: float = 0.0
    peers: tuple[str, ...] = ()  # such as "server 1"
    bytes_per_s: float = 0.0
    below: str = ""

    def matches(self, role: str, rank: int | None, point: str, clock: int | None, path: str) -> bool:
        """Return whether a process that reaches a point is the one that this fault is for."""
        return (
            self.role == role
            and self.point in ("", point)
            and (self.rank is None or self.rank == rank)
            and (self.clock is None or self.clock == clock)
            and (not self.below or Path(path).is_relative_to(self.below))
        )


def parse(text: str) -> list[Fault]:
    """Return the faults of a JSON list, the value of ECHELON_FAULTS."""
    try:
        return msgspec.json.decode(text, type=list[Fault])
    except msgspec.DecodeError as error:
        raise UsageError(
            f"ECHELON_FAULTS is not a JSON list of faults: {error}; the kinds are {', '.join(Kind)}"
        ) from error


@dataclass(slots=True)
class _Left:
    fault: Fault
    passes: int  # how often its address is reached before it fires
    times: int  # how often it fires from then on


class Faults:
    """The faults of one process, or of all processes of a job that runs in one process. Thread-safe."""

    def __init__(
        self,
        faults: Iterable[Fault],
        log: Path | None = None,
        role: str = "worker",
        rank: int | None = None,
        *,
        restarts: int = 0,
        on_fire: Callable[[Fault], None] = lambda fault: None,
    ) -> None:
        """`log`: the file that gets a line for each fault that fires."""
        self.role, self.rank = role, rank
        self.fired: list[Fault] = []
        self._log = log
        self._on_fire = on_fire
        self._left = [_Left(fault, fault.after, fault.times) for fault in faults if fault.restarts == restarts]
        self._lock = threading.Lock()
        self._cut: dict[str, float] = {}  # a peer, and until when messages from and to it are lost
        self._slow: tuple[float, float] = (0.0, 0.0)  # bytes per second, and until when

    def take(
        self,
        point: str,
        clock: int | None = None,
        kinds: Collection[Kind] = POINT_KINDS,
        *,
        role: str | None = None,
        rank: int | None = None,
        path: str = "",
    ) -> Fault | None:
        """Return the fault that fires at a point, and record it. Role and rank are this process's unless given."""
        role, rank = role or self.role, self.rank if rank is None else rank
        with self._lock:
            fault = self._match(role, rank, point, clock, kinds, path)
            if fault is None:
                return None
            self.fired.append(fault)
            self._record(fault, role, rank, point, clock)
        self._on_fire(fault)
        return fault

    def _match(
        self, role: str, rank: int | None, point: str, clock: int | None, kinds: Collection[Kind], path: str
    ) -> Fault | None:
        for left in self._left:
            if left.fault.kind not in kinds or not left.fault.matches(role, rank, point, clock, path):
                continue
            if left.passes:
                left.passes -= 1
                continue
            left.times -= 1
            if not left.times:
                self._left.remove(left)
            return left.fault
        return None

    def _record(self, fault: Fault, role: str, rank: int | None, point: str, clock: int | None) -> None:
        if self._log is not None:
            line = {"at": time.time(), "kind": fault.kind, "role": role, "rank": rank, "pid": os.getpid()}
            line |= {"clock": clock, "point": point}
            with self._log.open("a") as file:  # one short write to the end: lines of several processes do not mix
                file.write(json.dumps(line) + "\n")

    def reach(self, point: str, clock: int | None = None, path: str = "") -> None:
        """Do what the fault of this point says, if there is one."""
        fault = self.take(point, clock, path=path)
        if fault is None:
            return
        match fault.kind:
            case Kind.CRASH:
                os.kill(os.getpid(), signal.SIGKILL)
            case Kind.STOP:
                _stop(fault.seconds)
            case Kind.DELAY:
                time.sleep(fault.seconds)
            case Kind.PARTITION:
                self._cut |= dict.fromkeys(fault.peers, time.monotonic() + fault.seconds)
            case Kind.SLOW:
                self._slow = fault.bytes_per_s, time.monotonic() + fault.seconds
            case Kind.DISK_FULL:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
            case Kind.BIT_FLIP:
                flip_bit(Path(path))

    def is_cut(self, peer: str) -> bool:
        """Return whether messages from and to a peer are lost now."""
        return time.monotonic() < self._cut.get(peer, 0.0)

    def sending_s(self, num_bytes: int) -> float:
        """Return how long a message takes to leave this process now, because its link is slow."""
        bytes_per_s, until = self._slow
        return num_bytes / bytes_per_s if time.monotonic() < until else 0.0


def flip_bit(path: Path, position: int | None = None) -> None:
    """Change one bit of a file, in the byte at `position`, or in the middle."""
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        at = size // 2 if position is None else position
        file.seek(at)
        value = file.read(1)[0]
        file.seek(at)
        file.write(bytes([value ^ 1]))


def _stop(seconds: float) -> None:
    """Stop this process. Another one, which needs nothing of this one, lets it continue."""
    resume = f"sleep {seconds}; kill -CONT {os.getpid()}"
    subprocess.Popen(["/bin/sh", "-c", resume], stdin=subprocess.DEVNULL, start_new_session=True)
    os.kill(os.getpid(), signal.SIGSTOP)
