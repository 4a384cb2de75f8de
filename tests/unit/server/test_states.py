"""Optimizer states of a server, as they travel: refusals, numbers, and keys without a state."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from echelon.cluster.messages import (
    Configure,
    Done,
    Failed,
    GetStates,
    Init,
    OptimizerSpec,
    Place,
    Placed,
    Push,
    PushHeader,
    PutStates,
    Request,
    Response,
    SetOptimizer,
    StateEntry,
    States,
)
from echelon.cluster.placement import KeySpec
from echelon.errors import UsageError
from echelon.kvstore.optimizer_spec import spec_by_name
from echelon.server.shard.shard import Shard
from echelon.server.slices.hosted_slice import HostedSlice
from echelon.server.slices.state_file import StateFiles, state_of
from echelon.server.storage.states import as_tensor, as_values

pytestmark = pytest.mark.numeric

LENGTH = 64


class Server:
    """A shard with one worker and the keys 'a' and 'b'."""

    def __init__(self, spec: OptimizerSpec) -> None:
        self._answers: list[tuple[Response, Sequence[memoryview]]] = []
        self._shard = Shard(
            0, 1, {0: ""}, lambda _, response, frames, *_more: self._answers.append((response, frames)), lambda _: None
        )
        self.ask(Configure(1, 0, "dist_sync", None, None, "share"))
        self.ask(SetOptimizer(2, spec))
        placed, _ = self.ask(Place(3, [KeySpec(name, (LENGTH,), "float32") for name in "ab"]))
        assert isinstance(placed, Placed)
        self.ask(Init(4, placed.segments, placed.slots, True), torch.ones(2 * LENGTH))

    def ask(self, request: Request, *frames: Tensor) -> tuple[Response, Sequence[memoryview]]:
        """Return the answer to a request."""
        self._shard.handle(0, request, [frame.reshape(-1).view(torch.uint8).numpy().data for frame in frames])
        return self._answers.pop()

    def push(self, clock: int, keys: Sequence[int], **more: Any) -> Response:
        """Push ones for keys."""
        return self.ask(
            Push(9, clock, list(keys), PushHeader(1.0, [0.1], **more), False, True), torch.ones(LENGTH * len(keys))
        )[0]

    def entries(self) -> list[tuple[int, str]]:
        """Return the keys and names of all states."""
        answer, frames = self.ask(GetStates(5))
        assert isinstance(answer, States)
        assert len(answer.entries) == len(frames)
        return [(entry.key, entry.name) for entry in answer.entries]


def test_a_key_that_was_never_updated_has_no_state() -> None:
    server = Server(spec_by_name("nadam", {}))
    assert server.entries() == []
    server.push(0, [1])
    assert server.entries() == [(1, "step"), (1, "mu_product"), (1, "exp_avg"), (1, "exp_avg_sq")]


def test_loading_replaces_all_states() -> None:
    server = Server(spec_by_name("adam", {}))
    server.push(0, [0, 1])
    answer, frames = server.ask(GetStates(5))
    assert isinstance(answer, States)
    of_b = [index for index, entry in enumerate(answer.entries) if entry.key == 1]
    kept = [torch.frombuffer(bytearray(frames[index]), dtype=torch.float32) for index in of_b]
    assert server.ask(PutStates(6, [answer.entries[index] for index in of_b]), *kept) == (Done(6), ())
    assert server.entries() == [(1, "step"), (1, "exp_avg"), (1, "exp_avg_sq")]
    server.push(1, [0, 1])
    steps, frames = server.ask(GetStates(7))
    assert isinstance(steps, States)
    numbers = [float(torch.frombuffer(bytearray(f), dtype=torch.float32)[0]) for f in frames]
    found = {(entry.key, entry.name): number for entry, number in zip(steps.entries, numbers, strict=True)}
    assert (found[0, "step"], found[1, "step"]) == (1, 2)
    assert found[0, "exp_avg"] == pytest.approx(0.1), "the old average of the key is gone"
    assert found[1, "exp_avg"] == pytest.approx(0.1 + 0.9 * 0.1)


@pytest.mark.parametrize(
    ("entry", "length"),
    [
        (StateEntry(7, "exp_avg", "float32", (LENGTH,), 0), LENGTH),  # no such key
        (StateEntry(0, "momentum", "float32", (LENGTH,), 0), LENGTH),  # no such state
        (StateEntry(0, "exp_avg", "float64", (LENGTH,), 0), 2 * LENGTH),
        (StateEntry(0, "exp_avg", "complex64", (LENGTH,), 0), 2 * LENGTH),
        (StateEntry(0, "exp_avg", "float32", (LENGTH,), 1), LENGTH),  # no part begins there
        (StateEntry(0, "exp_avg", "float32", (LENGTH - 1,), 0), LENGTH - 1),
        (StateEntry(0, "exp_avg", "float32", (LENGTH,), 0), LENGTH - 1),
        (StateEntry(0, "exp_avg", "float32", (-1,), 0), 1),
        (StateEntry(0, "step", "float32", (2,)), 2),  # not one number
    ],
)
def test_states_that_do_not_fit_are_refused_and_change_nothing(entry: StateEntry, length: int) -> None:
    server = Server(spec_by_name("adam", {}))
    server.push(0, [0])
    before = server.entries()
    answer, _ = server.ask(PutStates(6, [entry]), torch.zeros(length))
    assert isinstance(answer, Failed)
    assert "the optimizer states do not fit the keys and the optimizer of this job" in answer.reason
    assert server.entries() == before
    assert isinstance(server.push(1, [0]), Done)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"settings": [{}, {}]}, "the push has changed settings of 2 parameter groups, but the optimizer has 1"),
        ({"settings": [{"betas": 0.5}]}, "the options of optimizer 'adam' are incomplete or invalid"),
        ({"settings": [{"amsgrad": True}]}, "adam cannot change amsgrad from False to True after the first step"),
    ],
)
def test_settings_that_are_not_possible_are_refused(more: dict[str, Any], reason: str) -> None:
    server = Server(spec_by_name("adam", {}))
    answer = server.push(0, [0], **more)
    assert isinstance(answer, Failed)
    assert reason in answer.reason
    assert isinstance(server.push(0, [0]), Done)


def test_numbers_of_python_keep_their_bits_and_kinds() -> None:
    state = {"count": 3, "scale": 0.1, "warm": True, "mean": torch.ones(2), "step": torch.tensor(4.0)}
    travelled = {name: as_tensor(value, name) for name, value in state.items()}
    found = as_values(travelled, (2,))
    assert [(found[name], type(found[name])) for name in ("count", "scale", "warm")] == [
        (3, int),
        (0.1, float),
        (True, bool),
    ]
    assert torch.equal(found["mean"], torch.ones(2))
    assert isinstance(found["step"], Tensor)
    with pytest.raises(UsageError, match="state 'past' is a list; only tensors and numbers can be sent or saved"):
        as_tensor([1], "state 'past'")


# --- what optimizer classes keep


class Counting(torch.optim.Optimizer):
    """Counts its steps in a tensor and in a number. `keeps`: something else that it keeps."""

    def __init__(self, params: Any, lr: float = 0.1, keeps: str = "") -> None:
        super().__init__(params, {"lr": lr, "keeps": keeps})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state |= {"tensor": torch.tensor(0), "number": 0}
            state["tensor"].add_(1)
            state["number"] += 1
            if self.param_groups[0]["keeps"]:
                state["list"] = [1]
            parameter.sub_(self.param_groups[0]["lr"] * state["tensor"] / state["number"])


def of_class(**settings: Any) -> Shard:
    """Return a shard whose key was updated once."""
    spec = OptimizerSpec(f"{__name__}:Counting", [{"lr": 0.1, "keeps": "", **settings}])
    shard = Shard(0, 1, {0: ""}, lambda *_: None, lambda _: None, [spec.name])
    requests: list[Request] = [Configure(1, 0, "dist_sync", None, None, "share"), SetOptimizer(2, spec)]
    for request in requests:
        shard.handle(0, request, [])
    slots = shard.layout.place([KeySpec("a", (LENGTH,), "float32")])
    ones = torch.ones(LENGTH).view(torch.uint8).numpy().data
    shard.handle(0, Init(4, shard.layout.segments, slots, True), [ones])
    shard.handle(0, Push(5, 0, [0], PushHeader(1.0, [0.1]), False, True), [ones])
    return shard


def test_a_server_gives_another_one_tensors_and_numbers_as_they_are() -> None:
    first, second = of_class(), of_class()
    state = state_of(first)
    assert state is not None
    second.states.fill(state.entries, state.frames)
    kept = second.storage.objects[0]
    assert (torch.equal(kept["tensor"], torch.tensor(1)), kept["number"]) == (True, 1)
    assert isinstance(kept["number"], int)


def test_a_state_that_cannot_be_sent_ends_neither_the_server_nor_its_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shard = of_class(keeps="a list")
    hosted = HostedSlice(0, lambda *_: shard, lambda *_: None, is_primary=True)
    hosted.shards[0] = shard
    with pytest.raises(UsageError, match="state 'list' of key 'a' is a list"):
        hosted.use_backup(lambda _: None, 0.0)
    assert hosted.stream is None, "it goes on without a backup"
    files = StateFiles(tmp_path)
    for now in (0.0, 100.0, 200.0):
        files.write_if_due(0, 0, shard, now)
    assert capsys.readouterr().err.count("is not saved: state 'list' of key 'a' is a list") == 1
    assert not list(tmp_path.iterdir())
