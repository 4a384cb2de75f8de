"""What all messages share: the limits of their values, and the members of a job."""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec
from msgspec import Meta

from echelon.cluster.placement import MAX_KEYS, Natural

WORKER, SERVER = "worker", "server"

# Processes accept only values within these limits, so that no message makes one loop or fills its memory.
MAX_TEXT = 4000  # characters of a reason; `shorten` cuts longer ones
MAX_STORES = 100_000  # that a worker can create during a job
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
Name = Annotated[str, Meta(max_length=300)]
Rank = Annotated[int, Meta(ge=0, lt=1 << 20)]
Pid = Annotated[int, Meta(ge=0, lt=1 << 31)]
StoreNumber = Annotated[int, Meta(ge=0, lt=MAX_STORES)]
KeyNumbers = Annotated[list[Natural], Meta(max_length=MAX_KEYS)]
Priority = Annotated[int, Meta(ge=-(1 << 31), lt=1 << 31)]
BarrierNumber = Annotated[int, Meta(ge=1, lt=1 << 53)]


def shorten(text: str) -> str:
    """Return a text that fits into a control message. Of a longer one, the beginning and the end stay."""
    half = MAX_TEXT // 2 - 1
    return text if len(text) <= MAX_TEXT else f"{text[:half]}…{text[-half:]}"


class Departure(enum.Enum):
    """What changed a view: how a process left the job, or came to it."""

    LEFT = "left"  # it announced that it finished
    FAILED = "failed"  # it announced an error
    DIED = "died"  # its connection closed without an announcement, or it sent no heartbeat in time
    JOINED = "joined"  # a new process, or one that was started again
    RETURNED = "returned"  # a process that had been removed while it was stopped or cut off
    MOVED = "moved"  # no process left or came: a slice is stored by another server now


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The base class of all messages."""


class Member(msgspec.Struct, frozen=True, array_like=True):
    """A process of the job, as it registered with the scheduler. `token` is random, and no other process has it."""

    role: Name
    rank: Rank
    host: Name
    pid: Pid
    address: Name = ""
    token: Name = ""

    @property
    def endpoint_name(self) -> str:
        """How the names of its connections to servers begin, so that they cannot be another process's."""
        return f"{self.role}-{self.rank}.{self.token}"

    def __str__(self) -> str:
        return f"{self.role} {self.rank} (pid {self.pid} on {self.host})"


class Slice(msgspec.Struct, frozen=True, array_like=True):
    """Which server processes store a slice, the part of all keys that is one server's at the start of the job.

    primary   the rank of the server that answers for the slice; None: it was lost, and a new one has not come yet
    backup    the rank of the server that has a copy; None: there is none
    in_sync   whether the backup has everything that the primary has acknowledged
    """

    primary: Rank | None
    backup: Rank | None = None
    in_sync: bool = False


Position = Annotated[int, Meta(ge=0, lt=1 << 53)]
Interval = tuple[Position, Position]  # positions from the first one to before the second one
Intervals = Annotated[list[Interval], Meta(max_length=1 << 20)]


class Work(msgspec.Struct, frozen=True, array_like=True):
    """What one step of one worker trains: the positions [start, stop) of the order of an epoch of a store's ledger."""

    epoch: Natural
    start: Position
    stop: Position
    ledger: Natural = 0
