"""What the launcher asks its driver for, and the events with which the driver answers. Pure."""

from __future__ import annotations

import msgspec


class ActorPlace(msgspec.Struct, frozen=True):
    """One process of the job: its name, its bundle, and what it gets of it."""

    name: str
    bundle: int
    cpus: float
    gpus: float


class Placement(msgspec.Struct, frozen=True):
    """What the driver asks Ray for.

    `address` None: RAY_ADDRESS, a running cluster of this machine, or a new one. `upload`: a folder that Ray copies to
    the nodes, where the processes run in it.
    """

    name: str
    address: str | None
    strategy: str
    timeout_s: float
    bundles: list[dict[str, float]]
    actors: list[ActorPlace]
    upload: str | None = None

    def describe_bundles(self) -> list[str]:
        """Return the resources of each bundle as text, as in "2 CPU + 1 GPU"."""
        return [" + ".join(f"{amount:g} {name}" for name, amount in bundle.items()) for bundle in self.bundles]


class Connected(msgspec.Struct, frozen=True, tag=True):
    """The driver has joined or started a cluster. `dashboard`: its address, or empty."""

    dashboard: str


class Waiting(msgspec.Struct, frozen=True, tag=True):
    """The cluster has no room for the job yet."""

    reason: str


class Failed(msgspec.Struct, frozen=True, tag=True):
    """No process of the job can be placed."""

    reason: str


class Placed(msgspec.Struct, frozen=True, tag=True):
    """The actor of a process runs on a node with this address."""

    name: str
    host: str


class Lost(msgspec.Struct, frozen=True, tag=True):
    """Ray has lost the actor of a process."""

    name: str
    reason: str


Event = Connected | Waiting | Failed | Placed | Lost
_encoder = msgspec.json.Encoder()
_placements = msgspec.json.Decoder(Placement)
_events: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)


def encode(message: Placement | Event) -> bytes:
    """Return a message as a line."""
    return _encoder.encode(message) + b"\n"


def decode_placement(line: bytes) -> Placement:
    """Return the placement of a line."""
    return _placements.decode(line)


def decode_event(line: bytes) -> Event:
    """Return the event of a line."""
    return _events.decode(line)
