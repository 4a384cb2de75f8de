"""Data messages: between a worker and a server, and between servers. Frames with tensors may follow them."""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec
from msgspec import Meta

from echelon.cluster.messages.common import KeyNumbers, Message, Name, Priority, Rank, StoreNumber, Work
from echelon.cluster.placement import MAX_DIMENSIONS, MAX_KEYS, DtypeName, KeySpec, Natural, Segment, Slot

MAX_STEP_WORK = 256  # intervals of samples in one step

# --- data: worker -> server


class Configure(Message, frozen=True):
    """The first request of a connection: the worker's rank, its store, which slice it wants, and the kind of store.

    A server adopts the first worker's kind and compares those of later workers with it. All requests that follow on
    this connection are for this store. `late`: the worker joins a job that is running, and takes over the groups of the
    others, and their bound if it has none; answered with `Configured`.
    """

    id: Natural
    rank: Rank
    store: Name
    staleness: Natural | None
    groups: list[list[Rank]] | None
    lr_scale: Name
    number: StoreNumber = 0
    slice: Natural = 0
    late: bool = False


class Place(Message, frozen=True):
    """Asks server 0 to assign places to keys."""

    id: Natural
    specs: Annotated[list[KeySpec], Meta(max_length=MAX_KEYS)]


class Attach(Message, frozen=True):
    """A segment of the worker's shared memory: where its gradients are, and where servers write its weights.

    `log`: where this server notes what it writes to all segments.
    """

    id: Natural
    segment: Segment
    gradients: Name
    weights: Name
    log: Name = ""


class Init(Message, frozen=True):
    """Creates keys with their first values, which are in frames or in the worker's shared weights."""

    id: Natural
    segments: Annotated[list[Segment], Meta(max_length=MAX_KEYS)]
    slots: Annotated[list[Slot], Meta(max_length=MAX_KEYS)]
    framed: bool
    overwrite: bool = False  # existing keys take the values too


_Plain = float | int | bool | Name | None
Setting = _Plain | Annotated[list[_Plain], Meta(max_length=256)]
Settings = Annotated[dict[Name, Setting], Meta(max_length=256)]


NO_OPTIMIZER = -1  # the group of keys with plain values: the sum of pushes replaces the value


class OptimizerSpec(msgspec.Struct, frozen=True):
    """An optimizer as a name and numbers: the options of each parameter group, and the group of each key.

    Workers clip to `max_grad_norm` together, so it must be the same on all of them.
    """

    name: Name
    groups: Annotated[list[Settings], Meta(max_length=MAX_KEYS)]
    members: dict[str, int] = {}
    max_grad_norm: float | None = None

    def group_of(self, key: str) -> int:
        """Return the parameter group of a key. Without `members`, all keys are in group 0.

        With them, as a Trainer's optimizer has, a key that is not listed is not a parameter: it has no optimizer.
        """
        return self.members.get(key, NO_OPTIMIZER) if self.members else 0


class SetOptimizer(Message, frozen=True):
    """The optimizer for the servers. A server adopts the first one and compares later ones with it."""

    id: Natural
    spec: OptimizerSpec


class PushHeader(msgspec.Struct, frozen=True, array_like=True):
    """What a worker says about the gradients of a push; the same in the messages to all servers.

    samples      the weight of this worker in the average over workers; None: gradients are summed without weights
    lrs          the learning rate of each parameter group; empty: those of SetOptimizer
    settings     of each parameter group, the settings other than lr that differ from those of SetOptimizer; None: none
    absent       if `samples` is 0: the samples in the worker's batch, of which none gives these keys a gradient
    factor_rank  if above 0, the push carries the two factors of one key's gradient, which have this rank. Every server
                 needs both factors whole, whichever part of the key it stores
    more         another push of the same step follows within milliseconds, so servers should stay awake
    halt         this worker asks all workers to stop; answers to this clock and to later ones carry the request
    gated        the round is applied only after ApplyScaled, when the norm of all gradients is known
    edits        identifies the weights that this worker's loop has edited since the last step, the same in all pushes
                 of a round; 0: none
    work         the samples of the step, if a ledger gave them; empty: none
    """

    samples: float | None = None
    lrs: Annotated[list[float], Meta(max_length=MAX_KEYS)] = []
    settings: Annotated[list[Settings], Meta(max_length=MAX_KEYS)] | None = None
    absent: float = 0.0
    factor_rank: Natural = 0
    more: bool = False
    halt: bool = False
    gated: bool = False
    edits: int = 0
    work: Annotated[list[Work], Meta(max_length=MAX_STEP_WORK)] = []


class Push(Message, frozen=True):
    """The gradients of some keys at one clock.

    pull         the answer carries the new weights
    framed       gradients and weights travel as frames instead of through shared memory
    rows         if given, the keys are row-sparse, and the push carries this many rows of each: a frame with the
                 numbers of the rows on this server (int64, ascending), then a frame with their values
    since        for each row-sparse key, the version of the rows that this worker has: the answer brings later ones
    priority     where messages wait for the link, the push and its answer overtake those of a lower priority
    """

    id: Natural
    clock: Natural
    keys: KeyNumbers
    header: PushHeader
    pull: bool
    framed: bool
    rows: KeyNumbers = []
    since: list[int] = []
    priority: Priority = 0


class Pull(Message, frozen=True):
    """Asks for the weights of some keys at this worker's clock. `framed`: as frames, not through shared memory."""

    id: Natural
    clock: Natural
    keys: KeyNumbers
    framed: bool
    priority: Priority = 0


FROM_NOW = -1


class PullRows(Message, frozen=True):
    """Asks for some rows of a row-sparse key at this worker's clock. One frame has their numbers on this server."""

    id: Natural
    clock: Natural
    key: Natural


class PullChanges(Message, frozen=True):
    """Asks for the rows of row-sparse keys that are newer than `since`, the versions that this worker has.

    `FROM_NOW` asks for none, and for the version that the server has: later requests name it.
    """

    id: Natural
    clock: Natural
    keys: KeyNumbers
    since: list[int]


class PutRows(Message, frozen=True):
    """Overwrites adjacent rows of a row-sparse key, from number `start` on this server on, by the values in a frame."""

    id: Natural
    key: Natural
    start: Natural


class MeasureNorm(Message, frozen=True):
    """Asks for the squared norm of the sum of a gated round over some keys. The answer waits for the whole round.

    With `max_norm`, the server also applies the round, clipped to this norm: it stores all keys of the round.
    """

    id: Natural
    clock: Natural
    keys: KeyNumbers
    max_norm: float | None = None


class ApplyScaled(Message, frozen=True):
    """Applies a gated round of some keys, with the sum of the gradients times `scale`. The first one of a round counts.

    All workers of a group send it, with equal scales, so that the round does not depend on one of them.
    """

    id: Natural
    clock: Natural
    keys: KeyNumbers
    scale: float


class Retire(Message, frozen=True):
    """This worker will not push again: others stop waiting for it. It can still pull."""

    id: Natural


class Pause(Message, frozen=True):
    """This worker waits in a barrier: until it resumes, the rounds of others do not wait for it. It can still pull."""

    id: Natural


class Resume(Message, frozen=True):
    """The wait is over: this worker pushes again. Answered with `Resumed` when all of `workers` that waited resume.

    No worker therefore pushes before all of them take part again.
    """

    id: Natural
    workers: Annotated[list[Rank], Meta(max_length=MAX_KEYS)] = []


class Join(Message, frozen=True):
    """This worker takes part in all keys of the store from clock `first` on. None: it asks for the clocks.

    `firsts`: the first clocks of keys that others push less often. Answered with `Joined`.
    """

    id: Natural
    first: Natural | None = None
    firsts: dict[Natural, Natural] = {}


class Part(enum.Enum):
    """How a worker takes part in the rounds of a store."""

    ACTIVE = "active"
    PAUSED = "paused"  # it waits for others
    RETIRED = "retired"  # it has finished, and may pull
    LATE = "late"  # it has not joined the rounds yet


GroupClocks = Annotated[dict[Natural, Natural], Meta(max_length=1 << 20)]


class Contents(msgspec.Struct, frozen=True, array_like=True):
    """Which updates the weights of some keys contain: how many there are, and the rounds of every group.

    `clocks` has the number of applied rounds by group, also of groups whose workers have left. With `before`, a server
    died while it wrote the weights: some elements are new, the others have that version and those rounds.
    """

    version: Natural
    clocks: GroupClocks
    keys: KeyNumbers = []  # in an answer: none, if it is about all keys of its request
    before: tuple[Natural, GroupClocks] | None = None

    @property
    def complete_version(self) -> int:
        """The version that all elements have at least."""
        return self.version if self.before is None else self.before[0]


UNREAD = Contents(0, {})  # of weights that a worker has not read yet


class Offer(Message, frozen=True):
    """What a worker has of a slice whose server was lost, for the new one. Frames have the weights of its dense keys.

    part        how the worker took part in the rounds
    answered    for each slot, how many rounds of pushes of this worker were answered
    contents    what the weights contain, as the lost server said; keys without an entry were not read
    joined      for each slot, the clock from which on it takes part, if it has joined the rounds of others; else 0
    norm        the last norm of a gated round that the lost server told this worker: clock, keys, squared norm
    """

    id: Natural
    segments: Annotated[list[Segment], Meta(max_length=MAX_KEYS)]
    slots: Annotated[list[Slot], Meta(max_length=MAX_KEYS)]
    optimizer: OptimizerSpec | None
    answered: KeyNumbers
    contents: Annotated[list[Contents], Meta(max_length=MAX_KEYS)]
    joined: KeyNumbers = []
    part: Part = Part.ACTIVE
    norm: tuple[Natural, KeyNumbers, float] | None = None


class Gather(Message, frozen=True):
    """A worker's part of values that workers exchange. One frame with the value follows. Sent to server 0.

    Parts are exchanged with those of the same `about`, so that a worker that joins while others exchange something else
    does not disturb them.
    """

    id: Natural
    about: Name = ""


class GiveValues(Message, frozen=True):
    """What a worker that joins the job needs besides the keys, as frames: a copy of this worker's. Sent to server 0.

    `view`: the number of the view that this worker has received.
    """

    id: Natural
    view: Natural


class TakeValues(Message, frozen=True):
    """Asks for what `GiveValues` brought from this view or a later one on. `ValuesGiven` answers when it is there."""

    id: Natural
    view: Natural


class GetStates(Message, frozen=True):
    """Asks for the optimizer state of all keys of this server."""

    id: Natural


class StateEntry(msgspec.Struct, frozen=True, array_like=True):
    """An optimizer state of a key, whose values are in a frame. `start`: it is a part of the key, from that element.

    `is_number`: an optimizer class keeps it as a number of Python, not as a tensor.
    """

    key: Natural
    name: Name
    dtype: DtypeName
    shape: Annotated[tuple[Natural, ...], Meta(max_length=MAX_DIMENSIONS)]
    start: Natural | None = None
    is_number: bool = False


class PutStates(Message, frozen=True):
    """Restores optimizer states: one frame for each entry. Keys without entries are those that were never updated."""

    id: Natural
    entries: Annotated[list[StateEntry], Meta(max_length=8 * MAX_KEYS)]


class Ask(Message, frozen=True):
    """Asks for the status of request `about`. Sent when its answer is late."""

    id: Natural
    about: Natural


# --- data: server -> server


class Replicate(Message, frozen=True):
    """One input of a shard, sent by the primary of a slice to its backup. The frames of the input follow.

    `id` numbers the inputs of a slice. `body` is the request of `worker` as it arrived, or one of the three below.
    """

    id: Natural
    slice: Natural
    store: StoreNumber
    worker: Rank
    body: bytes


class Replicated(Message, frozen=True):
    """Answers `Replicate`, and all before it: the backup has carried them out. `refused`: this one was an error."""

    id: Natural
    slice: Natural
    refused: bool = False


class OpenShard(Message, frozen=True):
    """The first input of a shard: the workers that take part, by rank, and the token of each one's process."""

    id: Natural
    workers: Annotated[dict[Rank, Name], Meta(max_length=1 << 20)]


class Restore(Message, frozen=True):
    """An input of a shard: its whole state, for a new backup. `state` has the numbers; frames have all tensors."""

    id: Natural
    config: Configure
    optimizer: OptimizerSpec | None
    segments: Annotated[list[Segment], Meta(max_length=MAX_KEYS)]
    slots: Annotated[list[Slot], Meta(max_length=MAX_KEYS)]
    entries: Annotated[list[StateEntry], Meta(max_length=8 * MAX_KEYS)]
    state: bytes


class Came(Message, frozen=True):
    """An input of a shard: the worker has joined the job, for the first time or again. `token`: of its process."""

    id: Natural
    token: Name = ""


class Gone(Message, frozen=True):
    """An input of a shard: the worker has left the job, or has closed the store. `view`: in which it has."""

    id: Natural
    closed: bool
    view: Natural = 0


# --- data: server -> worker


class Placed(Message, frozen=True):
    """The slots of the requested keys, and all segments so far."""

    id: int
    segments: list[Segment]
    slots: list[Slot]


class Configured(Message, frozen=True):
    """Answers the `Configure` of a worker that joins: the groups of the store, and its bound."""

    id: int
    groups: list[list[int]] | None
    staleness: int | None = None


class Resumed(Message, frozen=True):
    """The keys of this server, and the clock of the worker's next push of each."""

    id: int
    keys: list[int]
    clocks: list[int]


class Joined(Message, frozen=True):
    """Answers `Join`. `clocks`: unless it was accepted, the clock from which on the worker may join, by key."""

    id: int
    accepted: bool
    clocks: dict[int, int] = {}


class Recovering(Message, frozen=True):
    """Answers `Configure`: this server is new, and needs an `Offer` of every worker."""

    id: int


class Done(Message, frozen=True):
    """The request is complete. The weights are in the worker's shared memory or in the frames that follow.

    Of row-sparse keys, one frame has the version and the number of rows of each key (int64). Then each key has a frame
    with the numbers of its rows on this server and a frame with their values.

    `staleness`: updates by others between the worker's last read and this push. `rounds_ahead`: of the slowest active
    worker when the weights were read; SSP and GSP bound it. `notice`: what the worker should warn its user about.
    `held_s`: the seconds from the arrival of the request to this answer. `contents`: which updates the weights contain;
    keys that differ in this have an entry each.
    """

    id: int
    version: int = 0
    staleness: int = 0
    halt: bool = False
    rounds_ahead: int = 0
    notice: str = ""
    held_s: float = 0.0
    contents: list[Contents] = []


class SquaredNorm(Message, frozen=True):
    """The squared norm of a round on this server. It is the same number for all workers of a group."""

    id: int
    square: float


class Gathered(Message, frozen=True):
    """The parts of all workers that took part in a round: their ranks, and one frame for each."""

    id: int
    ranks: list[int]


class ValuesGiven(Message, frozen=True):
    """Answers `TakeValues`. The frames follow."""

    id: int


class Failed(Message, frozen=True):
    """The request was rejected and changed nothing. `not_in_view`: because the worker is not in the current view."""

    id: int
    reason: str
    not_in_view: bool = False


class States(Message, frozen=True):
    """Optimizer states: one frame for each entry."""

    id: int
    entries: list[StateEntry]


class Status(Message, frozen=True):
    """`known` False: the request never arrived, send it again. Otherwise `waiting` names the workers it waits for."""

    id: int
    about: int
    known: bool
    waiting: str
