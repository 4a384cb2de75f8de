"""A gradient that came as two factors, and is multiplied out where it is used.

The gradient of a linear layer's weights is the product of what came back to its outputs and what went into its inputs:
for 32 samples and 4096 x 3072 weights, 0.9 MB of factors make 50 MB of gradient. A server makes a cache full of it at
a time, so that the gradient as a whole is never anywhere. Each element is the same sum in the same order as in one
large product, to the bit: BLAS sums otherwise only in products of very few rows, and adds to what is there already in
several parts only from a higher rank on, and neither is asked of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from echelon.cluster.placement import ALIGN, Piece, Slot
from echelon.errors import UsageError

DTYPES = ("float32", "float64")
FEWEST_ROWS = 4  # of a product that is made: smaller ones are summed in another order (MKL: 1 to 3)
HIGHEST_RANK = 128  # that is added in one go (MKL: 192)
BLOCK = 262_144  # elements: in smaller products, much of the time is spent on laying the factors out


def factors_length(slot: Slot, rank: int) -> int:
    """Elements of both factors; refuses what cannot be a gradient of this key."""
    shape = slot.spec.shape
    if slot.spec.dtype not in DTYPES or len(shape) != 2:
        raise UsageError(
            f"key {slot.spec.name!r} is {slot.spec}; only a matrix of {' or '.join(DTYPES)} can be pushed as factors"
        )
    length = rank * sum(shape)
    if not 0 < length <= slot.length:
        raise UsageError(
            f"key {slot.spec.name!r}: factors of rank {rank} are {length} elements, its gradient {slot.length}; "
            "push the gradient"
        )
    return length


class Factored:
    """The gradient of one key as a `Window`: `factors` has `rank` rows for the outputs, then as many for the inputs."""

    def __init__(self, slot: Slot, rank: int, factors: Tensor) -> None:
        rows, self._columns = slot.spec.shape
        self._slot = slot
        self._rank, self._rows = rank, rows
        self._left = factors[: rank * rows].view(rank, rows)
        self._right = factors[rank * rows : rank * (rows + self._columns)].view(rank, self._columns)
        self._room = factors.new_empty(0)

    def view(self, segment: int, start: int, stop: int) -> Tensor:
        """Elements [start, stop), which hold until the next call. Behind the key's own there are zeros."""
        return self.summed_with((), start, stop)

    def summed_with(self, others: Sequence[Factored], start: int, stop: int) -> Tensor:
        """As `view`, with others' elements of this key added in their order, as if each had been made by itself."""
        columns = self._columns
        begin, end = start - self._slot.start, min(stop - self._slot.start, self._slot.length)
        first = min(begin // columns, max(0, self._rows - FEWEST_ROWS))
        last = max(-(-end // columns), min(first + FEWEST_ROWS, self._rows))
        size = (last - first) * columns
        if self._room.numel() < size + ALIGN:
            self._room = self._room.new_empty(size + ALIGN)
        room = self._room[:size].view(last - first, columns)
        torch.mm(self._left[:, first:last].t(), self._right, out=room)
        for other in others:
            left, right = other._left[:, first:last].t(), other._right
            if other._rank <= HIGHEST_RANK:
                room.addmm_(left, right)
            else:
                room.add_(left.mm(right))
        self._room[size : size + ALIGN].zero_()
        offset = begin - first * columns
        return self._room[offset : offset + stop - start]

    def seams(self, segment: int, start: int, stop: int) -> Sequence[int]:
        return ()


def sums(windows: Sequence[Factored], piece: Piece) -> Iterator[Tensor]:
    """The sum of one key's gradients over a piece, block by block. Each holds until the next one."""
    for start in range(piece.start, piece.stop, BLOCK):
        yield windows[0].summed_with(windows[1:], start, min(start + BLOCK, piece.stop))
