"""The Trainer and the caller's optimizer: its groups, its state, its schedule, and clipping."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from plain_loops import (
    STORES,
    Batch,
    Loop,
    Net,
    assert_same_bits,
    batches,
    end_step,
    loss_of,
    momentum,
    on_one_worker,
    plain_step,
    seeded,
    snapshot,
    take_steps,
    with_and_without_trainer,
)
from torch import nn
from torch.optim import SGD, Adam, Optimizer

import echelon
from echelon.kvstore import KVStore
from echelon.train.trainer import CollectiveTrainer, ServerTrainer

pytestmark = pytest.mark.numeric


@pytest.mark.parametrize("store", STORES)
def test_parameter_groups_may_have_names_and_other_entries(store: str) -> None:
    def named(model: nn.Module) -> Optimizer:
        return SGD(model.named_parameters(), lr=0.1, momentum=0.9)

    def described(model: nn.Module) -> Optimizer:
        return Adam([{"params": list(model.parameters()), "name": "all", "mine": [1, "two"]}], lr=0.01)

    for optimizer in (named, described):
        assert_same_bits(*with_and_without_trainer(seeded(Net), plain_step, optimizer, store=store))


def with_earlier_steps(kind: Callable[[nn.Module], Optimizer]) -> Callable[[nn.Module], Optimizer]:
    """Return an optimizer with the state of some steps on another copy of the model."""

    def make(model: nn.Module) -> Optimizer:
        other = copy.deepcopy(model)
        before, after = kind(other), kind(model)
        for batch in batches(3, seed=5):
            loss_of(other, batch).backward()
            before.step()
            before.zero_grad()
        after.load_state_dict(before.state_dict())
        return after

    return make


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("kind", [momentum, lambda model: Adam(model.parameters(), lr=0.01, amsgrad=True)])
def test_an_optimizer_continues_from_its_state(store: str, kind: Callable[[nn.Module], Optimizer]) -> None:
    assert_same_bits(*with_and_without_trainer(seeded(Net), plain_step, with_earlier_steps(kind), store=store))


def test_clipping_works_without_overlap() -> None:
    def step(model: nn.Module, optimizer: Optimizer, trainer: echelon.Trainer | None, batch: Batch) -> None:
        loss_of(model, batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        end_step(optimizer, trainer, 6)

    for store in STORES:
        assert_same_bits(*with_and_without_trainer(seeded(Net), step, store=store, overlap=False))


def test_a_process_alone_may_clip_and_schedule_anything() -> None:
    def step(model: nn.Module, optimizer: Optimizer, trainer: echelon.Trainer | None, batch: Batch) -> None:
        loss_of(model, batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.param_groups[0]["momentum"] *= 0.9
        end_step(optimizer, trainer)

    for optimizer in (momentum, lambda model: torch.optim.Adamax(model.parameters())):
        if optimizer is momentum:
            assert_same_bits(*with_and_without_trainer(seeded(Net), step, optimizer, "local"))
        assert_same_bits(*with_and_without_trainer(seeded(Net), plain_step, optimizer, "device"))


def test_a_process_alone_may_divide_a_step_into_update_and_count() -> None:
    model = seeded(Net)
    expected = Loop(model, momentum).plain(batches(2))
    with echelon.Trainer(model, momentum(model), "device") as trainer:
        assert trainer.capturable
        for batch in batches(2):
            loss_of(model, batch).backward()
            trainer.update()
            trainer.zero_grad()
            trainer.count(6)
        assert (trainer.clock, trainer.samples_trained) == (2, 12)
        assert next(model.parameters()).grad is None
    assert_same_bits(snapshot(model), expected)


def test_a_trainer_creates_its_store_by_name() -> None:
    model = seeded(Net)
    expected = Loop(model, momentum).plain(batches(2))
    with echelon.Trainer(model, momentum(model), "local") as trainer:
        take_steps(model, trainer, batches(2))
    assert trainer.kvstore.type == "local"
    assert trainer.progress()["clock"] == 2
    assert_same_bits(snapshot(model), expected)


def test_the_store_selects_the_kind_of_trainer() -> None:
    def kind(kv: KVStore) -> type[echelon.Trainer]:
        model = seeded(Net)
        with echelon.Trainer(model, momentum(model), kv) as trainer:
            return type(trainer)

    assert on_one_worker(kind, "local") is CollectiveTrainer
    assert on_one_worker(kind, "dist_async") is ServerTrainer
