"""What a worker sends to which server: shared memory or frames, clocks, messages, and the memory of weights."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from fake_servers import Answer, FakeServers, FakeSession, RecordingLog
from torch import Tensor

from echelon.cluster.messages import Attach, Done, Failed, Init, Pull, Push, PushHeader, Request
from echelon.cluster.placement import MIN_STRIPE, KeySpec, Slot
from echelon.errors import JobError, UsageError
from echelon.kvstore.servers import wire as wire_module
from echelon.kvstore.servers.client import Client
from echelon.kvstore.servers.wire import Wire
from echelon.transport.in_process import InProcessTransport
from echelon.transport.outbox import Precedence


class Setup:
    """A wire to `num_servers` servers that map this worker's memory, or (`framed`) cannot."""

    def __init__(self, num_servers: int = 1, *, framed: bool = False, timeout_s: float = 60.0) -> None:
        self.framed = framed
        self.answering = True
        self.servers = FakeServers(num_servers, self._answer)
        self.log = RecordingLog()
        client = Client(self.servers, FakeSession(), self.log, 10.0, timeout_s)
        self.wire = Wire(client, num_servers, InProcessTransport(), self.log)

    def place(self, *lengths: int) -> list[Slot]:
        return self.wire.place([KeySpec(str(index), (length,), "float32") for index, length in enumerate(lengths)])

    def pushes(self) -> list[tuple[int, Push, list[bytes]]]:
        return self.servers.requests(Push)

    def _answer(self, server: int, request: Request) -> Answer | None:
        if isinstance(request, Attach) and self.framed:
            return Failed(request.id, "another machine")
        return Done(request.id) if self.answering or isinstance(request, Attach | Init) else None


def numbers(length: int, start: int = 0) -> Tensor:
    return torch.arange(start, start + length, dtype=torch.float32)


def elements(frames: Sequence[bytes]) -> Tensor:
    return torch.frombuffer(bytearray(b"".join(frames)), dtype=torch.float32)


def test_every_server_is_offered_the_memory_of_new_keys_once() -> None:
    setup = Setup(num_servers=3)
    setup.place(10, 20)
    setup.place(10, 20)
    offers = setup.servers.requests(Attach)
    assert [server for server, _, _ in offers] == [0, 1, 2]
    assert setup.wire.memory_is_shared
    assert len(setup.wire.mirrors) == 1


def test_a_server_that_cannot_map_the_memory_gets_frames() -> None:
    setup = Setup(framed=True)
    setup.place(10)
    assert not setup.wire.memory_is_shared
    assert [kind for kind, _ in setup.log.events] == ["frames"]


# --- push


def test_a_push_through_shared_memory_has_no_frames() -> None:
    setup = Setup()
    slots = setup.place(10, 20)
    tickets = setup.wire.push(slots, [numbers(10), numbers(20)], PushHeader(4.0, [0.1]), pull=True)
    ((server, message, frames),) = setup.pushes()
    assert (server, frames) == (0, [])
    assert message == Push(tickets[0].id, 0, [0, 1], PushHeader(4.0, [0.1]), pull=True, framed=False)
    assert torch.equal(setup.wire.gradient(slots[1]), numbers(20))


def test_only_pushes_and_pulls_may_overtake_others() -> None:
    """A push is known to the server before it is asked about it, and keys exist before they are pushed."""
    setup = Setup(framed=True)
    slots = setup.place(10, 20)
    setup.wire.init(slots, [numbers(10), numbers(20)])
    before = len(setup.servers.sent)
    assert setup.servers.precedences == [None] * before
    setup.wire.push(slots, [numbers(10), numbers(20)], pull=True, priority=3)
    setup.wire.pull(slots[1:], priority=-2)
    assert setup.servers.precedences[before:] == [Precedence(3, [0, 1]), Precedence(-2, [1])]
    assert [request.priority for _, request, _ in setup.servers.requests(Push | Pull)] == [3, -2]


def test_frames_hold_each_server_s_part_of_every_key() -> None:
    setup = Setup(num_servers=2, framed=True)
    lengths = (100, 3 * MIN_STRIPE, 64)
    slots = setup.place(*lengths)
    values = [numbers(length, start) for length, start in zip(lengths, (0, 1000, 90_000), strict=True)]
    setup.wire.push(slots, values, pull=False)
    assert [server for server, _, _ in setup.pushes()] == [0, 1]
    sent = torch.cat([elements(frames) for _, _, frames in setup.pushes()])
    wanted = torch.cat(values)
    assert torch.equal(sent[sent > 0].sort().values, wanted[wanted > 0].sort().values), "each element once"
    for server, message, frames in setup.pushes():
        assert message.framed
        pieces = [(slot, piece) for slot in slots for piece in setup.wire.layout.pieces(slot, server)]
        assert message.keys == list(dict.fromkeys(slot.key for slot, _ in pieces))
        expected = [setup.wire.mirrors[0].gradients[piece.start : piece.stop] for _, piece in pieces]
        assert torch.equal(elements(frames), torch.cat(expected))


def test_values_of_a_key_whose_last_push_is_not_answered_are_sent_as_copies() -> None:
    """Servers may still read the first gradient from the shared memory."""
    setup = Setup()
    (slot,) = setup.place(10)
    setup.answering = False
    setup.wire.push([slot], [numbers(10)], pull=False)
    setup.wire.push([slot], [numbers(10, 50)], pull=False)
    assert torch.equal(setup.wire.gradient(slot), numbers(10))
    (_, first, _), (_, second, frames) = setup.pushes()
    assert (first.framed, second.framed) == (False, True)
    assert torch.equal(elements(frames)[:10], numbers(10, 50))
    assert (first.clock, second.clock) == (0, 1)


def test_the_padding_of_copies_is_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers read it for norms, and to find NaN."""
    monkeypatch.setattr(
        "echelon.server.storage.memory.torch.empty", lambda size, dtype: torch.full((size,), torch.nan, dtype=dtype)
    )
    setup = Setup()
    (slot,) = setup.place(10)
    setup.answering = False
    setup.wire.push([slot], [numbers(10)], pull=False)
    setup.wire.push([slot], [numbers(10, 50)], pull=False)
    assert torch.equal(elements(setup.pushes()[1][2])[10:], torch.zeros(54))


def test_a_worker_that_does_not_pull_waits_before_it_is_too_far_ahead() -> None:
    setup = Setup(timeout_s=0.2)
    (slot,) = setup.place(10)
    setup.answering = False
    for _ in range(1 + wire_module.MAX_UNANSWERED):  # the first one is not a copy
        setup.wire.push([slot], [numbers(10)], pull=False)
    with pytest.raises(JobError, match="no answer in"):
        setup.wire.push([slot], [numbers(10)], pull=False)
    for _, message, _ in setup.pushes():
        setup.servers.deliver(0, Done(message.id))
    setup.wire.push([slot], [numbers(10)], pull=False)
    assert len(setup.pushes()) == 2 + wire_module.MAX_UNANSWERED


def test_a_push_without_values_sends_what_is_in_memory() -> None:
    setup = Setup(framed=True)
    (slot,) = setup.place(10)
    setup.wire.gradient(slot).copy_(numbers(10, 7))
    setup.wire.push([slot], None, pull=False)
    assert torch.equal(elements(setup.pushes()[0][2])[:10], numbers(10, 7))


def test_every_server_gets_both_factors_whole() -> None:
    setup = Setup(num_servers=2, framed=True)
    (slot,) = setup.wire.place([KeySpec("weight", (128, 128), "float32")])
    factors = numbers(2 * (128 + 128), 1)
    setup.wire.gradient(slot).view(-1)[: factors.numel()] = factors
    setup.wire.push([slot], None, PushHeader(factor_rank=2), pull=False)
    assert [server for server, _, _ in setup.pushes()] == [0, 1]
    for _, message, frames in setup.pushes():
        assert message.header.factor_rank == 2
        assert torch.equal(elements(frames), factors)


@pytest.mark.parametrize(("framed", "keys"), [(True, [[0, 1], [2], [3]]), (False, [[0, 1, 2, 3]])])
def test_only_framed_pushes_are_divided_into_messages(
    framed: bool, keys: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire_module, "MESSAGE_BYTES", 1024)
    setup = Setup(framed=framed)
    slots = setup.place(128, 128, 256, 1000)
    setup.wire.push(slots, None, pull=False)
    assert [message.keys for _, message, _ in setup.pushes()] == keys


def test_keys_at_different_clocks_go_in_different_messages() -> None:
    setup = Setup()
    slots = setup.place(10, 10, 10)
    setup.wire.push([slots[1]], None, pull=False)
    setup.wire.push(slots, None, pull=False)
    assert [(message.clock, message.keys) for _, message, _ in setup.pushes()] == [(0, [1]), (0, [0, 2]), (1, [1])]


def test_waiting_for_pushes_raises_a_refusal() -> None:
    setup = Setup()
    (slot,) = setup.place(10)
    setup.answering = False
    (ticket,) = setup.wire.push([slot], None, pull=False)
    assert setup.wire.last_pushes([slot]) == [ticket]
    setup.servers.deliver(0, Failed(ticket.id, "no"))
    with pytest.raises(UsageError, match="worker 0: no"):
        setup.wire.wait_for_pushes()
    setup.wire.wait_for_pushes()
    assert setup.wire.last_pushes([slot]) == []


# --- init and pull


@pytest.mark.parametrize("framed", [True, False])
def test_init_sends_the_values_as_weights(framed: bool) -> None:
    setup = Setup(framed=framed)
    slots = setup.place(10)
    setup.wire.init(slots, [numbers(10)], overwrite=True)
    ((_, message, frames),) = setup.servers.requests(Init)
    assert (message.slots, message.framed, message.overwrite) == (slots, framed, True)
    assert torch.equal(setup.wire.weight(slots[0]), numbers(10))
    assert not framed or torch.equal(elements(frames)[:10], numbers(10))


@pytest.mark.parametrize("by", ["pull", "push"])
def test_weights_in_frames_arrive_in_memory(by: str) -> None:
    setup = Setup(framed=True)
    (slot,) = setup.place(64)
    setup.answering = False
    (ticket,) = setup.wire.pull([slot]) if by == "pull" else setup.wire.push([slot], None, pull=True)
    setup.servers.deliver(0, (Done(ticket.id), [numbers(64, 3).numpy().tobytes()]))
    setup.wire._client.wait([ticket])
    assert torch.equal(setup.wire.weight(slot), numbers(64, 3))


def test_a_pull_asks_at_the_clock_after_the_last_push() -> None:
    setup = Setup()
    slots = setup.place(10, 10)
    setup.wire.push(slots, None, pull=False)
    setup.wire.push(slots, None, pull=False)
    setup.wire.pull(slots)
    ((_, message, _),) = setup.servers.requests(Pull)
    assert (message.clock, message.keys) == (2, [0, 1])
