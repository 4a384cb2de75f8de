"""A server answers an invalid request with Failed, changes nothing and continues."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from echelon.cluster.messages import (
    Configure,
    Done,
    Failed,
    Init,
    Place,
    Placed,
    Pull,
    Push,
    PushHeader,
    Request,
    Response,
)
from echelon.cluster.placement import KeySpec
from echelon.server.shard.shard import Shard

pytestmark = pytest.mark.numeric

SHAPE = (8, 8)


class Server:
    """A shard with one worker; its answers are recorded."""

    def __init__(self) -> None:
        self._answers: list[tuple[Response, Sequence[memoryview]]] = []
        self._shard = Shard(
            0, 1, {0: ""}, lambda _, response, frames, *_more: self._answers.append((response, frames)), lambda _: None
        )
        self.ask(Configure(1, 0, "dist_sync", None, None, "share"))
        placed = self.ask(Place(2, [KeySpec("a", SHAPE, "float32"), KeySpec("b", SHAPE, "float32")]))[0]
        assert isinstance(placed, Placed)
        values = torch.arange(128.0)
        assert self.ask(Init(3, placed.segments, placed.slots, True), values) == (Done(3), ())

    def ask(self, request: Request, frame: Tensor | None = None) -> tuple[Response, Sequence[memoryview]]:
        """Return the answer to a request with at most one frame."""
        frames = [] if frame is None else [frame.view(torch.uint8).numpy().data]
        self._shard.handle(0, request, frames)
        return self._answers.pop()

    def values(self, key: int = 0) -> Tensor:
        """Return the stored values of a key."""
        answer, frames = self.ask(Pull(99, 0, [key], True))
        assert isinstance(answer, Done)
        return torch.frombuffer(bytearray(frames[0]), dtype=torch.float32)


@pytest.mark.parametrize(
    ("request_", "length", "reason"),
    [
        (Push(7, 0, [0], PushHeader(), True, False), None, "memory for key 'a' is not attached; send frames"),
        (
            Push(7, 0, [0], PushHeader(factor_rank=1), True, False),
            None,
            "memory for key 'a' is not attached; send frames",
        ),
        (Pull(7, 0, [1], False), None, "memory for key 'b' is not attached; send frames"),
        (Push(7, 0, [0], PushHeader(), True, True), 63, "1 frames of 252 bytes; expected 1 frames of 256 bytes"),
        (Push(7, 0, [0], PushHeader(factor_rank=2), True, True), 31, "1 frames of 124 bytes; expected 1 frames of 128"),
        (Push(7, 0, [0], PushHeader(factor_rank=2), True, True), None, "0 frames of 0 bytes; expected 1 frames of 128"),
        (
            Push(7, 0, [0, 1], PushHeader(factor_rank=2), True, True),
            32,
            "a push of factors must name one key; this one names 2",
        ),
        (
            Push(7, 0, [0], PushHeader(factor_rank=5), True, True),
            80,
            "factors of rank 5 have 80 elements, its gradient 64",
        ),
        (Push(7, 0, [5], PushHeader(factor_rank=1), True, True), 16, "key number 5 is not initialised"),
    ],
)
def test_an_invalid_request_is_rejected_and_the_next_one_carried_out(
    request_: Request, length: int | None, reason: str
) -> None:
    server = Server()
    answer, _ = server.ask(request_, None if length is None else torch.ones(length))
    assert isinstance(answer, Failed)
    assert reason in answer.reason
    assert torch.equal(server.values(), torch.arange(64.0))
    left, right = torch.arange(8.0), torch.arange(1.0, 9.0)
    answer, frames = server.ask(Push(8, 0, [0], PushHeader(factor_rank=1), True, True), torch.cat([left, right]))
    assert isinstance(answer, Done)
    product = torch.frombuffer(bytearray(frames[0]), dtype=torch.float32).view(SHAPE)
    assert torch.equal(product, torch.outer(left, right)), "without an optimizer, the sum replaces the value"
