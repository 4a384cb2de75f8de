"""Control messages: between a process and the scheduler."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from echelon.cluster.messages.common import (
    BarrierNumber,
    Departure,
    Member,
    Message,
    Name,
    Pid,
    Rank,
    Slice,
    StoreNumber,
    Text,
)
from echelon.cluster.messages.leases import Count, HeldLedger, SliceWork
from echelon.cluster.placement import Natural

MAX_MEMBERS = 1 << 14  # that a message of a process may list

# --- control: process -> scheduler


class Register(Message, frozen=True):
    """The first message of a process. With rank None the scheduler assigns the lowest free rank."""

    role: Name
    rank: Rank | None
    host: Name
    pid: Pid
    address: Name
    token: Name = ""


class Heartbeat(Message, frozen=True):
    """Sent regularly in both directions, so that each side notices when the other's machine is lost or stopped."""


class Barrier(Message, frozen=True):
    """This worker has reached barrier number `sequence` of a store."""

    sequence: BarrierNumber
    store: StoreNumber = 0


class Leave(Message, frozen=True):
    """This process leaves the job and then closes its connection. `failed`: it leaves because of an error."""

    reason: Text
    failed: bool = False


class Halt(Message, frozen=True):
    """Asks all workers of a store to stop training, for example at a target accuracy. Forwarded to all workers."""

    reason: Text
    store: StoreNumber = 0


class StoreOpened(Message, frozen=True):
    """This worker has created its store number `store`. The numbers count the stores of a worker, from 0."""

    store: StoreNumber


class StoreClosed(Message, frozen=True):
    """A worker has closed a store: nothing in this store waits for it. The scheduler forwards it to all processes.

    Servers free a store when all workers have closed it.
    """

    store: StoreNumber
    rank: Rank


class WorkerExited(Message, frozen=True):
    """Sent by a launcher when a worker process has exited. It matters only if that worker never registered."""

    rank: Rank
    how: Text
    failed: bool


class ServersUnused(Message, frozen=True):
    """Sent by a worker that created a store without servers in a job with servers; forwarded to the servers.

    Such a worker may never register. The time limit for registering does not apply while its connection is open.
    """

    store: Name


class StoreEnding(Message, frozen=True):
    """This worker makes no more pushes to a store, and waits for `StoreEnded`. No barrier of the store waits for it."""

    store: StoreNumber


class StoreJoined(Message, frozen=True):
    """This late worker takes part in the barriers of a store from now on. Answered with `StoreIsAt`."""

    store: StoreNumber


class StoreState(msgspec.Struct, frozen=True, array_like=True):
    """What a worker knows of one of its open stores: barriers that it has reached, and whether it waits for the end.

    takes_part           False for a late worker that has not sent `StoreJoined`
    num_closed_ledgers   ledgers that this worker has closed: it uses the next one, or will
    num_over_ledgers     ledgers of which it knows that they are over for all workers
    """

    number: StoreNumber
    barriers: Natural
    barriers_done: Natural
    ending: bool = False
    halted: Text | None = None
    ledger: HeldLedger | None = None
    takes_part: bool = True
    num_closed_ledgers: Natural = 0
    num_over_ledgers: Natural = 0


class Outcome(msgspec.Struct, frozen=True, array_like=True):
    """What is known of the result of a job that runs: how many workers have finished, and why it is not whole."""

    num_finished: Natural = 0
    not_whole: Text | None = None


class HeldSlice(msgspec.Struct, frozen=True, array_like=True):
    """A slice that a server process stores, as its primary or as its backup. `work`: of the latest epochs."""

    slice: Natural
    is_primary: bool
    in_sync: bool
    work: Annotated[list[SliceWork], Meta(max_length=MAX_MEMBERS)] = []


class Return(Message, frozen=True):
    """The first message on a new connection of a process that has joined before and lost its connection.

    It says what a scheduler that was started again needs: who this process is, and what it knows of the job.
    `num_opened`: how many stores this worker has opened so far. `outcome`: of the last view that it received.
    """

    member: Member
    view: Natural
    members: Annotated[list[Member], Meta(max_length=MAX_MEMBERS)]
    slices: Annotated[list[Slice], Meta(max_length=MAX_MEMBERS)]
    stores: Annotated[list[StoreState], Meta(max_length=MAX_MEMBERS)] = []
    held: Annotated[list[HeldSlice], Meta(max_length=MAX_MEMBERS)] = []
    num_opened: StoreNumber = 0
    outcome: Outcome = Outcome()


class SliceInSync(Message, frozen=True):
    """Sent by the primary of a slice: the new backup now has everything that the primary has acknowledged.

    With `in_sync` False, its state is not that of the primary, and it must not take its place.
    """

    slice: Natural
    backup: Rank
    in_sync: bool = True


class Leaving(Message, frozen=True):
    """This worker was told to end (SIGTERM). If all workers were, the job stops; otherwise `MayLeave` answers."""

    reason: Text


class NotFinite(Message, frozen=True):
    """Sent by a server when a store ends with a value that is NaN or infinite: the result of the job is not whole.

    `worker` and `clock` are those of the first push of this key that was not finite; None if all pushes were finite.
    """

    store: StoreNumber
    key: Text
    worker: Rank | None = None
    clock: Count | None = None

    def __str__(self) -> str:
        since = "" if self.clock is None else f", since clock {self.clock}"
        by = "" if self.worker is None else f", because worker {self.worker} pushed it"
        return f"key {self.key!r} of store {self.store} has NaN or infinity{since}{by}"


class NotWhole(Message, frozen=True):
    """Sent by a worker that knows why the result of the job is not whole: it could not be saved, or has NaN."""

    reason: Text


# --- control: scheduler -> process


class StoreProgress(msgspec.Struct, frozen=True, array_like=True):
    """How far a store of a running job is, for a process that joins it, and the workers that have closed it."""

    number: int
    barriers_done: int
    closed: list[int] = []


class StoreIsAt(Message, frozen=True):
    """Answers `StoreOpened` and `StoreJoined` of a late worker.

    If it does not take part in the barriers of the store yet, `barriers` are done. Otherwise `barriers` have begun
    without it, and its next barrier is the one after them.
    """

    store: int
    barriers: int
    takes_part: bool


class Removed(Message, frozen=True):
    """This process is not in the view any more: it was stopped or cut off. A worker may register again."""

    view: int
    reason: str


class MayLeave(Message, frozen=True):
    """Answers `Leaving`: the other workers continue without this one."""


class Registered(Message, frozen=True):
    """The rank of this process."""

    rank: int


class Refused(Message, frozen=True):
    """This process cannot join the job."""

    reason: str


class Roster(Message, frozen=True):
    """All processes have registered; the job starts. `late`: it runs already, and this process joins it."""

    members: list[Member]
    view: int = 1
    slices: list[Slice] = []
    stores: list[StoreProgress] = []
    late: bool = False
    outcome: Outcome = Outcome()


class View(Message, frozen=True):
    """The living processes after a change, what changed, and why. `workers` are the ranks of the workers.

    Processes return `outcome` to a scheduler that was started again; it means nothing to them.
    """

    number: int
    workers: list[int]
    reason: str
    departure: Departure
    members: list[Member] = []
    slices: list[Slice] = []
    outcome: Outcome = Outcome()


class BarrierDone(Message, frozen=True):
    """All workers of the view that have not closed the store have reached its barrier number `sequence`."""

    sequence: int
    store: int = 0


class StoreEnded(Message, frozen=True):
    """All workers of the view have sent `StoreEnding` or have closed the store: its values do not change any more."""

    store: int


class Finish(Message, frozen=True):
    """All workers have left; servers exit."""


class Abort(Message, frozen=True):
    """The job has failed; every process stops."""

    reason: str
