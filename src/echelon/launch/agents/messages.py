"""The messages between a launcher and its agents, which start processes for it on other machines.

An agent says `Hello`. If its process listens, the launcher asks it to `Bind` a port first. When all ports are known,
the launcher sends `Start`. From then on the agent sends the process's output, and `Ended` at the end. The launcher then
sends `Start` again or `Release`. Both sides send `Alive` regularly, because a machine that disappears closes no
connection.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from echelon.cluster.messages import Malformed
from echelon.errors import JobError
from echelon.transport.framing import with_length

T = TypeVar("T")

ALIVE_S = 1.0  # between two signs of life
LOST_S = 30.0  # without one, the other side counts as lost


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


# --- agent -> launcher


class Hello(_Message, frozen=True):
    """An agent runs. `digest` identifies the source code of its Echelon; `task` is the number its system gave it."""

    host: str
    pid: int
    digest: str
    task: int | None = None


class Bound(_Message, frozen=True):
    """The address at which the agent's process will listen."""

    host: str
    port: int


class Started(_Message, frozen=True):
    """The process runs."""

    pid: int


class CannotStart(_Message, frozen=True):
    """The process cannot be started."""

    reason: str


class Output(_Message, frozen=True):
    """A part of the process's output."""

    data: bytes


class Alive(_Message, frozen=True):
    """Sent regularly by both sides. The agent adds its process's CPU time, and lines for the file of joined workers."""

    cpu_ticks: int = 0
    joined: list[str] = []


class Ended(_Message, frozen=True):
    """The process has ended: its exit status, or the negative number of the signal that killed it."""

    code: int


# --- launcher -> agent


class Bind(_Message, frozen=True):
    """Asks for a listening socket at a free port.

    It belongs to the interface if one is given; otherwise to the address that `name`, the agent's host, stands for, or
    to the one that reaches the first of `peers`, other hosts of the job.
    """

    interface: str | None
    name: str
    peers: list[str]


class Start(_Message, frozen=True):
    """The process to start, the first time or again.

    `local_workers`: the workers of this host share its cores. `mark`: see `shared_folder`.
    """

    name: str
    arguments: list[str]
    environment: dict[str, str]
    folder: str | None
    local_workers: int
    mark: str | None = None


class Signal(_Message, frozen=True):
    """A signal for the process and all that it has started."""

    number: int


class Release(_Message, frozen=True):
    """The process is not started again: the agent ends."""


class ReportExit(_Message, frozen=True):
    """For the scheduler's agent: a worker's process has ended, which the scheduler must know if it never registered."""

    rank: int
    how: str
    failed: bool


FromAgent = Hello | Bound | Started | CannotStart | Output | Alive | Ended
ToAgent = Bind | Start | Signal | Release | ReportExit | Alive
_encoder = msgspec.msgpack.Encoder()
_from_agent: msgspec.msgpack.Decoder[FromAgent] = msgspec.msgpack.Decoder(FromAgent)
_to_agent: msgspec.msgpack.Decoder[ToAgent] = msgspec.msgpack.Decoder(ToAgent)


def encode(message: FromAgent | ToAgent) -> bytes:
    """Return a message's bytes, preceded by their length."""
    return with_length(_encoder.encode(message))


def explain(error: JobError) -> str:
    """Return the error of reading an agent's messages, with the usual cause if other bytes came instead."""
    hint = "; does a login script of that host print something?" if isinstance(error, Malformed) else ""
    return f"{error}{hint}"


def decode_from_agent(body: bytes) -> FromAgent:
    """Decode an agent's message, or raise JobError."""
    return _decode(_from_agent, body)


def decode_to_agent(body: bytes) -> ToAgent:
    """Decode a launcher's message, or raise JobError."""
    return _decode(_to_agent, body)


def _decode(decoder: msgspec.msgpack.Decoder[T], body: bytes) -> T:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise JobError(f"a message between launcher and agent cannot be read: {error}") from error
