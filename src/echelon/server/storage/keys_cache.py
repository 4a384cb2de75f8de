"""A cache of what follows from a list of keys, because requests repeat the same lists. Its memory is limited."""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")

MAX_LISTS = 4096
MAX_KEYS = 1 << 20  # of all lists together


class KeysCache(Generic[T]):
    """Values by list of keys. When it is full, all are forgotten."""

    def __init__(self) -> None:
        self._values: dict[tuple[int, ...], T] = {}
        self._num_keys = 0
        self.get = self._values.get

    def put(self, keys: tuple[int, ...], value: T) -> None:
        """Store the value of a list of keys."""
        if len(self._values) >= MAX_LISTS or self._num_keys + len(keys) > MAX_KEYS:
            self.clear()
        self._values[keys] = value
        self._num_keys += len(keys)

    def clear(self) -> None:
        """Forget all values."""
        self._values.clear()
        self._num_keys = 0
