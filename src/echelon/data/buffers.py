"""Memory for batches, used again once nobody holds the last one that was in it.

A fresh batch of 64 x 3 x 224 x 224 floats is 38 MB of pages that the kernel must zero, about 5 ms on every batch, and
they go back to it each time. Here the pages stay: the array under a tensor is free again when the last tensor that
looks into it is gone, which its reference count says. A consumer that keeps batches gets new memory; nothing is
overwritten.

Pages that a GPU copies from are locked in memory (pinned), or the copy would not run beside the host's work. Such a
copy goes on after the call that began it, so whoever began it holds the memory until it is over (`Crossing`); the pool
needs no other rule.
"""

from __future__ import annotations

import sys
from collections import deque
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from echelon.errors import UsageError

_REFERENCES_WHEN_FREE = 3  # the pool's list, the loop variable, the call's argument

Array: TypeAlias = NDArray[Any]


class BufferPool:
    """Tensors of one shape and type. For one thread."""

    def __init__(self, shape: tuple[int, ...], dtype: type[np.generic], limit: int, pin_memory: bool = False) -> None:
        """Keep up to `limit` arrays; more than that are made, and let go."""
        if pin_memory and not torch.cuda.is_available():
            raise UsageError("memory is pinned for a GPU to copy from, and there is none here; leave pin_memory out")
        self._shape, self._dtype, self._limit, self._pin_memory = shape, dtype, limit, pin_memory
        self._arrays: list[Array] = []

    def take(self) -> Tensor:
        """Return a tensor whose contents are arbitrary."""
        for array in self._arrays:
            if sys.getrefcount(array) == _REFERENCES_WHEN_FREE:
                return torch.from_numpy(array)
        fresh = self._make()
        if len(self._arrays) < self._limit:
            self._arrays.append(fresh)
        return torch.from_numpy(fresh)

    def _make(self) -> Array:
        if not self._pin_memory:
            return np.empty(self._shape, self._dtype)
        kind = torch.from_numpy(np.empty(0, self._dtype)).dtype
        pinned: Array = torch.empty(self._shape, dtype=kind, pin_memory=True).numpy()
        return pinned


class Over(Protocol):
    """Says when a copy is over: a torch.cuda.Event, recorded behind it."""

    def query(self) -> bool:
        """Whether it is over."""

    def synchronize(self) -> None:
        """Wait until it is."""


class Crossing:
    """Memory that is being copied from, held until that is over. Copies end in the order they began in."""

    def __init__(self, limit: int) -> None:
        """Of more than `limit` copies under way, the oldest is waited for: the bus is what is slow then."""
        self._limit = limit
        self._held: deque[tuple[Tensor, Over]] = deque()

    def hold(self, memory: Tensor, over: Over) -> None:
        """Hold memory that a copy has just begun to read, and let go of what is done."""
        self._held.append((memory, over))
        while self._held and self._held[0][1].query():
            self._held.popleft()
        if len(self._held) > self._limit:
            self._end_oldest()

    def wait(self) -> None:
        """Wait for all copies and let go."""
        while self._held:
            self._end_oldest()

    def _end_oldest(self) -> None:
        self._held[0][1].synchronize()
        self._held.popleft()
