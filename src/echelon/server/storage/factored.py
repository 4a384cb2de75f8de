"""Gradients that arrive as two factors and are multiplied where they are used.

The gradient of a linear layer's weights is the product of the gradient of its outputs and its inputs. For 32 samples
and 4096 x 3072 weights, 0.9 MB of factors describe 50 MB of gradient. A server computes as much of the product at a
time as fits the cache, so the whole gradient never exists. Each element has the same bits as in one large product: BLAS
uses another order of summation only for products of very few rows, and adds a product to existing values in several
parts only from a higher rank on. `FEWEST_ROWS` and `HIGHEST_RANK` avoid both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from echelon.cluster.placement import ALIGN, Piece, Slot
from echelon.errors import UsageError

DTYPES = ("float32", "float64")
FEWEST_ROWS = 4  # of a product: with fewer rows (1 to 3 in MKL), BLAS sums in another order
HIGHEST_RANK = 128  # whose product BLAS adds in one part (up to 192 in MKL)
BLOCK = 262_144  # elements: smaller products spend much of their time on packing the factors


def factors_length(slot: Slot, rank: int) -> int:
    """Return the number of elements of both factors. Raise UsageError if they cannot be a gradient of this key."""
    shape = slot.spec.shape
    if slot.spec.dtype not in DTYPES or len(shape) != 2:
        raise UsageError(
            f"key {slot.spec.name!r} is {slot.spec}; only a matrix of {' or '.join(DTYPES)} can be pushed as factors"
        )
    length = rank * sum(shape)
    if not 0 < length <= slot.length:
        raise UsageError(
            f"key {slot.spec.name!r}: factors of rank {rank} have {length} elements, its gradient {slot.length}; "
            "push the gradient instead"
        )
    return length


class Factored:
    """The gradient of one key as a `Window`. `factors` has `rank` rows for the outputs, then `rank` for the inputs."""

    def __init__(self, slot: Slot, rank: int, factors: Tensor) -> None:
        rows, self._columns = slot.spec.shape
        self._slot = slot
        self.factors = factors
        self._rank, self._rows = rank, rows
        self._left = factors[: rank * rows].view(rank, rows)
        self._right = factors[rank * rows : rank * (rows + self._columns)].view(rank, self._columns)
        self._buffer = factors.new_empty(0)

    def view(self, segment: int, start: int, stop: int) -> Tensor:
        """Return elements [start, stop), valid until the next call. The padding after the key is zero."""
        return self.summed_with((), start, stop)

    def summed_with(self, others: Sequence[Factored], start: int, stop: int) -> Tensor:
        """Return `view` plus the same elements of other gradients of this key, with the bits of separate additions."""
        columns = self._columns
        begin, end = start - self._slot.start, min(stop - self._slot.start, self._slot.length)
        first = min(begin // columns, max(0, self._rows - FEWEST_ROWS))
        last = max(-(-end // columns), min(first + FEWEST_ROWS, self._rows))
        size = (last - first) * columns
        if self._buffer.numel() < size + ALIGN:
            self._buffer = self._buffer.new_empty(size + ALIGN)
        product = self._buffer[:size].view(last - first, columns)
        torch.mm(self._left[:, first:last].t(), self._right, out=product)
        for other in others:
            left, right = other._left[:, first:last].t(), other._right
            if other._rank <= HIGHEST_RANK:
                product.addmm_(left, right)
            else:
                product.add_(left.mm(right))
        self._buffer[size : size + ALIGN].zero_()
        offset = begin - first * columns
        return self._buffer[offset : offset + stop - start]

    def seams(self, segment: int, start: int, stop: int) -> Sequence[int]:
        return ()


def summed_blocks(windows: Sequence[Factored], piece: Piece) -> Iterator[Tensor]:
    """Yield the sum of one key's gradients over a piece, block by block. A block is valid until the next one."""
    for start in range(piece.start, piece.stop, BLOCK):
        yield windows[0].summed_with(windows[1:], start, min(start + BLOCK, piece.stop))
