"""Every message that crosses a wire, and the one way to write and read each kind.

Control messages go between a process and the scheduler; data messages between a worker and a server, followed by raw
frames where tensors do not travel through shared memory. Arrays with a tag in front, MessagePack; nothing is pickled.
A data request carries an id that its answer repeats and the view its sender knows.
"""

from __future__ import annotations

import msgspec

from echelon.cluster.placement import KeySpec, Segment, Slot
from echelon.errors import JobError

WORKER, SERVER, SCHEDULER = "worker", "server", "scheduler"

TAKEN_FOR_DEAD = "this worker is not in the view; it is taken for dead"  # how a server refuses one that was


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


class Member(msgspec.Struct, frozen=True, array_like=True):
    """A process of the job as the scheduler knows it."""

    role: str
    rank: int
    host: str
    pid: int
    address: str = ""

    def __str__(self) -> str:
        return f"{self.role} {self.rank} (pid {self.pid} on {self.host})"


# --- control: process -> scheduler


class Register(_Message, frozen=True):
    """First message of a process; rank None asks for one by order of arrival."""

    role: str
    rank: int | None
    host: str
    pid: int
    address: str


class Heartbeat(_Message, frozen=True):
    """Still here."""


class Barrier(_Message, frozen=True):
    """This worker has reached its barrier number `sequence`."""

    sequence: int


class Leave(_Message, frozen=True):
    """This process is done and goes; its connection closing afterwards is no death."""

    reason: str


class Halt(_Message, frozen=True):
    """A worker asks all workers to stop training, for example because the target is reached. Comes back to all."""

    reason: str


class Gone(_Message, frozen=True):
    """A launcher's word that a worker has ended. It matters if the worker never registered: nobody else can know."""

    rank: int
    how: str
    failed: bool


# --- control: scheduler -> process


class Registered(_Message, frozen=True):
    """The rank this process has."""

    rank: int


class Refused(_Message, frozen=True):
    """This process cannot be part of the job."""

    reason: str


class Roster(_Message, frozen=True):
    """Everybody is there; the job begins."""

    members: list[Member]


class View(_Message, frozen=True):
    """Who is alive from now on, and why that changed."""

    number: int
    workers: list[int]
    reason: str


class BarrierDone(_Message, frozen=True):
    """All living workers have reached the barrier."""

    sequence: int


class Finish(_Message, frozen=True):
    """All workers are gone; servers may go too."""


class Abort(_Message, frozen=True):
    """The job cannot go on."""

    reason: str


# --- data: worker -> server


class Configure(_Message, frozen=True):
    """Who the worker is and the scheme it was told; a server takes the first and compares the others."""

    id: int
    rank: int
    store: str
    staleness: int | None
    groups: list[list[int]] | None


class Place(_Message, frozen=True):
    """Where do these keys live? Asked of server 0."""

    id: int
    specs: list[KeySpec]


class Attach(_Message, frozen=True):
    """A segment of the worker's memory: where its gradients are, and where its weights are wanted."""

    id: int
    segment: Segment
    gradients: str
    weights: str


class Init(_Message, frozen=True):
    """Keys with their first values (frames, or already in the worker's weights)."""

    id: int
    segments: list[Segment]
    slots: list[Slot]
    framed: bool
    overwrite: bool = False  # known keys take the values, too


class OptimizerSpec(msgspec.Struct, frozen=True):
    """An optimizer as name and numbers. `groups` has the options that differ, `members` each key's group."""

    name: str
    groups: list[dict[str, float | int | bool | list[float] | None]]
    members: dict[str, int] = {}


class SetOptimizer(_Message, frozen=True):
    """The optimizer every server runs; the first is taken, the others are compared."""

    id: int
    spec: OptimizerSpec


class Push(_Message, frozen=True):
    """Gradients of one clock for some keys. `samples` None: a plain sum is wanted. `pull`: answer with weights.

    `halt`: this worker asks all to stop; whoever gets an answer of this clock or a later one hears it. `rank` above 0:
    instead of the gradient of the one key, there are its factors of that rank. `more`: the next push of this step is
    about to come.
    """

    id: int
    view: int
    clock: int
    keys: list[int]
    samples: float | None
    lrs: list[float]
    pull: bool
    framed: bool
    halt: bool = False
    rank: int = 0
    more: bool = False


class Pull(_Message, frozen=True):
    """The weights of some keys, as of this worker's clock. `framed`: as frames, not into its memory."""

    id: int
    view: int
    clock: int
    keys: list[int]
    framed: bool


class Retire(_Message, frozen=True):
    """This worker pushes no more: nobody waits for it, and it may go on pulling."""

    id: int


class GetStates(_Message, frozen=True):
    """The optimizer's state of all keys this server has."""

    id: int


class PutStates(_Message, frozen=True):
    """Put back what GetStates gave: a frame for every (key, state) pair."""

    id: int
    steps: dict[int, int]
    entries: list[tuple[int, int]]


class Ask(_Message, frozen=True):
    """Where does request `about` stand? Sent when an answer is late."""

    id: int
    about: int


# --- data: server -> worker


class Placed(_Message, frozen=True):
    """The slots of the keys asked for, and all segments so far."""

    id: int
    segments: list[Segment]
    slots: list[Slot]


class Done(_Message, frozen=True):
    """The request is carried out; weights are in the worker's memory or in the frames that follow."""

    id: int
    version: int = 0
    staleness: int = 0
    halt: bool = False


class Failed(_Message, frozen=True):
    """The request was refused and changed nothing."""

    id: int
    reason: str


class States(_Message, frozen=True):
    """Optimizer state: a frame for every (key, state) pair."""

    id: int
    steps: dict[int, int]
    entries: list[tuple[int, int]]


class Status(_Message, frozen=True):
    """`known` False: the request never came, send it again. Otherwise who keeps it waiting."""

    id: int
    about: int
    known: bool
    waiting: str


FromProcess = Register | Heartbeat | Barrier | Leave | Halt | Gone
FromScheduler = Registered | Refused | Roster | View | BarrierDone | Finish | Abort
ControlMessage = FromProcess | FromScheduler
Request = Configure | Place | Attach | Init | SetOptimizer | Push | Pull | Retire | GetStates | PutStates | Ask
Response = Placed | Done | Failed | States | Status

_encoder = msgspec.msgpack.Encoder()
_control: msgspec.msgpack.Decoder[ControlMessage] = msgspec.msgpack.Decoder(ControlMessage)
_request: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_response: msgspec.msgpack.Decoder[Response] = msgspec.msgpack.Decoder(Response)

_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError)  # msgspec lets the second through as it is


class Malformed(JobError):
    """Bytes that are no message: refused and counted, never acted on."""


def encode(message: _Message) -> bytes:
    """One message as bytes."""
    return _encoder.encode(message)


def decode_control(data: bytes | memoryview) -> ControlMessage:
    """A control message, or Malformed."""
    try:
        return _control.decode(data)
    except _UNREADABLE as error:
        raise Malformed(f"not a control message ({error})") from error


def decode_request(data: bytes | memoryview) -> Request:
    """A worker's request, or Malformed."""
    try:
        return _request.decode(data)
    except _UNREADABLE as error:
        raise Malformed(f"not a request ({error})") from error


def decode_response(data: bytes | memoryview) -> Response:
    """A server's answer, or Malformed."""
    try:
        return _response.decode(data)
    except _UNREADABLE as error:
        raise Malformed(f"not an answer ({error})") from error
