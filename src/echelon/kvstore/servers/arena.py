"""A worker's memory: every segment twice, once for gradients on their way out, once for weights on their way in."""

from __future__ import annotations

from torch import Tensor

from echelon.cluster.placement import ITEM_BYTES, Piece, Segment, Slot
from echelon.server.memory import as_tensor
from echelon.transport.interface import Block, Transport


class Mirror:
    """One segment in this worker's memory."""

    def __init__(self, segment: Segment, transport: Transport) -> None:
        self.segment = segment
        self._item = ITEM_BYTES[segment.dtype]
        self.gradient_block: Block = transport.allocate(segment.capacity * self._item)
        self.weight_block: Block = transport.allocate(segment.capacity * self._item)
        self.gradients = as_tensor(self.gradient_block.buffer, segment.dtype)
        self.weights = as_tensor(self.weight_block.buffer, segment.dtype)

    def gradient_bytes(self, piece: Piece) -> memoryview:
        """A piece of the gradients, to be sent as a frame."""
        return self.gradient_block.buffer[piece.start * self._item : piece.stop * self._item]

    def weight_bytes(self, piece: Piece) -> memoryview:
        """A piece of the weights, to be sent or to be filled from a frame."""
        return self.weight_block.buffer[piece.start * self._item : piece.stop * self._item]


class Arena:
    """All mirrors of a worker."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.mirrors: list[Mirror] = []

    def grow(self, segments: list[Segment]) -> list[Mirror]:
        """Mirror segments that are new; returns the new mirrors."""
        fresh = [Mirror(segment, self._transport) for segment in segments[len(self.mirrors) :]]
        self.mirrors += fresh
        return fresh

    def gradient(self, slot: Slot) -> Tensor:
        """A key's gradient, shaped, in place."""
        flat = self.mirrors[slot.segment].gradients[slot.start : slot.start + slot.length]
        return flat.view(slot.spec.shape)

    def weight(self, slot: Slot) -> Tensor:
        """A key's weights, shaped, in place."""
        flat = self.mirrors[slot.segment].weights[slot.start : slot.start + slot.length]
        return flat.view(slot.spec.shape)
