"""The living members of a job and their connections."""

from __future__ import annotations

from typing import NamedTuple

from echelon.cluster.messages import WORKER, ControlMessage, Forbidden, Member


class Send(NamedTuple):
    """A message for one connection."""

    to: int
    message: ControlMessage


class Members:
    """Who is behind which connection. A connection is a number that the scheduler's loop assigns."""

    def __init__(self) -> None:
        self._members: dict[int, Member] = {}

    @property
    def members(self) -> list[Member]:
        """The living members of the job, by role and rank."""
        return sorted(self._members.values(), key=lambda member: (member.role, member.rank))

    @property
    def workers(self) -> list[int]:
        """The ranks of the living workers."""
        return [member.rank for member in self.members if member.role == WORKER]

    def member(self, connection: int) -> Member | None:
        """Return the process behind a connection, or None if it has not registered."""
        return self._members.get(connection)

    def connection_of(self, token: str) -> int | None:
        """Return the connection of the living member with a token, or None."""
        return next((c for c, member in self._members.items() if token and member.token == token), None)

    def worker_connections(self) -> dict[int, int]:
        """Return the connections of the living workers, by rank."""
        return {member.rank: c for c, member in self._members.items() if member.role == WORKER}

    def worker(self, connection: int) -> int | None:
        """Return the rank of a worker, or None if it has left. Raises Forbidden for other processes."""
        member = self._members.get(connection)
        if member is None:
            return None
        if member.role != WORKER:
            raise Forbidden("it sends a message that only workers send")
        return member.rank

    def to_all(self, message: ControlMessage) -> list[Send]:
        """Return a message for every member."""
        return [Send(connection, message) for connection in self._members]

    def to_workers(self, message: ControlMessage) -> list[Send]:
        """Return a message for every worker."""
        return [Send(connection, message) for connection, m in self._members.items() if m.role == WORKER]
