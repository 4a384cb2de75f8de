"""The connections of workers: each is for one store and one slice, and belongs to one process.

A seat is the rank of a worker, the number of one of its stores, and a slice. The first request of a connection
(`Configure`) names it. The name of a connection begins with a token that only the process has that registered.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from echelon.cluster.messages import Configure, Member
from echelon.transport.interface import Peer


class Seat(NamedTuple):
    """What a connection is for."""

    worker: int
    store: int
    slice: int


class Seats:
    """Which connection has which seat."""

    def __init__(self) -> None:
        self._names: dict[int, bytes] = {}  # by rank: how the names of a worker's connections begin
        self._peers: dict[Seat, Peer] = {}
        self._seats: dict[Peer, Seat] = {}

    def know(self, workers: Iterable[Member]) -> None:
        """Record the processes of workers."""
        self._names |= {member.rank: f"{member.endpoint_name}.".encode() for member in workers}

    def seat_of(self, peer: Peer) -> Seat | None:
        """Return the seat of a connection, or None."""
        return self._seats.get(peer)

    def peer_at(self, seat: Seat) -> Peer | None:
        """Return the connection of a seat, or None."""
        return self._peers.get(seat)

    def take(self, peer: Peer, seat: Seat) -> None:
        """Give a connection a seat."""
        self._peers[seat], self._seats[peer] = peer, seat

    def leave(self, seat: Seat) -> None:
        """Free a seat."""
        if (peer := self._peers.pop(seat, None)) is not None:
            self._seats.pop(peer, None)

    def of_worker(self, worker: int) -> Iterator[Seat]:
        """Yield the seats of a worker."""
        yield from [seat for seat in self._peers if seat.worker == worker]

    def is_of_another_process(self, peer: Peer, worker: int) -> bool:
        """Return whether a connection is not one of the process that is this worker now."""
        registered = self._names.get(worker)
        return registered is not None and not (isinstance(peer, bytes) and peer.startswith(registered))

    def reason_to_refuse(self, peer: Peer, request: Configure) -> str | None:
        """Return why a connection cannot have the seat that it asks for, or None."""
        seat = Seat(request.rank, request.number, request.slice)
        if self._peers.get(seat, peer) != peer:
            return f"worker {request.rank} already has another connection for its store {request.number}"
        if (other := self._seats.get(peer, seat)) != seat:
            return f"this connection is for store {other.store} of worker {other.worker}"
        return None
