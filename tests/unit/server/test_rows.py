"""Rows of tables: where they are stored, which of them are checked, and which a worker has not read yet."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from echelon.cluster.messages import (
    Configure,
    Done,
    Failed,
    Init,
    Place,
    Placed,
    Pull,
    PullChanges,
    PullRows,
    Push,
    PushHeader,
    PutRows,
    Request,
    Response,
    SetOptimizer,
)
from echelon.cluster.placement import BLOCK_ROWS, KeySpec, Layout
from echelon.kvstore.optimizer_spec import spec_by_name
from echelon.server.shard.shard import Shard
from echelon.server.storage.rows import ChangeLog, RowMap, as_frame

pytestmark = pytest.mark.numeric

ROWS = 10
DENSE, TABLE = 0, 1  # keys; dense ones are placed first


@given(
    st.integers(1, 5 * BLOCK_ROWS + 3), st.integers(1, 4), st.integers(0, 3), st.lists(st.integers(0, 400), unique=True)
)
@settings(max_examples=60)
def test_every_row_has_one_place(num_rows: int, num_servers: int, tables_before: int, chosen: list[int]) -> None:
    layout = Layout(num_servers)
    specs = [KeySpec(f"t{number}", (num_rows, 2), "float32", True) for number in range(tables_before + 1)]
    rows = RowMap.of(layout.place(specs)[-1], layout)
    assert sum(rows.count(server) for server in range(num_servers)) == num_rows
    everything = torch.cat([rows.all_rows_of(server) for server in range(num_servers)])
    assert torch.equal(everything.sort().values, torch.arange(num_rows))
    wanted = torch.tensor(sorted(row for row in chosen if row < num_rows), dtype=torch.int64)
    found: dict[int, int] = {}
    for server, positions, numbers in rows.split(wanted):
        assert all(0 <= number < rows.count(server) for number in numbers.tolist())
        assert torch.equal(rows.rows_of(server, numbers), wanted[positions])
        found |= dict.fromkeys(positions.tolist(), server)
    assert sorted(found) == list(range(len(wanted)))


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[int, list[int]]]:
    """Return changes (worker -1) and reads by workers, in order."""
    rows = st.lists(st.integers(0, ROWS - 1), unique=True).map(sorted)
    return draw(st.lists(st.tuples(st.integers(-1, 2), rows), max_size=60))


@given(histories(), st.integers(0, 60))
def test_a_worker_gets_the_rows_that_changed_since_its_last_read(
    history: list[tuple[int, list[int]]], leaves_at: int
) -> None:
    """Worker 2 leaves; worker 1 may read late; a repeated request gets at least the same rows."""
    log = ChangeLog(ROWS)
    for worker in range(3):
        log.expect(worker, 0)
    unread: dict[int, set[int]] = {worker: set() for worker in range(3)}
    have = dict.fromkeys(range(3), 0)
    for at, (worker, rows) in enumerate(history):
        if at == leaves_at:
            log.leave(2)
        if worker < 0:
            log.add(torch.tensor(rows, dtype=torch.int64))
            for missing in unread.values():
                missing.update(rows)
        elif worker < 2 or at < leaves_at:
            log.expect(worker, have[worker])
            for _ in range(2):
                assert log.since(have[worker]).tolist() == sorted(unread[worker])
            have[worker], unread[worker] = log.version, set()
    assert sum(map(len, log._entries)) == log._size <= 2 * ROWS


def test_a_reader_that_the_log_does_not_know_gets_all_rows() -> None:
    log = ChangeLog(ROWS)
    log.add(torch.tensor([1]))
    assert log.since(0).tolist() == list(range(ROWS))
    log.expect(0, log.version)
    log.add(torch.tensor([2, 3]))
    assert log.since(1).tolist() == [2, 3]


class Server:
    """A shard with one worker, a table of three values per row and a dense key; its answers are recorded."""

    def __init__(self) -> None:
        self._answers: list[tuple[Response, Sequence[memoryview]]] = []
        self._shard = Shard(
            0, 1, {0: ""}, lambda _, answer, frames, *_more: self._answers.append((answer, frames)), lambda _: None
        )
        self.ask(Configure(1, 0, "dist_sync", None, None, "share"))
        specs = [KeySpec("table", (ROWS, 3), "float32", True), KeySpec("dense", (4,), "float32")]
        placed = self.ask(Place(2, specs))[0]
        assert isinstance(placed, Placed)
        assert [slot.key for slot in placed.slots] == [TABLE, DENSE]
        frames = [torch.zeros(64)]
        assert self.ask(Init(3, placed.segments, placed.slots, True), *frames)[0] == Done(3)
        assert self.ask(PutRows(4, TABLE, 0), torch.arange(30.0))[0] == Done(4)
        assert self.ask(SetOptimizer(5, spec_by_name("sgd", {"lr": 1.0})))[0] == Done(5)

    def ask(self, request: Request, *frames: Tensor) -> tuple[Response, Sequence[memoryview]]:
        self._shard.handle(0, request, [as_frame(frame) for frame in frames])
        return self._answers.pop()

    def values(self) -> Tensor:
        answer, frames = self.ask(PullRows(99, 0, TABLE), torch.arange(ROWS))
        assert isinstance(answer, Done)
        return torch.frombuffer(bytearray(frames[2]), dtype=torch.float32)


def numbers(*rows: int) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64)


@pytest.mark.parametrize(
    ("request_", "frames", "reason"),
    [
        (
            Push(7, 0, [TABLE], PushHeader(1.0), True, True, rows=[1], since=[0]),
            [numbers(10), torch.ones(3)],
            "rows 10 to 10 were",
        ),
        (
            Push(7, 0, [TABLE], PushHeader(1.0), True, True, rows=[1], since=[0]),
            [numbers(-1), torch.ones(3)],
            "rows -1 to -1 were",
        ),
        (
            Push(7, 0, [TABLE], PushHeader(1.0), True, True, rows=[2], since=[0]),
            [numbers(5, 4), torch.ones(6)],
            "not in ascending order",
        ),
        (
            Push(7, 0, [TABLE], PushHeader(1.0), True, True, rows=[1], since=[0]),
            [numbers(1), torch.ones(2)],
            "expected 12 bytes",
        ),
        (
            Push(7, 0, [TABLE], PushHeader(1.0), True, True, rows=[2], since=[0]),
            [numbers(1), torch.ones(6)],
            "but 1 came",
        ),
        (
            Push(7, 0, [TABLE], PushHeader(1.0), True, True, rows=[1], since=[]),
            [numbers(1), torch.ones(3)],
            "names 0 versions",
        ),
        (
            Push(7, 0, [TABLE], PushHeader(1.0), True, True, rows=[1], since=[0]),
            [numbers(1)],
            "1 numbers of rows and 1 frames",
        ),
        (
            Push(7, 0, [TABLE], PushHeader(1.0), True, True, rows=[1], since=[0]),
            [torch.ones(5, dtype=torch.uint8), torch.ones(3)],
            "5 bytes, not a multiple of 8",
        ),
        (
            Push(7, 0, [DENSE], PushHeader(1.0), True, True, rows=[1], since=[0]),
            [numbers(1), torch.ones(3)],
            "is not row-sparse",
        ),
        (
            Push(7, 0, [TABLE], PushHeader(1.0), True, True),
            [torch.ones(30)],
            "'table' is row-sparse: push and pull its rows",
        ),
        (
            Push(7, 0, [3], PushHeader(1.0), True, True, rows=[1], since=[0]),
            [numbers(1), torch.ones(3)],
            "not initialised",
        ),
        (Pull(7, 0, [TABLE], True), [], "'table' is row-sparse: push and pull its rows"),
        (PullRows(7, 0, TABLE), [numbers(10)], "rows 10 to 10 were named"),
        (PullRows(7, 0, TABLE), [], "must have one frame with their numbers"),
        (PullChanges(7, 0, [DENSE], [0]), [], "'dense' is not row-sparse"),
        (PullChanges(7, 0, [TABLE], []), [], "names 0 versions"),
        (PutRows(7, TABLE, 8), [torch.ones(9)], "rows 8 to 10, but this server stores rows 0 to 9"),
        (PutRows(7, TABLE, -1), [torch.ones(3)], "rows -1 to -1, but"),
        (PutRows(7, TABLE, 1), [torch.ones(4)], "have 16 bytes; expected 12 bytes"),
    ],
)
def test_an_invalid_request_is_rejected_and_the_next_one_carried_out(
    request_: Request, frames: list[Tensor], reason: str
) -> None:
    server = Server()
    answer, _ = server.ask(request_, *frames)
    assert isinstance(answer, Failed), answer
    assert reason in answer.reason
    assert torch.equal(server.values(), torch.arange(30.0))
    push = Push(8, 0, [TABLE], PushHeader(1.0), True, True, rows=[2], since=[1])
    answer, received = server.ask(push, numbers(2, 2), torch.ones(6))
    assert isinstance(answer, Done)
    assert torch.frombuffer(bytearray(received[1]), dtype=torch.int64).tolist() == [2]
    assert server.values().view(ROWS, 3)[2].tolist() == [4.0, 5.0, 6.0]
