"""All messages between processes, and the functions that encode and decode them.

Control messages go between a process and the scheduler. Data messages go between a worker and a server; raw frames
with tensors follow them, unless the tensors are in shared memory. A message is encoded as a MessagePack array that
starts with the message's type; nothing is pickled. Each data request carries an id, and its answer repeats the id.
"""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec
from msgspec import Meta

from echelon.cluster.placement import MAX_DIMENSIONS, MAX_KEYS, DtypeName, KeySpec, Natural, Segment, Slot
from echelon.errors import JobError

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
    """How a process left the job."""

    LEFT = "left"  # it announced that it finished
    FAILED = "failed"  # it announced an error
    DIED = "died"  # its connection closed without an announcement, or it sent no heartbeat in time


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


class Member(msgspec.Struct, frozen=True, array_like=True):
    """A process of the job, as it registered with the scheduler. `token` is random, and no other process has it."""

    role: str
    rank: int
    host: str
    pid: int
    address: str = ""
    token: str = ""

    @property
    def endpoint_name(self) -> str:
        """How the names of its connections to servers begin, so that they cannot be another process's."""
        return f"{self.role}-{self.rank}.{self.token}"

    def __str__(self) -> str:
        return f"{self.role} {self.rank} (pid {self.pid} on {self.host})"


# --- control: process -> scheduler


class Register(_Message, frozen=True):
    """The first message of a process. With rank None the scheduler assigns the lowest free rank."""

    role: Name
    rank: Rank | None
    host: Name
    pid: Pid
    address: Name
    token: Name = ""


class Heartbeat(_Message, frozen=True):
    """Sent regularly, so that the scheduler notices when a machine is lost."""


class Barrier(_Message, frozen=True):
    """This worker has reached barrier number `sequence` of a store."""

    sequence: BarrierNumber
    store: StoreNumber = 0


class Leave(_Message, frozen=True):
    """This process leaves the job and then closes its connection. `failed`: it leaves because of an error."""

    reason: Text
    failed: bool = False


class Halt(_Message, frozen=True):
    """Asks all workers of a store to stop training, for example at a target accuracy. Forwarded to all workers."""

    reason: Text
    store: StoreNumber = 0


class StoreOpened(_Message, frozen=True):
    """This worker has created its store number `store`. The numbers count the stores of a worker, from 0."""

    store: StoreNumber


class StoreClosed(_Message, frozen=True):
    """A worker has closed a store: nothing in this store waits for it. The scheduler forwards it to all processes.

    Servers free a store when all workers have closed it.
    """

    store: StoreNumber
    rank: Rank


class WorkerExited(_Message, frozen=True):
    """Sent by a launcher when a worker process has exited. It matters only if that worker never registered."""

    rank: Rank
    how: Text
    failed: bool


class ServersUnused(_Message, frozen=True):
    """Sent by a worker that created a store without servers in a job with servers; forwarded to the servers.

    Such a worker may never register. The time limit for registering does not apply while its connection is open.
    """

    store: Name


class StoreEnding(_Message, frozen=True):
    """This worker makes no more pushes to a store, and waits for `StoreEnded`. No barrier of the store waits for it."""

    store: StoreNumber


# --- control: scheduler -> process


class Registered(_Message, frozen=True):
    """The rank of this process."""

    rank: int


class Refused(_Message, frozen=True):
    """This process cannot join the job."""

    reason: str


class Roster(_Message, frozen=True):
    """All processes have registered; the job starts."""

    members: list[Member]


class View(_Message, frozen=True):
    """The workers that remain after one left the job, why it left, and how."""

    number: int
    workers: list[int]
    reason: str
    departure: Departure


class BarrierDone(_Message, frozen=True):
    """All workers of the view that have not closed the store have reached its barrier number `sequence`."""

    sequence: int
    store: int = 0


class StoreEnded(_Message, frozen=True):
    """All workers of the view have sent `StoreEnding` or have closed the store: its values do not change any more."""

    store: int


class Finish(_Message, frozen=True):
    """All workers have left; servers exit."""


class Abort(_Message, frozen=True):
    """The job has failed; every process stops."""

    reason: str


# --- data: worker -> server


class Configure(_Message, frozen=True):
    """The first request of a connection: the worker's rank, the number of its store, and what kind of store it is.

    A server adopts the first worker's kind and compares those of later workers with it. All requests that follow on
    this connection are for this store.
    """

    id: Natural
    rank: Rank
    store: Name
    staleness: Natural | None
    groups: list[list[Rank]] | None
    lr_scale: Name
    number: StoreNumber = 0


class Place(_Message, frozen=True):
    """Asks server 0 to assign places to keys."""

    id: Natural
    specs: Annotated[list[KeySpec], Meta(max_length=MAX_KEYS)]


class Attach(_Message, frozen=True):
    """A segment of the worker's shared memory: where its gradients are, and where servers write its weights."""

    id: Natural
    segment: Segment
    gradients: Name
    weights: Name


class Init(_Message, frozen=True):
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


class SetOptimizer(_Message, frozen=True):
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


class Push(_Message, frozen=True):
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


class Pull(_Message, frozen=True):
    """Asks for the weights of some keys at this worker's clock. `framed`: as frames, not through shared memory."""

    id: Natural
    clock: Natural
    keys: KeyNumbers
    framed: bool
    priority: Priority = 0


FROM_NOW = -1


class PullRows(_Message, frozen=True):
    """Asks for some rows of a row-sparse key at this worker's clock. One frame has their numbers on this server."""

    id: Natural
    clock: Natural
    key: Natural


class PullChanges(_Message, frozen=True):
    """Asks for the rows of row-sparse keys that are newer than `since`, the versions that this worker has.

    `FROM_NOW` asks for none, and for the version that the server has: later requests name it.
    """

    id: Natural
    clock: Natural
    keys: KeyNumbers
    since: list[int]


class PutRows(_Message, frozen=True):
    """Overwrites adjacent rows of a row-sparse key, from number `start` on this server on, by the values in a frame."""

    id: Natural
    key: Natural
    start: Natural


class MeasureNorm(_Message, frozen=True):
    """Asks for the squared norm of the sum of a gated round over some keys. The answer waits for the whole round.

    With `max_norm`, the server also applies the round, clipped to this norm: it stores all keys of the round.
    """

    id: Natural
    clock: Natural
    keys: KeyNumbers
    max_norm: float | None = None


class ApplyScaled(_Message, frozen=True):
    """Applies a gated round of some keys, with the sum of the gradients times `scale`. The first one of a round counts.

    All workers of a group send it, with equal scales, so that the round does not depend on one of them.
    """

    id: Natural
    clock: Natural
    keys: KeyNumbers
    scale: float


class Retire(_Message, frozen=True):
    """This worker will not push again: others stop waiting for it. It can still pull."""

    id: Natural


class Pause(_Message, frozen=True):
    """This worker waits in a barrier: until it resumes, the rounds of others do not wait for it. It can still pull."""

    id: Natural


class Resume(_Message, frozen=True):
    """The barrier is complete: this worker pushes again. Answered with `Resumed`."""

    id: Natural


class Gather(_Message, frozen=True):
    """A worker's part of values that workers exchange. One frame with the value follows. Sent to server 0."""

    id: Natural


class GetStates(_Message, frozen=True):
    """Asks for the optimizer state of all keys of this server."""

    id: Natural


class StateEntry(msgspec.Struct, frozen=True, array_like=True):
    """An optimizer state of a key, whose values are in a frame. `start`: it is a part of the key, from that element."""

    key: Natural
    name: Name
    dtype: DtypeName
    shape: Annotated[tuple[Natural, ...], Meta(max_length=MAX_DIMENSIONS)]
    start: Natural | None = None


class PutStates(_Message, frozen=True):
    """Restores optimizer states: one frame for each entry. Keys without entries are those that were never updated."""

    id: Natural
    entries: Annotated[list[StateEntry], Meta(max_length=8 * MAX_KEYS)]


class Ask(_Message, frozen=True):
    """Asks for the status of request `about`. Sent when its answer is late."""

    id: Natural
    about: Natural


# --- data: server -> worker


class Placed(_Message, frozen=True):
    """The slots of the requested keys, and all segments so far."""

    id: int
    segments: list[Segment]
    slots: list[Slot]


class Resumed(_Message, frozen=True):
    """The keys of this server, and the clock of the worker's next push of each."""

    id: int
    keys: list[int]
    clocks: list[int]


class Done(_Message, frozen=True):
    """The request is complete. The weights are in the worker's shared memory or in the frames that follow.

    Of row-sparse keys, one frame has the version and the number of rows of each key (int64). Then each key has a frame
    with the numbers of its rows on this server and a frame with their values.

    `staleness`: updates by others between the worker's last read and this push. `rounds_ahead`: of the slowest active
    worker when the weights were read; SSP and GSP bound it. `notice`: what the worker should warn its user about.
    `held_s`: the seconds from the arrival of the request to this answer.
    """

    id: int
    version: int = 0
    staleness: int = 0
    halt: bool = False
    rounds_ahead: int = 0
    notice: str = ""
    held_s: float = 0.0


class SquaredNorm(_Message, frozen=True):
    """The squared norm of a round on this server. It is the same number for all workers of a group."""

    id: int
    square: float


class Gathered(_Message, frozen=True):
    """The parts of all workers that took part in a round: their ranks, and one frame for each."""

    id: int
    ranks: list[int]


class Failed(_Message, frozen=True):
    """The request was rejected and changed nothing. `not_in_view`: because the worker is not in the current view."""

    id: int
    reason: str
    not_in_view: bool = False


class States(_Message, frozen=True):
    """Optimizer states: one frame for each entry."""

    id: int
    entries: list[StateEntry]


class Status(_Message, frozen=True):
    """`known` False: the request never arrived, send it again. Otherwise `waiting` names the workers it waits for."""

    id: int
    about: int
    known: bool
    waiting: str


FromProcess = (
    Register
    | Heartbeat
    | Barrier
    | Leave
    | Halt
    | StoreOpened
    | StoreEnding
    | StoreClosed
    | WorkerExited
    | ServersUnused
)
FromScheduler = Registered | Refused | Roster | View | BarrierDone | StoreEnded | Finish | Abort
ControlMessage = FromProcess | FromScheduler  # the scheduler forwards some messages of processes
Setup = Configure | Place | Attach | Init | SetOptimizer | GetStates | PutStates
Rows = PullRows | PullChanges | PutRows
Norms = MeasureNorm | ApplyScaled
Ending = Retire | Pause | Resume
Request = Setup | Push | Pull | Rows | Norms | Gather | Ending | Ask
Response = Placed | Resumed | Done | SquaredNorm | Gathered | Failed | States | Status


class _Head(msgspec.Struct, array_like=True):
    """What all requests and answers begin with."""

    tag: Name
    id: Natural


_encoder = msgspec.msgpack.Encoder()
_control: msgspec.msgpack.Decoder[ControlMessage] = msgspec.msgpack.Decoder(ControlMessage)
_from_process: msgspec.msgpack.Decoder[FromProcess] = msgspec.msgpack.Decoder(FromProcess)
_request: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_head: msgspec.msgpack.Decoder[_Head] = msgspec.msgpack.Decoder(_Head)
_response: msgspec.msgpack.Decoder[Response] = msgspec.msgpack.Decoder(Response)

# msgspec does not wrap the last three. It raises RecursionError for arrays that are nested a thousand deep.
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, MemoryError)


class Malformed(JobError):
    """Bytes that are not a valid message. The receiver drops and counts them."""


class Forbidden(Malformed):
    """A message that its sender must not send now. It changed nothing; the receiver closes the connection."""


def _brief(error: BaseException) -> str:
    """Return the text of an error, which may quote what a peer has sent."""
    return str(error)[:200]


def encode(message: _Message) -> bytes:
    """Return a message as bytes."""
    return _encoder.encode(message)


def decode_control(data: bytes | memoryview) -> ControlMessage:
    """Decode a control message, or raise Malformed."""
    try:
        return _control.decode(data)
    except _UNREADABLE as error:
        raise Malformed(f"not a control message ({_brief(error)})") from error


def decode_from_process(data: bytes | memoryview) -> FromProcess:
    """Decode a message to the scheduler, or raise Malformed."""
    try:
        return _from_process.decode(data)
    except _UNREADABLE as error:
        raise Malformed(f"not a message to the scheduler ({_brief(error)})") from error


def decode_request(data: bytes | memoryview) -> Request:
    """Decode a worker's request, or raise Malformed."""
    try:
        return _request.decode(data)
    except _UNREADABLE as error:
        raise Malformed(f"not a request ({_brief(error)})") from error


def request_id(data: bytes | memoryview) -> int | None:
    """Return the number of a request that cannot be decoded, so that it can be answered; None if it has none."""
    try:
        return _head.decode(data).id
    except _UNREADABLE:
        return None


def decode_response(data: bytes | memoryview) -> Response:
    """Decode a server's answer, or raise Malformed."""
    try:
        return _response.decode(data)
    except _UNREADABLE as error:
        raise Malformed(f"not an answer ({_brief(error)})") from error
