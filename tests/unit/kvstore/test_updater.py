"""A user's function as the updater of a store: it replaces the optimizer of a store of one worker."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import forked
from echelon.environment import Job
from echelon.errors import UsageError
from echelon.kvstore import KVStore, create
from echelon.launch.threads.in_process import run


def add_twice(key: Any, pushed: torch.Tensor, value: torch.Tensor) -> None:
    """Add the pushed sum twice, as the updater of MXNet's own test does."""
    value += pushed * 2


@pytest.mark.parametrize("store", ["local", "device", "nccl", "nccl_allreduce", "local_update_cpu"])
def test_the_updater_gets_the_key_the_sum_and_the_value(store: str) -> None:
    calls: list[tuple[Any, list[float], list[float]]] = []

    def updater(key: Any, pushed: torch.Tensor, value: torch.Tensor) -> None:
        calls.append((key, pushed.tolist(), value.tolist()))
        add_twice(key, pushed, value)

    with create(store) as kv:
        kv.init([3, 5], [torch.ones(2), torch.ones(2)])
        kv.set_updater(updater)
        kv.push([5, 3, 5], [torch.full((2,), float(one)) for one in (1, 2, 3)])
        out = torch.empty(2)
        kv.pull(5, out)
    assert calls == [(5, [4.0, 4.0], [1.0, 1.0]), (3, [2.0, 2.0], [1.0, 1.0])]
    assert out.tolist() == [9.0, 9.0]


def test_the_last_of_updater_and_optimizer_counts() -> None:
    with create("local") as kv:
        kv.init("w", torch.zeros(1))
        out = torch.empty(1)
        kv._set_updater(add_twice)  # MXNet 1.x's name
        kv.pushpull("w", torch.ones(1), out)
        kv.set_optimizer("sgd", lr=1.0)
        kv.pushpull("w", torch.ones(1), out)
        assert out.item() == 1.0
        kv.set_updater(add_twice)
        kv.pushpull("w", torch.ones(1), out)
        assert out.item() == 3.0
        with pytest.raises(UsageError, match="the store has no optimizer"):
            kv.save_optimizer_states("nowhere")
        kv.set_optimizer("sgd", lr=0.5)
        kv.pushpull("w", torch.ones(1), out)
        assert out.item() == 2.5, "with the new learning rate"


@pytest.mark.parametrize("store", ["device", "nccl"])
def test_every_device_of_a_worker_runs_the_updater(store: str) -> None:
    def program(kv: KVStore) -> list[float]:
        kv.init("w", torch.zeros(3))
        kv.set_updater(add_twice)
        out = torch.empty(3)
        kv.pushpull("w", torch.full((3,), kv.rank + 1.0), out)
        return out.tolist()

    assert forked.run(program, store, num_workers=2) == [[6.0] * 3] * 2


def test_an_error_of_the_updater_reaches_the_caller() -> None:
    with create("local") as kv:
        kv.init("w", torch.zeros(1))
        kv.set_updater(lambda key, pushed, value: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            kv.push("w", torch.ones(1))


def test_a_value_that_cannot_be_called_is_refused() -> None:
    with (
        create("local") as kv,
        pytest.raises(UsageError, match="takes a function of"),
    ):
        kv.set_updater("sgd")  # type: ignore[arg-type]


def test_stores_of_several_workers_name_the_alternative() -> None:
    def program(kv: KVStore) -> str:
        with pytest.raises(UsageError) as caught:
            kv.set_updater(add_twice)
        return str(caught.value)

    words = "cannot run an updater, only the stores of one worker can: use set_optimizer, or push without an optimizer"
    assert words in run(program, "dist_sync", num_workers=1)[0]
    with create("dist_device_sync", job=Job(scheduler_port=1, num_servers=0)) as kv:
        assert words in program(kv)
