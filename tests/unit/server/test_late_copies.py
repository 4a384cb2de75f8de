"""A copy of a request that arrives after later requests: it is answered, and it has no effect."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from echelon.cluster.messages import (
    Configure,
    Done,
    Failed,
    Init,
    Pause,
    Place,
    Placed,
    Pull,
    Push,
    PushHeader,
    Request,
    Response,
    Resume,
    Resumed,
)
from echelon.cluster.placement import KeySpec
from echelon.server.shard.shard import Shard


class Server:
    """A shard with one worker and one key of 64 zeros."""

    def __init__(self) -> None:
        self._answers: list[tuple[Response, Sequence[memoryview]]] = []
        self._shard = Shard(
            0, 1, {0: ""}, lambda _, response, frames, *_more: self._answers.append((response, frames)), lambda _: None
        )
        self.ask(Configure(1, 0, "dist_sync", None, None, "share"))
        placed = self.ask(Place(2, [KeySpec("a", (64,), "float32")]))
        assert isinstance(placed, Placed)
        self.placed = placed
        self.init(3, 0.0)

    def ask(self, request: Request, value: float | None = None) -> Response:
        """Return the answer to a request, with a frame of 64 equal values."""
        frames = [] if value is None else [torch.full((64,), value).view(torch.uint8).numpy().data]
        self._shard.handle(0, request, frames)
        return self._answers.pop()[0]

    def init(self, number: int, value: float) -> None:
        """Give the key a value."""
        init = Init(number, self.placed.segments, self.placed.slots, True, overwrite=True)
        assert self.ask(init, value) == Done(number)

    def push(self, number: int, clock: int, value: float) -> Response:
        """Push a gradient; without an optimizer, the sum of all gradients becomes the value."""
        return self.ask(Push(number, clock, [0], PushHeader(), False, True), value)

    def value(self) -> float:
        """Return the value of the key."""
        self._shard.handle(0, Pull(99, 0, [0], True), [])
        return float(torch.frombuffer(bytearray(self._answers.pop()[1][0]), dtype=torch.float32)[0])


def test_a_late_copy_of_an_overwrite_does_not_undo_later_ones() -> None:
    server = Server()
    server.init(10, 1.0)
    server.init(11, 2.0)
    server.init(10, 1.0)
    assert server.value() == 2.0


def test_a_late_copy_of_pause_does_not_pause_a_worker_that_has_resumed() -> None:
    server = Server()
    assert server.ask(Pause(10)) == Done(10)
    assert isinstance(server.ask(Resume(11)), Resumed)
    assert server.ask(Pause(10)) == Done(10)
    assert not isinstance(server.push(12, 0, 1.0), Failed)


def test_a_late_copy_of_resume_does_not_end_a_later_pause() -> None:
    server = Server()
    server.ask(Pause(10))
    first = server.ask(Resume(11))
    server.ask(Pause(12))
    assert server.ask(Resume(11)) == first
    refused = server.push(13, 0, 1.0)
    assert isinstance(refused, Failed)
    assert "retired" in refused.reason


def test_a_refused_request_is_refused_again() -> None:
    server = Server()
    wrong = Init(10, server.placed.segments, [*server.placed.slots, *server.placed.slots], True)
    first = server.ask(wrong, 1.0)
    assert isinstance(first, Failed)
    assert server.ask(wrong, 1.0) == first


@pytest.mark.parametrize("count", [1025])
def test_only_a_limited_number_is_remembered(count: int) -> None:
    server = Server()
    for number in range(count):
        server.init(100 + number, float(number))
    assert server.value() == count - 1
    assert len(server._shard._workers[0].changes) == 1024
