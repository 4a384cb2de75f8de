"""Memory of pushes that wait for other workers: bounded in the worker and in the server, in any order of pushes."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
import torch

from echelon.environment import Job
from echelon.kvstore import KVStore
from echelon.kvstore.servers import wire
from echelon.launch.threads.in_process import run
from echelon.server import reception, serve
from echelon.server.shard import room
from echelon.transport.admission.credentials import Security, with_credentials
from echelon.transport.sockets import TcpTransport

KEYS, ROUNDS, LENGTH = 4, 6, 20_000
KEY_BYTES = 4 * LENGTH


def tcp() -> TcpTransport:
    return TcpTransport(Security.of(with_credentials(Job())))


def push_all(kv: KVStore, order: list[int]) -> list[float]:
    """Push every key ROUNDS times without waiting, in the given order, then pull; return the values."""
    kv.init(list(range(KEYS)), [torch.zeros(LENGTH)] * KEYS)
    kv.set_optimizer(torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0))
    for key in order:
        kv.push(key, torch.ones(LENGTH))
    out = [torch.empty(LENGTH) for _ in range(KEYS)]
    kv.pull(list(range(KEYS)), out)
    kv.barrier()
    return [float(value[-1]) for value in out]


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of copies after each one, with a limit of three keys."""
    seen: list[int] = []
    count = wire.Wire._count_copies

    def counted(self: wire.Wire, *arguments: Any) -> None:
        count(self, *arguments)
        self._forget_answered_copies()
        seen.append(self._copied_bytes)

    monkeypatch.setattr(wire.Wire, "_count_copies", counted)
    monkeypatch.setattr(wire, "MAX_COPY_BYTES", 3 * KEY_BYTES)
    return seen


def test_a_worker_waits_when_its_copies_exceed_the_limit(copies: list[int]) -> None:
    values = run(lambda kv: push_all(kv, list(range(KEYS)) * ROUNDS), "dist_sync")
    assert values == [[-2.0 * ROUNDS] * KEYS] * 2
    assert 0 < max(copies) <= 3 * KEY_BYTES + 4096


def test_workers_that_push_in_opposite_orders_do_not_wait_for_ever(
    copies: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "PATIENCE_S", 0.2)
    forward = [key for key in range(KEYS) for _ in range(ROUNDS)]

    def program(kv: KVStore) -> list[float]:
        return push_all(kv, forward if kv.rank == 0 else forward[::-1])

    assert run(program, "dist_sync") == [[-2.0 * ROUNDS] * KEYS] * 2


@pytest.mark.parametrize("store", ["dist_sync", "dist_ssync", "dist_gsync", "dist_async"])
def test_a_server_with_little_room_reads_every_push_in_the_end(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three workers push in random orders without waiting; the server has room for two keys."""
    monkeypatch.setattr(reception, "default_limit", lambda: 2 * KEY_BYTES)
    monkeypatch.setattr(room, "LONGEST_S", 0.05)
    monkeypatch.setattr(serve, "POLL_S", 0.02)
    orders = []
    for rank in range(3):
        order = [key for key in range(KEYS) for _ in range(ROUNDS)]
        random.Random(rank).shuffle(order)
        orders.append(order)

    def program(kv: KVStore) -> list[float]:
        return push_all(kv, orders[kv.rank])

    options: dict[str, Any] = {"groups": [[0, 1], [2]]} if store == "dist_gsync" else {}
    options |= {"staleness": 2} if store == "dist_ssync" else {}
    values = run(program, store, num_workers=3, num_servers=1, transport=tcp(), lr_scale="mxnet", **options)
    if store == "dist_sync":
        assert values == [[-3.0 * ROUNDS] * KEYS] * 3


def test_a_fast_worker_is_not_read_while_the_slow_one_has_not_pushed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reception, "default_limit", lambda: 2 * KEY_BYTES)
    monkeypatch.setattr(room, "LONGEST_S", 600.0)
    held: list[int] = []
    check = reception.Reception._check_room

    def recorded(self: reception.Reception, *arguments: Any) -> None:
        held.append(self._slices.held_bytes + self._endpoint.traffic.queued)
        check(self, *arguments)

    monkeypatch.setattr(reception.Reception, "_check_room", recorded)
    slow = threading.Event()

    def program(kv: KVStore) -> list[float]:
        kv.init(list(range(KEYS)), [torch.zeros(LENGTH)] * KEYS)
        kv.set_optimizer(torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0))
        if kv.rank == 1:
            assert slow.wait(60)
        for key in list(range(KEYS)) * ROUNDS:
            kv.push(key, torch.ones(LENGTH))
        if kv.rank == 0:
            threading.Timer(0.5, slow.set).start()
        out = [torch.empty(LENGTH) for _ in range(KEYS)]
        kv.pull(list(range(KEYS)), out)
        kv.barrier()
        return [float(value[-1]) for value in out]

    assert run(program, "dist_sync", num_servers=1, transport=tcp()) == [[-2.0 * ROUNDS] * KEYS] * 2
    assert max(held) < 6 * KEY_BYTES, "of 48 pushes"
