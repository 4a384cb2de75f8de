"""Where the tensors of a request are. Each is checked against the layout before anything is read or written."""

from __future__ import annotations

from collections.abc import Sequence

from echelon.cluster.messages import Push
from echelon.cluster.placement import ITEM_BYTES, Layout, Piece
from echelon.errors import UsageError
from echelon.server.factored import Factored, factors_length
from echelon.server.memory import Mapped, Window, empty_frames, frame_pieces, received, received_frames


class RequestTensors:
    """Finds the windows of requests to one server: in the worker's shared memory or in frames."""

    def __init__(self, layout: Layout, rank: int) -> None:
        self._layout = layout
        self._rank = rank

    def pushed(self, mapped: Mapped, request: Push, frames: Sequence[memoryview]) -> Window:
        """Return the gradients of a push, or the gradient that its factors describe."""
        if not request.factor_rank:
            return self.incoming(mapped, request.keys, frames, request.framed)
        if len(request.keys) > 1:
            raise UsageError(f"a push of factors must name one key; this one names {len(request.keys)}")
        slot = self._layout.slots[request.keys[0]]
        length = factors_length(slot, request.factor_rank)
        if not request.framed:
            self._check_attached(mapped, request.keys)
            return Factored(slot, request.factor_rank, mapped.view(slot.segment, slot.start, slot.start + length))
        _check_lengths([length * ITEM_BYTES[slot.spec.dtype]], frames)
        return Factored(slot, request.factor_rank, received(frames[0], slot.spec.dtype))

    def incoming(self, mapped: Mapped, keys: Sequence[int], frames: Sequence[memoryview], framed: bool) -> Window:
        """Return the tensors that a request carries."""
        if not framed:
            self._check_attached(mapped, keys)
            return mapped
        pieces, dtypes = self._frame_pieces(keys), self._dtypes()
        expected = [(piece.stop - piece.start) * ITEM_BYTES[dtypes[piece.segment]] for piece in pieces]
        _check_lengths(expected, frames)
        return received_frames(pieces, frames, dtypes)

    def outgoing(self, mapped: Mapped, keys: Sequence[int], framed: bool) -> Window:
        """Return where the weights of an answer go."""
        if framed:
            return empty_frames(self._frame_pieces(keys), self._dtypes())
        self._check_attached(mapped, keys)
        return mapped

    def _check_attached(self, mapped: Mapped, keys: Sequence[int]) -> None:
        if len(mapped.segments) == len(self._layout.segments):
            return
        for slot in (self._layout.slots[key] for key in keys):
            if slot.segment not in mapped.segments:
                raise UsageError(f"this worker's memory for key {slot.spec.name!r} is not attached; send frames")

    def _frame_pieces(self, keys: Sequence[int]) -> list[Piece]:
        slots = self._layout.slots
        return frame_pieces([piece for key in keys for piece in self._layout.pieces(slots[key], self._rank)])

    def _dtypes(self) -> list[str]:
        return [segment.dtype for segment in self._layout.segments]


def _check_lengths(expected: Sequence[int], frames: Sequence[memoryview]) -> None:
    received_bytes = [len(frame) for frame in frames]
    if list(expected) != received_bytes:
        raise UsageError(
            f"the request has {len(received_bytes)} frames of {sum(received_bytes)} bytes; expected "
            f"{len(expected)} frames of {sum(expected)} bytes"
        )
