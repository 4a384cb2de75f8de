"""How the parts of a server answer a worker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from echelon.cluster.messages import Response
from echelon.transport.outbox import Precedence


class Answer(Protocol):
    """Sends a response to a worker."""

    def __call__(
        self, worker: int, response: Response, frames: Sequence[memoryview], precedence: Precedence | None = None, /
    ) -> None: ...
