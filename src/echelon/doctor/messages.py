"""The messages between the doctor and its probes, which run on the hosts."""

from __future__ import annotations

import msgspec


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


# --- doctor -> probe


class Inspect(_Message, frozen=True):
    """Asks for the facts of a host.

    `interface`, `name` and `peers` choose its address, as in `launch.agent_messages.Bind`. `port` is one that the job
    needs there, and `folder` where it would run.
    """

    interface: str | None
    name: str
    peers: list[str]
    port: int | None
    folder: str | None


class Clock(_Message, frozen=True):
    """Asks for the time."""


class Measure(_Message, frozen=True):
    """Asks to connect to another probe, and to measure latency and bandwidth to it."""

    host: str
    port: int
    token: bytes


# --- probe -> doctor


class Facts(_Message, frozen=True):
    """What a host says about itself.

    `address` is what the host announces to others, and `listening` where this probe waits for others; without an
    address, `problem` says why. `busy`: the required port cannot be used. `versions` are those of packages that must
    be equal; "" for a missing one.
    """

    hostname: str
    python: str
    versions: dict[str, str]
    digest: str
    cores: int
    memory: int
    open_files: int
    memfd: bool
    gpus: list[str]
    interfaces: list[tuple[str, str]]
    address: str
    listening: int
    token: bytes
    problem: str = ""
    busy: str = ""
    folder: str = ""


class Time(_Message, frozen=True):
    """The seconds since 1970 on a host."""

    seconds: float


class Measured(_Message, frozen=True):
    """The round trip of one byte in seconds, and bytes per second; or why the other host cannot be reached."""

    latency: float = 0.0
    bandwidth: float = 0.0
    problem: str = ""


ToProbe = Inspect | Clock | Measure
FromProbe = Facts | Time | Measured
