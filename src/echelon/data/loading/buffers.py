"""Buffers for batches, which are reused when nothing refers to them any more.

A fresh batch of 64 x 3 x 224 x 224 floats is 38 MB of pages that the kernel must zero, which takes about 5 ms per
batch. A pool keeps the pages instead. The array under a tensor is free again when the last tensor that refers to it is
gone, which its reference count tells. A consumer that keeps batches gets new memory, so nothing is overwritten.

A GPU copies from pinned memory in parallel with the host's work. Such a copy is still running when the call that
started it returns, so the caller holds the memory until the copy is done (`CopiesInFlight`).

Buffers that decode processes fill are in shared memory; `descriptor` is what the processes attach them by.
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

from echelon.errors import UsageError
from echelon.transport.interface import Block
from echelon.transport.shared_memory import SharedMemoryTransport

log = logging.getLogger(__name__)

_REFERENCES_WHEN_FREE = 3  # the pool's list, the loop variable, the call's argument

Array: TypeAlias = NDArray[Any]


def pin(address: int, num_bytes: int) -> None:
    """Pin memory that is already allocated, so that a GPU copies from and to it asynchronously."""
    status = torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0)
    if int(status):
        raise UsageError(f"CUDA cannot pin {num_bytes} bytes: {status}")


def unpin(address: int) -> None:
    """Undo `pin`."""
    torch.cuda.cudart().cudaHostUnregister(address)


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
        """Keep up to `limit` arrays for reuse; further ones are freed after use."""
        if pin_memory and not torch.cuda.is_available():
            raise UsageError("pin_memory needs a GPU, and this machine has none; leave pin_memory out")
        self.shape, self.dtype, self.limit = shape, dtype, limit
        self._pin_memory, self._shared = pin_memory, shared
        self._arrays: list[Array] = []
        self._descriptors: dict[int, str] = {}  # by address

    def take(self) -> Tensor:
        """Return a tensor whose contents are arbitrary."""
        for array in self._arrays:
            if sys.getrefcount(array) == _REFERENCES_WHEN_FREE:
                return torch.from_numpy(array)
        fresh = self._allocate()
        if len(self._arrays) < self.limit:
            self._arrays.append(fresh)
        return torch.from_numpy(fresh)

    def clear(self) -> None:
        """Free all buffers; those still in use are freed when their last tensor is gone."""
        self._arrays.clear()

    def will_reuse(self, taken: Tensor) -> bool:
        """Whether the pool keeps the memory of a tensor it gave out, or that is ordinary memory."""
        return not self._shared or any(array.ctypes.data == taken.data_ptr() for array in self._arrays)

    def descriptor(self, taken: Tensor) -> str:
        """Return the descriptor by which another process on this machine attaches the memory of a shared tensor."""
        return self._descriptors[taken.data_ptr()]

    def _allocate(self) -> Array:
        if self._shared:
            return self._allocate_shared()
        if not self._pin_memory:
            return np.empty(self.shape, self.dtype)
        kind = torch.from_numpy(np.empty(0, self.dtype)).dtype
        pinned: Array = torch.empty(self.shape, dtype=kind, pin_memory=True).numpy()
        return pinned

    def _allocate_shared(self) -> Array:
        block = SharedMemoryTransport().allocate(math.prod(self.shape) * np.dtype(self.dtype).itemsize)
        array: Array = np.frombuffer(block.buffer, self.dtype).reshape(self.shape)
        address: int = array.ctypes.data
        pinned = self._pin_memory and _try_pin(address, array.nbytes)
        self._descriptors[address] = block.descriptor
        weakref.finalize(array, _free, block, address if pinned else None).atexit = False
        return array


def _try_pin(address: int, num_bytes: int) -> bool:
    """Try to pin memory. A system limit may forbid it; copies then still work, but block the host."""
    try:
        pin(address, num_bytes)
    except UsageError as error:
        log.warning("%s; batches are copied to the GPU from unpinned memory", error)
        return False
    return True


def _free(block: Block, pinned: int | None) -> None:
    """Unpin a shared block whose last tensor is gone; `block` itself is freed when this call returns."""
    if pinned is not None:
        unpin(pinned)


class CopyEvent(Protocol):
    """Tells when a copy is done: a torch.cuda.Event recorded after it."""

    def query(self) -> bool:
        """Whether the copy is done."""

    def synchronize(self) -> None:
        """Wait until it is done."""


class CopiesInFlight:
    """Holds memory that is being copied until the copies are done. They finish in the order they started in."""

    def __init__(self, limit: int) -> None:
        """If more than `limit` copies are in flight, wait for the oldest, because the bus is the bottleneck then."""
        self._limit = limit
        self._held: deque[tuple[Tensor, CopyEvent]] = deque()

    def hold(self, memory: Tensor, event: CopyEvent) -> None:
        """Hold memory that a copy has just started to read, and release the memory of finished copies."""
        self._held.append((memory, event))
        while self._held and self._held[0][1].query():
            self._held.popleft()
        if len(self._held) > self._limit:
            self._finish_oldest()

    def wait(self) -> None:
        """Wait for all copies and release their memory."""
        while self._held:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        self._held[0][1].synchronize()
        self._held.popleft()
