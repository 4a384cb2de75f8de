"""Messages for slices that this server will store, of workers that received the new view before this server did."""

from __future__ import annotations

from echelon.cluster.messages import Configure, decode_request
from echelon.server.slices.seats import Seat
from echelon.transport.interface import Peer

MAX_EARLY = 10_000  # messages per slice

Message = tuple[Peer, list[memoryview]]


class EarlyMessages:
    """The messages by slice, each slice's in the order of their arrival."""

    def __init__(self) -> None:
        self._waiting: dict[int, list[Message]] = {}

    def keep(self, slice_number: int, peer: Peer, frames: list[memoryview]) -> None:
        """Keep the first message of a connection, which is for this slice. Beyond the limit, it is dropped."""
        waiting = self._waiting.setdefault(slice_number, [])
        if len(waiting) < MAX_EARLY:
            waiting.append((peer, frames))

    def keep_next(self, peer: Peer, frames: list[memoryview]) -> bool:
        """Keep a message that follows such a first message. Return False if there was none."""
        for number, waiting in self._waiting.items():
            if any(other == peer for other, _ in waiting):
                self.keep(number, peer, frames)
                return True
        return False

    def seat_of(self, peer: Peer) -> Seat | None:
        """Return the seat that a connection will have whose messages are kept."""
        for waiting in self._waiting.values():
            for other, frames in waiting:
                if other == peer and isinstance(request := decode_request(frames[0]), Configure):
                    return Seat(request.rank, request.number, request.slice)
        return None

    def take(self, slice_number: int) -> list[Message]:
        """Remove and return the messages for a slice."""
        return self._waiting.pop(slice_number, [])
