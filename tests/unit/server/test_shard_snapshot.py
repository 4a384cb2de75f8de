"""The state of a shard that another server takes over while pushes wait for their round."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest
import torch

from echelon.cluster.messages import (
    Attach,
    Configure,
    Failed,
    Init,
    OpenShard,
    Place,
    Placed,
    Pull,
    Push,
    PushHeader,
    Replicate,
    Request,
    Response,
    Retire,
    decode_request,
    encode,
)
from echelon.cluster.placement import KeySpec
from echelon.server.shard.shard import Shard
from echelon.server.shard.snapshot import inputs_of
from echelon.server.slices.hosted_slice import HostedSlice
from echelon.transport.interface import Buffer, private_memory

Answers = list[tuple[Response, Sequence[memoryview]]]
WORKERS = [0, 1, 2]
SIZE = 64


def frame(value: float) -> memoryview:
    return memoryview(torch.full((SIZE,), value).view(torch.uint8).numpy().data)


class Server:
    """A shard of three workers in lock-step with one key. Without an optimizer, the sum of gradients is its value."""

    def __init__(self) -> None:
        self.answers: Answers = []
        self.memory: dict[str, memoryview] = {}  # of worker 1
        self.shard = self._empty(dict.fromkeys(WORKERS, ""))

    def _empty(self, workers: Mapping[int, str]) -> Shard:
        answer: Callable[..., None] = lambda _, response, frames, *_more: self.answers.append((response, frames))  # noqa: E731
        return Shard(0, 1, workers, answer, lambda name: self.memory.get(name))

    def set_up(self) -> None:
        for worker in WORKERS:
            self.take(worker, Configure(1, worker, "dist_sync", None, None, "share"))
        placed = self.take(0, Place(2, [KeySpec("a", (SIZE,), "float32")]))
        assert isinstance(placed, Placed)
        self.take(0, Init(3, placed.segments, placed.slots, True), frame(0.0))
        segment = placed.segments[0]
        self.memory |= {name: private_memory(4 * segment.capacity) for name in ("gradients", "weights")}
        self.take(1, Attach(4, segment, "gradients", "weights"))

    def take(self, worker: int, request: Request, *frames: memoryview) -> Response | None:
        """Carry out a request, and return the answer if there is one now."""
        self.answers.clear()
        self.shard.handle(worker, request, frames)
        assert not any(isinstance(answer, Failed) for answer, _ in self.answers), self.answers
        return self.answers[-1][0] if self.answers else None

    def push(self, worker: int, clock: int, value: float, samples: float | None = None) -> None:
        self.take(worker, Push(10 + clock, clock, [0], PushHeader(samples), False, True), frame(value))

    def push_in_memory(self, worker: int, clock: int, value: float) -> None:
        self.memory["gradients"][: 4 * SIZE] = frame(value)
        self.take(worker, Push(10 + clock, clock, [0], PushHeader(), False, False))

    def value(self) -> float:
        self.take(0, Pull(99, 0, [0], True))
        return float(torch.frombuffer(bytearray(self.answers[-1][1][0]), dtype=torch.float32)[0])

    def copied(self) -> Server:
        """Return a server that has got the state of this one."""
        other = Server()
        other.memory = self.memory
        other.shard.is_passive = True
        for worker, request, frames in inputs_of(self.shard):
            if isinstance(request, OpenShard):
                other.shard = other._empty(request.workers)
            else:
                other.take(worker, request, *frames)
        return other


@pytest.mark.parametrize("in_memory", [False, True])
@pytest.mark.parametrize("leaves", [True, False])
def test_a_push_of_a_worker_that_left_or_retired_still_counts(in_memory: bool, leaves: bool) -> None:
    server = Server()
    server.set_up()
    (server.push_in_memory if in_memory else server.push)(1, 0, 5.0)
    if leaves:
        server.shard.leave(1, view=2)
    else:
        server.take(1, Retire(50))
    copy = server.copied()
    for one in (server, copy):
        one.push(0, 0, 1.0)
        one.push(2, 0, 2.0)
        assert one.value() == 8.0


def test_an_empty_push_of_a_worker_that_left_is_not_kept_after_its_round() -> None:
    server = Server()
    server.set_up()
    server.push(1, 0, 0.0, samples=0)
    server.push(0, 0, 1.0, samples=1)
    server.push(2, 0, 1.0, samples=1)
    server.shard.leave(1, view=2)
    assert server.shard.requests is not None
    assert not server.shard.requests.holds_gradients
    assert server.copied().value() == 1.0


def test_an_empty_push_waits_for_its_round_in_the_copy_too() -> None:
    server = Server()
    server.set_up()
    server.push(1, 0, 0.0, samples=0)
    copy = server.copied()
    for one in (server, copy):
        one.push(0, 0, 2.0, samples=1)
        one.push(2, 0, 4.0, samples=1)
        assert one.value() == 3.0


def test_a_worker_that_was_removed_may_write_to_its_memory_while_its_push_waits() -> None:
    server = Server()
    server.set_up()
    server.push_in_memory(1, 0, 5.0)
    server.shard.leave(1, view=2)
    server.memory["gradients"][: 4 * SIZE] = frame(100.0)
    server.push(0, 0, 1.0)
    server.push(2, 0, 2.0)
    assert server.value() == 8.0


@pytest.mark.parametrize("catches_up", [True, False])
def test_what_a_backup_gets_does_not_change_with_the_workers_memory(catches_up: bool) -> None:
    """While a new backup catches up, workers are answered at once, and write their next gradients."""
    server = Server()
    server.set_up()
    hosted = HostedSlice(0, lambda *_: server.shard, lambda *_: None, is_primary=True)
    hosted.shards[0] = server.shard
    sent: list[list[Buffer]] = []
    hosted.use_backup(lambda frames: sent.append(list(frames)), 0.0)
    assert hosted.stream is not None
    hosted.stream.holds_answers = not catches_up
    hosted._framed.clear()  # the backup has mapped the memory
    sent.clear()
    server.memory["gradients"][: 4 * SIZE] = frame(5.0)
    push = Push(10, 0, [0], PushHeader(), False, False)
    hosted.take(0, 1, push, encode(push), (), 0.0)
    server.memory["gradients"][: 4 * SIZE] = frame(100.0)
    ((head, *frames),) = sent
    replicated = decode_request(bytes(head))
    assert isinstance(replicated, Replicate)
    forwarded = decode_request(replicated.body)
    assert isinstance(forwarded, Push)
    assert (forwarded.framed, [bytes(one) for one in frames]) == (catches_up, [bytes(frame(5.0))] * catches_up)
