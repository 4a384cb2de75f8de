"""Edits of weights outside the optimizer: they reach the servers, or the loop is told what to do."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from plain_loops import (
    Net,
    State,
    assert_close,
    assert_same_bits,
    batches,
    joined,
    loss_of,
    momentum,
    seeded,
    snapshot,
    usage_error,
)
from torch import nn

import echelon
import tolerances
from echelon.errors import UsageError
from echelon.kvstore import KVStore
from echelon.launch.threads.in_process import run

Edit = Callable[[nn.Module], object]
STEPS = 4


@torch.no_grad()
def clamp(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.clamp_(-0.05, 0.05)


def clamp_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.clamp_(-0.05, 0.05)


def other_memory(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.clamp(-0.05, 0.05)


def load(model: nn.Module) -> None:
    model.load_state_dict({name: value.clamp(-0.05, 0.05) for name, value in model.state_dict().items()})


EDITS = [clamp, clamp_data, other_memory, load]


@pytest.mark.parametrize(
    ("edit", "lazy_pull"), [*((edit, False) for edit in EDITS), (clamp, True), (other_memory, True), (load, True)]
)
def test_the_same_edit_on_all_workers_reaches_the_servers(edit: Edit, lazy_pull: bool) -> None:
    """With `lazy_pull`, writes that bypass the version counter are not noticed."""
    model, parts = seeded(Net), [batches(STEPS, seed=seed) for seed in (1, 2)]

    def program(kv: KVStore) -> State:
        torch.set_num_threads(1)
        mine = copy.deepcopy(model)
        trainer = echelon.Trainer(mine, momentum(mine), kv, lazy_pull=lazy_pull)
        for batch in parts[kv.rank]:
            loss_of(mine, batch).backward()
            trainer.step()
            trainer.sync()
            edit(mine)
        state = snapshot(mine)
        kv.barrier()
        trainer.close()
        return state

    plain = copy.deepcopy(model)
    optimizer = momentum(plain)
    for batch in joined(parts):
        optimizer.zero_grad()
        loss_of(plain, batch).backward()
        optimizer.step()
        edit(plain)
    first, second = run(program, "dist_sync", num_workers=2)
    assert_same_bits(first, second)
    assert_close(first, snapshot(plain), tolerances.of_training(joined(parts)))


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_on_one_worker_of_several_is_refused_on_all(edit: Edit) -> None:
    messages: list[str] = []

    def program(kv: KVStore) -> None:
        mine = copy.deepcopy(model)
        trainer = echelon.Trainer(mine, momentum(mine), kv)
        first, second = batches(2)
        loss_of(mine, first).backward()
        trainer.step()
        if kv.rank == 1:
            edit(mine)
        loss_of(mine, second).backward()
        messages.append(usage_error(trainer.step))

    model = seeded(Net)
    with pytest.raises(UsageError, match="changed weights outside the optimizer"):
        run(program, "dist_sync", num_workers=2)
    assert len(messages) == 2
    for message in messages:
        assert "workers 0, 1 changed weights outside the optimizer, but not to the same values" in message
        assert "with trainer.edit_weights():" in message


@pytest.mark.parametrize(("store", "num_workers"), [("dist_sync", 1), ("dist_sync", 2), ("dist_async", 2)])
@pytest.mark.parametrize("lazy_pull", [False, True])
def test_an_edit_after_the_last_step_is_kept_by_close(store: str, num_workers: int, lazy_pull: bool) -> None:
    """For example, the loop loads its best weights. Those that it has not changed get the updates of all workers."""
    model = seeded(Net)

    def program(kv: KVStore) -> State:
        mine = copy.deepcopy(model)
        trainer = echelon.Trainer(mine, momentum(mine), kv, lazy_pull=lazy_pull)
        loss_of(mine, batches(1)[0]).backward()
        trainer.step()
        trainer.sync()
        mine.load_state_dict({"last.bias": torch.full([5], 3.0)}, strict=False)
        trainer.close()
        return snapshot(mine)

    found = run(program, store, num_workers=num_workers)
    for state in found:
        assert_same_bits(state, found[0])
        assert state["last.bias"].tolist() == [3.0] * 5
        assert not torch.equal(state["middle.weight"], model.get_parameter("middle.weight"))


def test_an_edit_before_edit_weights_is_published_with_it() -> None:
    model = seeded(Net)

    def program(kv: KVStore) -> State:
        mine = copy.deepcopy(model)
        with echelon.Trainer(mine, momentum(mine), kv) as trainer:
            nn.init.constant_(mine.get_parameter("last.bias"), 3.0)
            with trainer.edit_weights():
                nn.init.constant_(mine.get_parameter("middle.bias"), 4.0)
        return snapshot(mine)

    for state in run(program, "dist_async", num_workers=2):
        assert state["last.bias"].tolist() == [3.0] * 5
        assert state["middle.bias"].unique().tolist() == [4.0]


@pytest.mark.parametrize("step_of_edit", [1, 5])
def test_an_edit_of_one_element_through_data_is_noticed(step_of_edit: int) -> None:
    """Such a write does not change the version counter."""

    def edit(model: nn.Module, step: int) -> None:
        if step == step_of_edit:
            model.get_parameter("middle.weight").data[100, 7] = 3.0

    def program(kv: KVStore) -> State:
        mine = copy.deepcopy(model)
        with echelon.Trainer(mine, momentum(mine), kv) as trainer:
            for step, batch in enumerate(batches(7)):
                loss_of(mine, batch).backward()
                trainer.step()
                edit(mine, step)
            return snapshot(mine)

    model = seeded(Net)
    plain = copy.deepcopy(model)
    optimizer = momentum(plain)
    for step, batch in enumerate(batches(7)):
        optimizer.zero_grad()
        loss_of(plain, batch).backward()
        optimizer.step()
        edit(plain, step)
    (state,) = run(program, "dist_sync", num_workers=1)
    assert_close(state, snapshot(plain), tolerances.of_training(batches(7)))


def test_without_lock_step_an_edit_is_refused_and_edit_weights_makes_it() -> None:
    def program(kv: KVStore) -> tuple[str, State]:
        mine = copy.deepcopy(model)
        with echelon.Trainer(mine, momentum(mine), kv) as trainer:
            first, second = batches(2)
            loss_of(mine, first).backward()
            trainer.step()
            clamp(mine)
            message = usage_error(loss_of(mine, second).backward)
            with trainer.edit_weights():
                torch.nn.init.constant_(mine.get_parameter("last.bias"), 3.0 + kv.rank)
            return message, snapshot(mine)

    model = seeded(Net)
    (message, first), (_, second) = run(program, "dist_async", num_workers=2)
    assert "under dist_async each worker has weights of its own" in message
    assert_same_bits(first, second)
    assert first["last.bias"].tolist() == [3.0] * 5


def test_a_conversion_to_another_dtype_is_refused() -> None:
    def program(kv: KVStore) -> str:
        model = seeded(Net)
        trainer = echelon.Trainer(model, momentum(model), kv)
        model.double()
        loss_of(model, batches(1, dtype=torch.float64)[0]).backward()
        return usage_error(trainer.step)

    (message,) = run(program, "dist_sync", num_workers=1)
    assert "torch.float64, but its key in the store is" in message
    assert "convert the model before the Trainer is created" in message
