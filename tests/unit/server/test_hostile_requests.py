"""Requests that no correct worker sends: each is rejected before it has changed anything, and the server goes on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from echelon.cluster.messages import (
    ApplyScaled,
    Ask,
    Attach,
    Configure,
    Done,
    Failed,
    Gather,
    Init,
    MeasureNorm,
    OptimizerSpec,
    Pause,
    Place,
    Placed,
    Pull,
    Push,
    PushHeader,
    PutStates,
    Request,
    Response,
    Retire,
    SetOptimizer,
    StateEntry,
    Status,
    decode_request,
    encode,
    request_id,
)
from echelon.cluster.placement import SMALL_SEGMENT, KeySpec, Segment, Slot
from echelon.kvstore.optimizer_spec import spec_by_name
from echelon.server.shard import pending_requests, waiting_requests
from echelon.server.shard.frame_limits import BASE_BYTES, frame_limits
from echelon.server.shard.shard import Shard
from echelon.transport.in_process import InProcessTransport

LENGTH = 64
SEGMENT = Segment(0, "float32", SMALL_SEGMENT, 4096)
SPEC = KeySpec("a", (LENGTH,), "float32")
SLOT = Slot(0, SPEC, 0, 0, LENGTH, LENGTH)
NEW = Slot(2, KeySpec("new", (LENGTH,), "float32"), 0, 2 * LENGTH, LENGTH, LENGTH)


class Server:
    """Shard 1 of 2, so that workers tell it where keys are, with two workers and the keys 'a' and 'b'."""

    def __init__(self, rank: int = 1, store: str = "dist_sync") -> None:
        self.answers: list[tuple[int, Response, Sequence[memoryview]]] = []
        self.transport = InProcessTransport()
        workers = {0: "", 1: ""}
        self.shard = Shard(rank, 2, workers, lambda *answer: self.answers.append(answer[:3]), self.transport.attach)
        self.ask(Configure(1, 0, store, None, None, "share"))
        other = Slot(1, KeySpec("b", (LENGTH,), "float32"), 0, LENGTH, LENGTH, LENGTH)
        frame = torch.arange(2.0 * LENGTH) if rank == self.server_of_keys() else None
        if rank == 0:
            self.ask(Place(2, [SPEC, other.spec]))
        frames = [] if frame is None else [frame.view(torch.uint8).numpy().data]
        assert isinstance(self.ask(Init(3, [SEGMENT], [SLOT, other], True), frames), Done)

    def server_of_keys(self) -> int:
        return 0  # stripe 0 of segment 0

    def ask(self, request: Request, frames: Sequence[Any] = (), worker: int = 0) -> Response | None:
        """Return the answer to a request, or None if it waits."""
        before = len(self.answers)
        self.shard.handle(worker, request, [memoryview(frame) for frame in frames])
        return self.answers[-1][1] if len(self.answers) > before else None

    def state(self) -> object:
        """Return what a rejected request must not change."""
        requests = self.shard.requests
        assert requests is not None
        layout = self.shard.layout
        return (
            list(layout.segments),
            dict(layout.slots),
            dict(layout._by_name),
            {index: list(ranges) for index, ranges in layout._ranges.items() if ranges},
            layout._num_bytes,
            list(requests.lanes.all()),
            {index: len(weights) for index, weights in self.shard.storage._weights.items()},
            dict(requests._gradients),
            {worker: dict(pending) for worker, pending in requests.waiting.by_worker.items() if pending},
        )


def rejected(server: Server, request: Request, frames: Sequence[Any] = ()) -> str:
    """Check that a request is rejected and changes nothing. Return the reason."""
    before = server.state()
    answer = server.ask(request, frames)
    assert isinstance(answer, Failed), answer
    assert server.state() == before
    return answer.reason


@pytest.mark.parametrize(
    ("segments", "slots", "reason"),
    [
        ([replace(SEGMENT, stripe=8192)], [NEW], "segment 0 is Segment"),
        ([SEGMENT, replace(SEGMENT, index=2)], [NEW], "cannot be segment 1"),
        ([SEGMENT, Segment(1, "float32", 4096, 0)], [replace(NEW, segment=1, start=0, server=7)], "cannot be Slot"),
        ([SEGMENT, Segment(1, "float32", 4096, 64)], [], "cannot be segment 1"),
        ([SEGMENT, Segment(1, "complex64", SMALL_SEGMENT, 4096)], [], "cannot be segment 1"),
        ([SEGMENT, Segment(1, "float32", 1 << 60, 0)], [], "cannot be segment 1"),
        ([SEGMENT, Segment(1, "float32", 1 << 39, 0)], [], "the keys need 2199.0 GB"),
        ([SEGMENT, Segment(1, "float32", 4096, 64, 7)], [], "cannot be segment 1"),
        ([SEGMENT], [replace(NEW, start=SMALL_SEGMENT)], "cannot be Slot"),
        ([SEGMENT], [replace(NEW, start=1)], "cannot be Slot"),
        ([SEGMENT], [replace(NEW, start=LENGTH)], "belong to another key"),
        ([SEGMENT], [replace(NEW, length=LENGTH + 1)], "cannot be Slot"),
        ([SEGMENT], [replace(NEW, padded=1 << 30)], "cannot be Slot"),
        ([SEGMENT], [replace(NEW, segment=5)], "only 1 segments exist"),
        ([SEGMENT], [replace(NEW, key=0)], "is on the servers"),
        ([SEGMENT], [replace(NEW, spec=replace(NEW.spec, name="a"))], "is on the servers"),
        ([SEGMENT], [replace(NEW, spec=replace(NEW.spec, dtype="int8"))], "cannot be Slot"),
        ([SEGMENT], [replace(NEW, spec=replace(NEW.spec, dtype="odd"))], "dtype odd cannot be stored"),
        ([SEGMENT], [replace(NEW, spec=replace(NEW.spec, shape=(1 << 61, 1 << 61)))], "at most"),
        ([SEGMENT], [NEW, NEW], "names a key twice"),
        ([SEGMENT, Segment(1, "float32", 4096, 0)], [replace(NEW, segment=1, start=0, server=1)], "expected 1 frames"),
    ],
)
def test_a_layout_that_servers_do_not_make(segments: list[Segment], slots: list[Slot], reason: str) -> None:
    server = Server()
    assert reason in rejected(server, Init(4, segments, slots, True))
    assert isinstance(server.ask(Init(5, [SEGMENT], [NEW], True)), Done)


def test_server_0_accepts_only_what_it_has_placed() -> None:
    server = Server(rank=0)
    assert "ask it to place key 'new' first" in rejected(server, Init(4, [SEGMENT], [NEW], True), [bytes(256)])
    more = Segment(1, "float32", SMALL_SEGMENT, 4096)
    assert "ask it to place keys first" in rejected(server, Init(4, [SEGMENT, more], [], True))
    assert "keys are placed by server 0" in rejected(Server(), Place(4, [NEW.spec]))


@pytest.mark.parametrize("size", [0, 2, 4096, 4 * SMALL_SEGMENT - 1])
def test_attached_memory_that_is_smaller_than_its_segment(size: int) -> None:
    server = Server()
    small = server.transport.allocate(size).descriptor
    large = server.transport.allocate(4 * SMALL_SEGMENT).descriptor
    assert "the attached memory has" in rejected(server, Attach(4, SEGMENT, large, small))
    assert "is not attached" in rejected(server, Pull(5, 0, [0], False))
    assert isinstance(server.ask(Attach(6, SEGMENT, large, large)), Done)


@pytest.mark.parametrize(
    "header",
    [
        *(PushHeader(samples) for samples in (-1.0, math.nan, math.inf, 1e300)),
        *(PushHeader(0.0, absent=absent) for absent in (-1.0, math.nan, math.inf)),
        *(PushHeader(1.0, [rate]) for rate in (-0.1, math.nan, math.inf, 1e200)),
        *(PushHeader(1.0, settings=[{"momentum": value}]) for value in (-1.0, math.nan, math.inf, "x")),
    ],
)
def test_numbers_that_are_not_possible(header: PushHeader) -> None:
    server = Server(0)
    server.ask(SetOptimizer(4, spec_by_name("sgd", {"lr": 0.1, "momentum": 0.9})))
    rejected(server, Push(5, 0, [0], header, True, True), [bytes(256)])


@pytest.mark.parametrize(
    "options",
    [{"betas": ["a", "b"]}, {"betas": [1.0, 1.0]}, {"eps": math.nan}, {"lr": -1.0}, {"lr": math.inf}, {"eps": "x"}],
)
def test_an_optimizer_that_cannot_make_a_step(options: dict[str, Any]) -> None:
    server, spec = Server(), spec_by_name("adam", {})
    rejected(server, SetOptimizer(4, OptimizerSpec(spec.name, [{**spec.groups[0], **options}])))
    assert isinstance(server.ask(SetOptimizer(5, spec)), Done)


@pytest.mark.parametrize(
    "spec",
    [
        OptimizerSpec("sgd", []),
        OptimizerSpec("sgd", [{}], {"a": 1}),
        OptimizerSpec("", [{}]),
        OptimizerSpec("sparse_adam", [{"lr": 0.1}]),
    ],
)
def test_an_optimizer_without_its_parameter_groups(spec: OptimizerSpec) -> None:
    rejected(Server(), SetOptimizer(4, spec))


@pytest.mark.parametrize("step", [-1.0, math.nan, math.inf, 1e30])
def test_a_count_of_updates_that_is_not_possible(step: float) -> None:
    server = Server(0)
    server.ask(SetOptimizer(4, spec_by_name("adam", {})))
    for worker in (0, 1):
        server.ask(Push(5, 0, [0, 1], PushHeader(1.0), False, True), [bytes(512)], worker)
    before = server.shard.storage._states[0]["exp_avg_sq"].clone()
    rejected(server, PutStates(6, [StateEntry(0, "step", "float32", ())]), [torch.tensor([step]).numpy()])
    rejected(server, PutStates(6, [StateEntry(0, "other", "float32", ())]), [bytes(4)])
    rejected(server, PutStates(6, [StateEntry(0, "exp_avg", "float32", (LENGTH,), 0)]), [bytes(256)])  # without step
    rejected(server, PutStates(6, [StateEntry(0, "exp_avg", "float32", (1 << 40, 1 << 40, 0))]), [bytes(1)])
    assert torch.equal(server.shard.storage._states[0]["exp_avg_sq"], before)


def test_a_worker_can_be_only_so_far_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(0)
    most = pending_requests.MAX_AHEAD
    assert server.ask(Push(4, most, [0], PushHeader(), True, True), [bytes(256)]) is None
    assert "rounds ahead" in rejected(server, Push(5, most + 1, [0], PushHeader(), True, True), [bytes(256)])
    assert "rounds ahead" in rejected(server, Pull(5, most + 2, [0], True))
    assert "rounds ahead" in rejected(server, MeasureNorm(5, most + 1, [0]))
    monkeypatch.setattr(waiting_requests, "MAX_PENDING", 1)
    assert "1 requests without an answer" in rejected(server, Push(5, 1, [0], PushHeader(), True, True), [bytes(256)])
    monkeypatch.undo()
    monkeypatch.setattr(waiting_requests, "MAX_HELD_BYTES", 1000)
    monkeypatch.setattr(type(server.shard.storage), "num_bytes", 0)
    assert "1 requests without an answer" in rejected(server, Push(5, 1, [0], PushHeader(), True, True), [bytes(256)])


def test_a_request_that_is_repeated_while_it_waits_is_kept_once() -> None:
    server = Server(0)
    requests = server.shard.requests
    assert requests is not None
    for _ in range(3):
        assert server.ask(Push(4, 0, [0], PushHeader(), True, True), [bytes(256)]) is None
        assert server.ask(Pull(5, 1, [0], True)) is None
    assert sum(map(len, requests.waiting.pulls.values())) == 2
    server.answers.clear()
    server.ask(Push(4, 0, [0], PushHeader(), True, True), [bytes(256)], worker=1)
    assert [(worker, answer.id) for worker, answer, _ in server.answers] == [(0, 4), (0, 5), (1, 4)]
    assert requests.waiting.held_bytes == 0


@pytest.mark.parametrize("stop", [Pause(6), Retire(6)])
def test_a_pull_of_a_worker_that_stops_taking_part_is_answered(stop: Pause | Retire) -> None:
    server = Server(0)
    assert server.ask(Pull(5, 1, [0], True)) is None
    server.answers.clear()
    server.ask(stop)
    assert [answer.id for _, answer, _ in server.answers] == [5, 6]
    server.ask(Push(4, 0, [0, 1], PushHeader(), True, True), [bytes(512)], worker=1)
    assert server.ask(Ask(7, 5)) == Status(7, 5, False, "")


def test_an_optimizer_is_not_set_while_a_push_waits() -> None:
    server = Server(0)
    server.ask(Push(4, 0, [0], PushHeader(), True, True), [bytes(256)])
    assert "set the optimizer before the first push" in rejected(
        server, SetOptimizer(5, spec_by_name("sgd", {"lr": 1.0}))
    )


def test_integers_are_not_weighted() -> None:
    server = Server(0)
    server.ask(Place(4, [KeySpec("count", (LENGTH,), "int64")]))
    slot = server.shard.layout.slots[2]
    assert server.shard.layout.pieces(slot, 0) == [], "it is on server 1"
    server.ask(Init(5, server.shard.layout.segments, [slot], True))
    assert "integers, which are summed" in rejected(server, Push(6, 0, [2], PushHeader(2.0), True, True))


def test_values_without_a_frame_and_norms_of_nothing() -> None:
    server = Server()
    assert "must be one frame" in rejected(server, Gather(4))
    for number in (-1.0, math.nan):
        assert "cannot be clipped" in rejected(server, MeasureNorm(4, 0, [0], number))
    for number in (-1.0, 1.5, math.inf):
        assert "cannot be clipped" in rejected(server, ApplyScaled(4, 0, [0], number))
    assert isinstance(server.ask(ApplyScaled(4, 0, [0], math.nan)), Done), "the norm of a gradient with NaN"


def test_a_worker_in_two_groups() -> None:
    answers: list[Response] = []
    shard = Shard(0, 1, {0: "", 1: ""}, lambda worker, answer, *_: answers.append(answer), lambda _: None)
    shard.handle(0, Configure(1, 0, "dist_gsync", None, [[0], [0, 1]], "share"), [])
    assert isinstance(answers[0], Failed)


def test_a_failed_update_ends_the_store_and_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(0)
    with monkeypatch.context() as patched:
        patched.setattr(server.shard.storage, "run", lambda tasks: tasks and 1 / 0)
        server.ask(Push(4, 0, [0], PushHeader(), True, True), [bytes(256)])
        with pytest.raises(ZeroDivisionError):
            server.ask(Push(4, 0, [0], PushHeader(), True, True), [bytes(256)], worker=1)
    answer = server.ask(Pull(5, 0, [0], True))
    assert isinstance(answer, Failed)
    assert "this store cannot continue, because an update failed: ZeroDivisionError" in answer.reason


def test_frames_are_limited_by_the_keys_that_a_request_names() -> None:
    server = Server(0)
    layout = server.shard.layout
    dense = frame_limits(layout, Push(1, 0, [0], PushHeader(), True, True))
    assert dense == (2, BASE_BYTES + 256)
    assert frame_limits(layout, Push(1, 0, [99], PushHeader(), True, True)) == (2, BASE_BYTES)
    assert frame_limits(layout, Pull(1, 0, [0], True)) == (0, 0)
    huge = replace(NEW, padded=1 << 61)
    assert frame_limits(layout, Init(1, [], [huge], True))[1] <= BASE_BYTES + layout.max_bytes


def test_the_number_of_a_request_that_cannot_be_decoded_is_known() -> None:
    data = encode(Push(77, 0, [0], PushHeader(), True, True))
    assert request_id(data[:-1] + b"\xa1x") == 77
    assert request_id(b"\xff") is None
    assert isinstance(decode_request(data), Push)


def test_placed_answers_name_all_segments() -> None:
    answer = Server(0).ask(Place(9, [SPEC]))
    assert isinstance(answer, Placed)
    assert answer.segments == [SEGMENT]
