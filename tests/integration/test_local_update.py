"""Trainer(update_on_kvstore=False): servers average the gradients, and every worker runs its own optimizer."""

from __future__ import annotations

import copy

import pytest
import torch
from plain_loops import Loop, Net, assert_same_bits, batches, loss_of, momentum, on_one_worker, seeded, snapshot
from torch import nn
from torch.optim import SGD, Adamax, Optimizer

import echelon
import tolerances
from echelon.errors import UsageError
from echelon.kvstore import KVStore, create
from echelon.launch.threads.in_process import run

pytestmark = pytest.mark.numeric


def adamax(model: nn.Module) -> Optimizer:
    """Return an optimizer that servers do not have."""
    return Adamax(model.parameters(), lr=0.01, weight_decay=0.1)


@pytest.mark.parametrize("make", [momentum, adamax])
def test_one_worker_gives_the_bits_of_plain_pytorch(make: object) -> None:
    loop, data = Loop(seeded(Net), make), batches(4)  # type: ignore[arg-type]
    found = on_one_worker(lambda kv: loop.worker(kv, data, update_on_kvstore=False), "dist_sync")
    assert_same_bits(found, loop.plain(data))


def test_workers_stay_equal_and_match_one_process_although_one_runs_out_of_data() -> None:
    """Batches of unequal size; the last batch belongs to worker 0 alone, while worker 1 has retired."""
    loop, data = Loop(seeded(Net), adamax), batches(3, size=6)
    other = seeded(Net, seed=7)
    split = [[(images[:4], labels[:4]), (images[4:], labels[4:])] for images, labels in data[:2]]

    def program(kv: KVStore) -> dict[str, torch.Tensor]:
        torch.set_num_threads(1)
        model = copy.deepcopy(loop.model if kv.rank == 0 else other)  # rank 0's weights count
        trainer = echelon.Trainer(model, adamax(model), kv, update_on_kvstore=False)
        for parts in split:
            loss_of(model, parts[kv.rank]).backward()
            trainer.step()
        if kv.rank == 0:
            loss_of(model, data[2]).backward()
            trainer.step()
        kv.retire()
        state = snapshot(model)
        trainer.close()
        return state

    first, second = run(program, "dist_sync", num_workers=2)
    assert_same_bits(first, second)
    for name, wanted in loop.plain(data).items():
        tolerance = tolerances.of_training(data, magnification=100)  # Adamax divides by the largest gradient so far
        torch.testing.assert_close(first[name], wanted, rtol=tolerance, atol=tolerance)


def test_a_parameter_without_a_gradient_on_any_worker_is_not_updated() -> None:
    def program(kv: KVStore) -> dict[str, float]:
        model = nn.ModuleDict({"always": nn.Linear(1, 1), "sometimes": nn.Linear(1, 1), "never": nn.Linear(1, 1)})
        for parameter in model.parameters():
            nn.init.ones_(parameter)
        optimizer = SGD(model.parameters(), lr=1.0, weight_decay=0.5)
        trainer = echelon.Trainer(model, optimizer, kv, update_on_kvstore=False)
        ones = torch.ones(1, 1)
        loss = model["always"](ones).sum()
        if kv.rank == 1:
            loss = loss + model["sometimes"](ones).sum()
        loss.backward()
        trainer.step(1)
        found = {name: value.item() for name, value in snapshot(model).items() if "weight" in name}
        kv.barrier()
        trainer.close()
        return found

    # Of "sometimes", one of two workers has the gradient 1: the mean is 0.5.
    expected = {"always.weight": -0.5, "sometimes.weight": 0.0, "never.weight": 1.0}
    assert run(program, "dist_sync", num_workers=2) == [expected] * 2


def test_all_workers_stop_after_the_same_step() -> None:
    def program(kv: KVStore) -> int:
        model = seeded(Net)
        trainer = echelon.Trainer(model, momentum(model), kv, update_on_kvstore=False)
        for batch in batches(10):
            loss_of(model, batch).backward()
            if kv.rank == 1 and trainer.clock == 2:
                kv.halt("enough")
            trainer.step()
            if kv.halted:
                break
        trainer.close()
        return trainer.clock

    assert run(program, "dist_sync", num_workers=2) == [4, 4]  # the request is sent with the next backward pass


def test_weights_can_be_loaded() -> None:
    start, *given = (seeded(Net, seed) for seed in range(3))  # not in the workers, whose threads share a generator

    def program(kv: KVStore) -> dict[str, torch.Tensor]:
        model = copy.deepcopy(start)
        trainer = echelon.Trainer(model, momentum(model), kv, update_on_kvstore=False)
        loss_of(model, batches(1)[0]).backward()
        trainer.step()
        trainer.load_weights(snapshot(given[kv.rank]))
        state = snapshot(model)
        trainer.close()
        return state

    for state in run(program, "dist_sync", num_workers=2):
        assert_same_bits(state, snapshot(given[0]))


@pytest.mark.parametrize(("store", "staleness"), [("dist_async", None), ("dist_ssync", 2)])
def test_asynchronous_stores_refuse_it(store: str, staleness: int | None) -> None:
    def program(kv: KVStore) -> str:
        model = seeded(Net)
        with pytest.raises(UsageError) as caught:
            echelon.Trainer(model, momentum(model), kv, update_on_kvstore=False)
        return str(caught.value)

    (message,) = run(program, store, num_workers=1, staleness=staleness)
    assert message == (
        f"update_on_kvstore=False needs workers in lock-step, but those of {store} update the servers' weights at "
        "their own pace; leave it out, or use dist_sync"
    )


def test_several_devices_with_servers_refuse_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"DMLC_PS_ROOT_PORT": "1", "DMLC_NUM_SERVER": "1", "ECHELON_NUM_DEVICES": "2"}.items():
        monkeypatch.setenv(name, value)
    model = seeded(Net)
    with pytest.raises(UsageError, match=r"several devices per worker \(dist_sync\); use dist_device_sync"):
        echelon.Trainer(model, momentum(model), "dist_sync", update_on_kvstore=False)


def test_a_store_that_has_an_optimizer_is_refused() -> None:
    def program(kv: KVStore) -> None:
        model = seeded(Net)
        kv.set_optimizer("sgd", lr=0.1)
        with pytest.raises(UsageError, match="update_on_kvstore=False, but the store updates with sgd"):
            echelon.Trainer(model, momentum(model), kv, update_on_kvstore=False)

    run(program, "dist_sync", num_workers=1)


@pytest.mark.parametrize("update_on_kvstore", [None, True, False])
def test_stores_without_servers_update_in_the_worker_anyway(update_on_kvstore: bool | None) -> None:
    loop, data = Loop(seeded(Net), adamax), batches(2)
    with create("local") as kv:
        found = loop.worker(kv, data, update_on_kvstore=update_on_kvstore)
    assert_same_bits(found, loop.plain(data))
