"""Which servers store which slice, and what changes when a server is lost or joins. Pure functions of a list of slices.

Slice i is stored by server i at the start of a job; with replicas, server i + 1 is its backup. When a primary is lost,
its backup takes over if it has everything (`in_sync`). Otherwise the slice has no primary until a new process of server
i or, with replicas, of server i + 1 joins. A new backup is empty at first; the primary copies the slice to it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from echelon.cluster.messages import Slice


def first_slices(num_servers: int, replicas: int) -> list[Slice]:
    """Return the slices at the start of a job."""
    has_backups = has_replicas(num_servers, replicas)
    return [Slice(rank, (rank + 1) % num_servers if has_backups else None, True) for rank in range(num_servers)]


def has_replicas(num_servers: int, replicas: int) -> bool:
    """Return whether slices have backups. A single server has no other one to store its backup."""
    return replicas > 0 and num_servers > 1


def without_server(slices: Sequence[Slice], lost: int) -> list[Slice]:
    """Return the slices after the loss of a server: backups that are in sync become primaries."""
    result = []
    for one in slices:
        if one.primary == lost:
            one = Slice(one.backup if one.in_sync else None, None, True)
        elif one.backup == lost:
            one = Slice(one.primary, None, True)
        result.append(one)
    return result


def with_server(slices: Sequence[Slice], joined: int, replicas: int) -> list[Slice]:
    """Return the slices after a new process of a server has joined: it takes those that nobody stores, and backups."""
    num_servers = len(slices)
    replicated = has_replicas(num_servers, replicas)
    result = []
    for number, one in enumerate(slices):
        homes = (number, (number + 1) % num_servers) if replicated else (number,)
        result.append(Slice(joined, None, True) if one.primary is None and joined in homes else one)
    return with_backups(result, [joined]) if replicated else result


def with_backups(slices: Sequence[Slice], servers: Iterable[int]) -> list[Slice]:
    """Return the slices with backups on `servers`, where there is none. The server with the fewest slices is first."""
    loads = Counter(dict.fromkeys(servers, 0))
    for one in slices:
        for server in (one.primary, one.backup):
            if server is not None and server in loads:
                loads[server] += 1
    result = []
    for one in slices:
        others = [server for server in loads if server != one.primary]
        if one.primary is not None and one.backup is None and others:
            backup = min(others, key=lambda server: (loads[server], server))
            loads[backup] += 1
            one = Slice(one.primary, backup, False)
        result.append(one)
    return result


def with_sync(slices: Sequence[Slice], number: int, backup: int) -> list[Slice]:
    """Return the slices when the backup of one of them has everything that its primary has."""
    return [Slice(one.primary, backup, True) if i == number else one for i, one in enumerate(slices)]


def without_backup(slices: Sequence[Slice], number: int) -> list[Slice]:
    """Return the slices when the backup of one of them is of no use."""
    return [Slice(one.primary, None, True) if i == number else one for i, one in enumerate(slices)]


def unstored(slices: Sequence[Slice]) -> list[int]:
    """Return the numbers of the slices that no server stores."""
    return [number for number, one in enumerate(slices) if one.primary is None]


def describe_promotions(before: Sequence[Slice], after: Sequence[Slice]) -> str:
    """Return which server continues with which slice after the loss of another one, or an empty text."""
    pairs = enumerate(zip(before, after, strict=True))
    moved = [(number, new.primary) for number, (old, new) in pairs if new.primary not in (None, old.primary)]
    return ", ".join(f"server {primary} continues with slice {number}" for number, primary in moved)
