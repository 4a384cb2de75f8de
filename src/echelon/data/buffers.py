"""Memory for batches, used again once nobody holds the last one that was in it.

A fresh batch of 64 x 3 x 224 x 224 floats is 38 MB of pages that the kernel must zero, about 5 ms on every batch, and
they go back to it each time. Here the pages stay: the array under a tensor is free again when the last tensor that
looks into it is gone, which its reference count says. A consumer that keeps batches gets new memory; nothing is
overwritten.
Pinned memory is left to torch, whose allocator also waits for copies that are still under way.
"""

from __future__ import annotations

import sys

import numpy as np
import torch
from torch import Tensor

_REFERENCES_WHEN_FREE = 3  # the pool's list, the loop variable, the call's argument


class BufferPool:
    """Tensors of one shape and type. For one thread."""

    def __init__(self, shape: tuple[int, ...], dtype: type[np.generic], limit: int, pin_memory: bool = False) -> None:
        """Keep up to `limit` arrays; more than that are made, and let go."""
        self._shape, self._dtype, self._limit, self._pin_memory = shape, dtype, limit, pin_memory
        self._arrays: list[np.ndarray[tuple[int, ...], np.dtype[np.generic]]] = []

    def take(self) -> Tensor:
        """Return a tensor whose contents are arbitrary."""
        if self._pin_memory:
            kind = torch.from_numpy(np.empty(0, self._dtype)).dtype
            return torch.empty(self._shape, dtype=kind, pin_memory=True)
        for array in self._arrays:
            if sys.getrefcount(array) == _REFERENCES_WHEN_FREE:
                return torch.from_numpy(array)
        fresh = np.empty(self._shape, self._dtype)
        if len(self._arrays) < self._limit:
            self._arrays.append(fresh)
        return torch.from_numpy(fresh)
