"""The connections of a server to the other servers of the job. They only send: what others send arrives as requests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from echelon.cluster.messages import Member
from echelon.transport.interface import Buffer, Endpoint, Peer, Transport


class Links:
    """The other servers, by rank. A server that was started again has another address and another name."""

    def __init__(self, transport: Transport, own_name: str) -> None:
        self._transport = transport
        self._own_name = own_name
        self._members: dict[int, Member] = {}
        self._former: list[bytes] = []  # the beginnings of the names of servers that were lost
        self._endpoints: dict[int, Endpoint] = {}

    def know(self, servers: Iterable[Member]) -> None:
        """Record the living servers, and close the connections to others."""
        members = {member.rank: member for member in servers}
        for rank, member in self._members.items():
            if members.get(rank) != member:
                self._former.append(_name(member))
                if rank in self._endpoints:
                    self._endpoints.pop(rank).close()
        self._members = members

    def member(self, rank: int) -> Member | None:
        """Return a living server."""
        return self._members.get(rank)

    def server_of(self, peer: Peer) -> int | None:
        """Return the rank of the server that a connection comes from, or None if it comes from no living server."""
        if not isinstance(peer, bytes):
            return None
        return next((rank for rank, member in self._members.items() if peer.startswith(_name(member))), None)

    def was_server(self, peer: Peer) -> bool:
        """Return whether a connection comes from a server that the scheduler has removed from the job."""
        return isinstance(peer, bytes) and any(peer.startswith(name) for name in self._former)

    def is_server(self, peer: Peer) -> bool:
        """Return whether a connection comes from a living server."""
        return self.server_of(peer) is not None

    def send(self, rank: int, frames: Sequence[Buffer]) -> None:
        """Send a message to a server. It is lost if the server cannot be reached now; the caller sends it again."""
        member = self._members.get(rank)
        if member is None:
            return
        if rank not in self._endpoints:
            self._endpoints[rank] = self._transport.connect(self._own_name, [member.address], wait_s=0.0)
        self._endpoints[rank].send(0, frames)

    def close(self) -> None:
        """Close all connections."""
        while self._endpoints:
            self._endpoints.popitem()[1].close()


def _name(member: Member) -> bytes:
    return f"{member.endpoint_name}.".encode()
