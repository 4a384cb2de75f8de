"""Hosts files: the machines of a job, one per line.

10.0.0.1
10.0.0.2 slots=2        two processes of the job go here before the next host gets one
anna@node-3:2222        the user and the port of ssh
# a comment
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from echelon.environment import HIGHEST_PORT
from echelon.errors import UsageError

# ssh, rsync and mpirun take a word that begins with a hyphen for an option.
_HOST = re.compile(r"(?:(?P<user>(?!-)[^\s@:]+)@)?(?P<name>\[[0-9A-Fa-f:.]+\]|(?!-)[^\s@:\[\]]+)(?::(?P<port>[0-9]+))?")


@dataclass(frozen=True, slots=True)
class Host:
    """A machine of the job, and how ssh reaches it."""

    name: str
    slots: int = 1
    user: str | None = None
    port: int | None = None

    @property
    def line(self) -> str:
        """The host as a hosts file names it, which no other host of the file shares."""
        user = f"{self.user}@" if self.user else ""
        return f"{user}{self.name}" if self.port is None else f"{user}{self.name}:{self.port}"

    def __str__(self) -> str:
        return self.name


def read_hosts(path: str) -> tuple[Host, ...]:
    """Return the hosts of a file, in its order. A host that is listed twice has the slots of both lines."""
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not a text file"
        raise UsageError(f"the hosts file {path} cannot be read: {why}; give one with -H, a host per line") from error
    return parse_hosts(text, path)


def parse_hosts(text: str, path: str = "hosts") -> tuple[Host, ...]:
    """Return the hosts of a text. `path` names it in errors."""
    hosts: dict[tuple[str, str | None, int | None], Host] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        host = _parse_line(words, f"{path}, line {number}")
        key = host.name, host.user, host.port
        known = hosts.get(key)
        hosts[key] = host if known is None else Host(host.name, known.slots + host.slots, host.user, host.port)
    if not hosts:
        raise UsageError(f"the hosts file {path} names no host; write one per line")
    return tuple(hosts.values())


def _parse_line(words: list[str], where: str) -> Host:
    found = _HOST.fullmatch(words[0])
    if found is None:
        raise UsageError(f"{where}: {words[0]!r} is not a host; write host, user@host or user@host:port")
    port = int(found["port"]) if found["port"] else None
    if port is not None and not 0 < port <= HIGHEST_PORT:
        raise UsageError(f"{where}: {port} is not a port; write a number from 1 to {HIGHEST_PORT}")
    slots = 1
    for word in words[1:]:
        name, _, value = word.partition("=")
        if name not in ("slots", "max_slots", "max-slots"):  # Open MPI's files may also have the maximum
            raise UsageError(f"{where}: {word!r} is unknown; after a host only slots=NUMBER may follow")
        if not value.isdecimal() or int(value) < 1:
            raise UsageError(f"{where}: {word!r}; the number of slots must be 1 or more")
        slots = int(value) if name == "slots" else slots
    return Host(found["name"].strip("[]"), slots, found["user"], port)
