"""Values that workers exchange while some of them retire, close the store or leave."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from plain_loops import seeded
from torch import nn
from torch.optim import SGD

import echelon
import forked
from echelon.errors import UsageError
from echelon.kvstore import KVStore
from echelon.launch.threads.in_process import run


@pytest.mark.parametrize("store", ["dist_sync", "dist_async"])
@pytest.mark.parametrize("end", ["retire", "close", "leave"])
def test_nobody_waits_for_a_worker_that_has_stopped(store: str, end: str) -> None:
    def program(kv: KVStore) -> list[list[int]]:
        found = [kv.gather(kv.rank)]
        if kv.rank == 1:
            if end != "leave":
                getattr(kv, end)()
            return found
        found += [kv.gather(kv.rank) for _ in range(3)]
        return found

    assert run(program, store, num_workers=3) == [[[0, 1, 2]] + [[0, 2]] * 3, [[0, 1, 2]], [[0, 1, 2]] + [[0, 2]] * 3]


def test_a_worker_that_has_retired_cannot_gather() -> None:
    def program(kv: KVStore) -> None:
        kv.retire()
        kv.gather(1)

    with pytest.raises(UsageError, match="this worker has retired, so the others do not wait for it"):
        run(program, "dist_sync")


def test_without_servers_nobody_waits_for_a_worker_that_retired() -> None:
    def program(kv: KVStore) -> list[list[int]]:
        found = [kv.gather(kv.rank)]
        if kv.rank == 1:
            kv.retire()
        else:
            found += [kv.gather(kv.rank) for _ in range(3)]
        kv.barrier()
        return found

    assert forked.run(program, "nccl_allreduce") == [[[0, 1]] + [[0]] * 3, [[0, 1]]]


@pytest.mark.parametrize(
    ("runs", "store"), [(run, "dist_sync"), (run, "dist_async"), (forked.run, "nccl"), (forked.run, "nccl_allreduce")]
)
def test_a_metric_is_the_same_on_all_workers_and_leaves_the_training_alone(
    runs: Callable[..., Any], store: str
) -> None:
    first = seeded(lambda: nn.Linear(2, 1))

    def program(kv: KVStore) -> list[float]:
        model = copy.deepcopy(first)
        with echelon.Trainer(model, SGD(model.parameters(), lr=0.0), kv) as trainer:
            losses = []
            for step in range(3):
                loss = model(torch.full([2, 2], float(kv.rank + step))).square().mean()
                loss.backward()
                trainer.step(2)
                losses.append(float(trainer.all_reduce(loss.detach())))
            assert trainer.gather({"rank": kv.rank}) == [{"rank": 0}, {"rank": 1}]
            return losses

    def plain(rank: int, step: int) -> float:
        return float(first(torch.full([2, 2], float(rank + step))).detach().square().mean())

    expected = [sum(plain(rank, step) for rank in range(2)) / 2 for step in range(3)]
    for found in runs(program, store):
        assert found == pytest.approx(expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_a_key_beside_the_parameters_of_a_trainer_is_summed_and_not_updated(dtype: torch.dtype) -> None:
    def program(kv: KVStore) -> list[float]:
        model = nn.Linear(2, 1)
        with echelon.Trainer(model, SGD(model.parameters(), lr=0.1), kv):
            kv.init("correct", torch.zeros(2, dtype=dtype))
            kv.pushpull("correct", torch.full([2], kv.rank + 1, dtype=dtype), out := torch.empty(2))
            return out.tolist()

    assert run(program, "dist_sync") == [[3.0, 3.0]] * 2


def test_a_key_beside_the_parameters_of_a_trainer_is_refused_where_sums_mean_nothing() -> None:
    def program(kv: KVStore) -> None:
        model = nn.Linear(2, 1)
        with echelon.Trainer(model, SGD(model.parameters(), lr=0.1), kv):
            kv.init("correct", torch.zeros(2))
            kv.push("correct", torch.ones(2))

    with pytest.raises(UsageError, match=r"key 'correct' is not a parameter of the optimizer, .* use all_reduce"):
        run(program, "dist_async")


def test_a_store_has_one_trainer() -> None:
    def program(kv: KVStore) -> None:
        first, second = nn.Linear(2, 1), nn.Linear(2, 1)
        trainer = echelon.Trainer(first, SGD(first.parameters(), lr=0.1), kv)
        try:
            echelon.Trainer(second, SGD(second.parameters(), lr=0.1), kv)
        finally:
            trainer.close()

    with pytest.raises(UsageError, match=r"the store already has an optimizer \(sgd\).*\(kvstore='dist_sync'\)"):
        run(program, "dist_sync")
