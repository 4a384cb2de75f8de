"""`local` and `device`: the same store and the same shard, joined by a function call instead of a network."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from echelon.cluster.messages import Response, decode_request, encode
from echelon.server.shard import Shard
from echelon.transport.in_process import InProcessTransport
from echelon.transport.interface import Buffer, Peer, Placer


class Loopback:
    """An endpoint whose one server acts while `send` is called."""

    address = ""
    placer: Placer | None = None

    def __init__(self, transport: InProcessTransport) -> None:
        self._answers: deque[list[memoryview]] = deque()
        self._shard = Shard(0, 1, [0], self._take, transport.attach)

    def send(self, peer: Peer, frames: Sequence[Buffer]) -> None:
        """Carry a request out at once."""
        first, *rest = (memoryview(frame).cast("B") for frame in frames)
        self._shard.handle(0, decode_request(first), rest)

    def recv(self, timeout_s: float) -> tuple[Peer, list[memoryview]] | None:
        """The next answer; there is nobody to wait for."""
        return (0, self._answers.popleft()) if self._answers else None

    def wake(self) -> None:
        """Nobody waits."""

    def close(self) -> None:
        """Nothing to let go."""
        self._answers.clear()

    def _take(self, worker: int, response: Response, frames: Sequence[memoryview]) -> None:
        self._answers.append([memoryview(encode(response)), *(frame.cast("B") for frame in frames)])
