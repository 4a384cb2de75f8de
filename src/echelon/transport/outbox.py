"""The messages of a connection that wait to be sent, in the order in which they leave. Pure: it sends nothing itself.

A message with a `Precedence` leaves before those that wait with a lower priority, except before a message about one of
its own keys. All others keep their order: equal priorities, messages about the same key, and messages without a
precedence, which no message overtakes. A message of which bytes have been offered to the kernel is sent to its end.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

_BATCH_BYTES = 256 << 10  # that are offered together: small messages share a call of the kernel


class Precedence(NamedTuple):
    """What allows a message to overtake others: the higher priority leaves first. `keys` are those that it is about."""

    priority: int
    keys: Sequence[int]

    def is_before(self, waiting: Precedence | None) -> bool:
        """Return whether a message of this precedence may leave before one that waits already."""
        return (
            waiting is not None
            and self.priority > waiting.priority
            and (len(self.keys) == 0 or set(self.keys).isdisjoint(waiting.keys))
        )


class _Message(NamedTuple):
    buffers: list[memoryview]
    precedence: Precedence | None


class Outbox:
    """Messages that wait to be sent, each a list of buffers."""

    def __init__(self) -> None:
        self.num_bytes = 0  # that have not been sent
        self._waiting: deque[_Message] = deque()
        self._begun: deque[memoryview] = deque()  # what is left of the messages that are being sent
        self._num_begun = 0  # bytes of these

    def __bool__(self) -> bool:
        return bool(self._begun or self._waiting)

    def put(self, buffers: Sequence[memoryview], precedence: Precedence | None = None) -> None:
        """Add a message at the place that its precedence gives it."""
        message = _Message([buffer for buffer in buffers if len(buffer)], precedence)
        self.num_bytes += sum(map(len, message.buffers))
        place = len(self._waiting)
        if precedence is not None:
            while place and precedence.is_before(self._waiting[place - 1].precedence):
                place -= 1
        self._waiting.insert(place, message)

    def first(self, max_buffers: int) -> list[memoryview]:
        """Return the bytes that leave next. From now on, their order is fixed."""
        while self._waiting and self._num_begun < _BATCH_BYTES:
            buffers = self._waiting.popleft().buffers
            self._begun += buffers
            self._num_begun += sum(map(len, buffers))
        return list(itertools.islice(self._begun, max_buffers))

    def remove(self, num_bytes: int) -> None:
        """Remove the first bytes, which have been sent."""
        self.num_bytes -= num_bytes
        self._num_begun -= num_bytes
        while num_bytes:
            buffer = self._begun[0]
            if num_bytes < len(buffer):
                self._begun[0] = buffer[num_bytes:]
                return
            num_bytes -= len(buffer)
            self._begun.popleft()

    def clear(self) -> None:
        """Remove everything."""
        self._waiting.clear()
        self._begun.clear()
        self.num_bytes = self._num_begun = 0
