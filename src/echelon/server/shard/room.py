"""How much memory a server gives to gradients that wait for other workers, and who has to wait when it is used up.

Over TCP a push brings its gradient, and a server keeps it until all workers of the round have pushed. A worker that is
ahead of the others would fill the memory. When the gradients that wait exceed a limit, the server does not read the
next push of a worker that nothing waits for; its bytes stay in that worker's memory. A push that completes a round, or
that a request of another worker waits for, is always read. Other workers may also wait for a push that comes later on
the same connection, if the workers push in different orders: for these, twice the limit is used.

Programs can also wait for each other elsewhere, for example at a barrier, so a push is delayed for `LONGEST_S` at most.
Hence every push is read in the end: the limit can delay, but never block.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable

from echelon.system import machine_memory
from echelon.transport.interface import Peer

LONGEST_S = 5.0
LEAST_BYTES = 256 << 20


def default_limit() -> int:
    """Return the bytes that may wait on one server process: an eighth of the memory of the machine."""
    return max(LEAST_BYTES, machine_memory() // 8)


class Need(enum.Enum):
    """What goes on when the next push of a connection is read."""

    NONE = enum.auto()
    LATER = enum.auto()  # something waits for a message that comes after it
    THIS = enum.auto()  # something waits for this push


class Room:
    """Decides whether the frames of a push are read now."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_deferred = 0
        self._since: dict[Peer, float] = {}  # when the next push of a connection was first deferred

    def admits(self, peer: Peer, num_bytes: int, held_bytes: int, need_for: Callable[[], Need], now: float) -> bool:
        """Return whether a push of some bytes is read, while others of `held_bytes` wait."""
        if not held_bytes or held_bytes + num_bytes <= self._limit(held_bytes + num_bytes, need_for):
            self._since.pop(peer, None)
            return True
        since = self._since.get(peer)
        if since is None:
            self._since[peer] = now
            self.num_deferred += 1
        elif now - since >= LONGEST_S:
            del self._since[peer]
            return True
        return False

    def _limit(self, wanted: int, need_for: Callable[[], Need]) -> float:
        """Return the limit for a push; its need is computed only if it matters."""
        if wanted <= self.max_bytes:
            return self.max_bytes
        return {Need.NONE: self.max_bytes, Need.LATER: 2 * self.max_bytes, Need.THIS: math.inf}[need_for()]
