"""Encoding and decoding messages. What cannot be decoded raises Malformed."""

from __future__ import annotations

import msgspec

from echelon.cluster.messages.common import (
    Message,
    Name,
)
from echelon.cluster.messages.control import (
    Abort,
    Barrier,
    BarrierDone,
    Finish,
    Halt,
    Heartbeat,
    Leave,
    Leaving,
    MayLeave,
    NotFinite,
    NotWhole,
    Refused,
    Register,
    Registered,
    Removed,
    Return,
    Roster,
    ServersUnused,
    SliceInSync,
    StoreClosed,
    StoreEnded,
    StoreEnding,
    StoreIsAt,
    StoreJoined,
    StoreOpened,
    View,
    WorkerExited,
)
from echelon.cluster.messages.data import (
    ApplyScaled,
    Ask,
    Attach,
    Came,
    Configure,
    Configured,
    Done,
    Failed,
    Gather,
    Gathered,
    GetStates,
    GiveValues,
    Gone,
    Init,
    Join,
    Joined,
    MeasureNorm,
    Offer,
    OpenShard,
    Pause,
    Place,
    Placed,
    Pull,
    PullChanges,
    PullRows,
    Push,
    PutRows,
    PutStates,
    Recovering,
    Replicate,
    Replicated,
    Restore,
    Resume,
    Resumed,
    Retire,
    SetOptimizer,
    SquaredNorm,
    States,
    Status,
    TakeValues,
    ValuesGiven,
)
from echelon.cluster.messages.leases import (
    CloseLedger,
    Cut,
    CutReady,
    GiveBack,
    Lease,
    LedgerEnded,
    LedgerRefused,
    LedgerState,
    OpenLedger,
    Settled,
    TakeLease,
    Trained,
)
from echelon.cluster.placement import Natural
from echelon.errors import JobError

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
    | Return
    | StoreJoined
    | SliceInSync
    | Leaving
    | NotFinite
    | NotWhole
    | OpenLedger
    | TakeLease
    | Trained
    | GiveBack
    | CloseLedger
    | Settled
    | Cut
)
FromScheduler = (
    Registered
    | Refused
    | Roster
    | View
    | BarrierDone
    | StoreEnded
    | Finish
    | Abort
    | Removed
    | StoreIsAt
    | MayLeave
    | Lease
    | LedgerEnded
    | LedgerState
    | LedgerRefused
    | CutReady
)
ControlMessage = FromProcess | FromScheduler  # the scheduler forwards some messages of processes
Setup = Configure | Place | Attach | Init | SetOptimizer | GetStates | PutStates
Rows = PullRows | PullChanges | PutRows
Norms = MeasureNorm | ApplyScaled
Exchange = Gather | GiveValues | TakeValues
Ending = Retire | Pause | Resume | Join | Offer
Between = Replicate | Replicated | OpenShard | Restore | Came | Gone  # servers
Request = Setup | Push | Pull | Rows | Norms | Exchange | Ending | Ask | Between
Answered = Placed | Configured | Resumed | Joined | Recovering | SquaredNorm | Gathered | ValuesGiven | States
Response = Answered | Done | Failed | Status


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


def encode(message: Message) -> bytes:
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
