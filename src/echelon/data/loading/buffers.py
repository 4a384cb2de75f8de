"""Memory for batches, used again once nobody holds the last one that was in it.

A fresh batch of 64 x 3 x 224 x 224 floats is 38 MB of pages that the kernel must zero, about 5 ms on every batch, and
they go back to it each time. Here the pages stay: the array under a tensor is free again when the last tensor that
looks into it is gone, which its reference count says. A consumer that keeps batches gets new memory; nothing is
overwritten.

Pages that a GPU copies from are locked in memory (pinned), or the copy would not run beside the host's work. Such a
copy goes on after the call that began it, so whoever began it holds the memory until it is over (`Crossing`); the pool
needs no other rule.

Memory that the loader's processes fill is shared with them: `descriptor` is what they find it by.
"""

from __future__ import annotations

import logging
import math
import sys
import weakref
from collections import deque
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from echelon.data.loading.pinned import pin, unpin
from echelon.errors import UsageError
from echelon.transport.interface import Block
from echelon.transport.shared_memory import SharedMemoryTransport

log = logging.getLogger(__name__)

_REFERENCES_WHEN_FREE = 3  # the pool's list, the loop variable, the call's argument

Array: TypeAlias = NDArray[Any]


class BufferPool:
    """Tensors of one shape and type. For one thread."""

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: type[np.generic],
        limit: int,
        pin_memory: bool = False,
        *,
        shared: bool = False,
    ) -> None:
        """Keep up to `limit` arrays; more than that are made, and let go."""
        if pin_memory and not torch.cuda.is_available():
            raise UsageError("memory is pinned for a GPU to copy from, and there is none here; leave pin_memory out")
        self.shape, self.dtype, self.limit = shape, dtype, limit
        self._pin_memory, self._shared = pin_memory, shared
        self._arrays: list[Array] = []
        self._descriptors: dict[int, str] = {}  # by address

    def take(self) -> Tensor:
        """Return a tensor whose contents are arbitrary."""
        for array in self._arrays:
            if sys.getrefcount(array) == _REFERENCES_WHEN_FREE:
                return torch.from_numpy(array)
        fresh = self._make()
        if len(self._arrays) < self.limit:
            self._arrays.append(fresh)
        return torch.from_numpy(fresh)

    def clear(self) -> None:
        """Keep nothing; what somebody still holds is gone when they let go of it."""
        self._arrays.clear()

    def keeps(self, taken: Tensor) -> bool:
        """Whether the memory of a tensor of this pool will be used again, or needs nothing but memory."""
        return not self._shared or any(array.ctypes.data == taken.data_ptr() for array in self._arrays)

    def descriptor(self, taken: Tensor) -> str:
        """How another process of this machine finds the memory of a tensor of this pool, if it is shared."""
        return self._descriptors[taken.data_ptr()]

    def _make(self) -> Array:
        if self._shared:
            return self._make_shared()
        if not self._pin_memory:
            return np.empty(self.shape, self.dtype)
        kind = torch.from_numpy(np.empty(0, self.dtype)).dtype
        pinned: Array = torch.empty(self.shape, dtype=kind, pin_memory=True).numpy()
        return pinned

    def _make_shared(self) -> Array:
        block = SharedMemoryTransport().allocate(math.prod(self.shape) * np.dtype(self.dtype).itemsize)
        array: Array = np.frombuffer(block.buffer, self.dtype).reshape(self.shape)
        address: int = array.ctypes.data
        pinned = self._pin_memory and _is_pinned(address, array.nbytes)
        self._descriptors[address] = block.descriptor
        weakref.finalize(array, _let_go, block, address if pinned else None).atexit = False
        return array


def _is_pinned(address: int, num_bytes: int) -> bool:
    """Try to pin memory. A limit may forbid it: copies from it are as right without, but the host waits for them."""
    try:
        pin(address, num_bytes)
    except UsageError as error:
        log.warning("%s; batches go to the GPU without", error)
        return False
    return True


def _let_go(block: Block, pinned: int | None) -> None:
    """The last tensor in shared memory is gone: so is the block, when this returns."""
    if pinned is not None:
        unpin(pinned)


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
