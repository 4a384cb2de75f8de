"""The settings of an optimizer that change during training: servers use those of each step, as plain PyTorch does."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from plain_loops import (
    Batch,
    Net,
    State,
    assert_same_bits,
    batches,
    end_step,
    loss_of,
    on_one_worker,
    seeded,
    snapshot,
    take_steps,
    with_and_without_trainer,
)
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop
from torch.optim.lr_scheduler import CyclicLR, OneCycleLR

import echelon
from echelon.errors import UsageError
from echelon.kvstore import KVStore
from echelon.launch.threads.in_process import run

pytestmark = pytest.mark.numeric

Change = Callable[[int, dict[str, Any]], Mapping[str, Any]]


def every(kind: type[Optimizer], **settings: Any) -> Callable[[nn.Module], Optimizer]:
    """Return a function that makes an optimizer with two parameter groups."""

    def make(model: nn.Module) -> Optimizer:
        first, *others = model.parameters()
        groups: list[dict[str, Any]] = [{"params": [first]}, {"params": others, "lr": 0.02}]
        return kind(groups, **settings)

    return make


CHANGES: dict[str, tuple[Callable[[nn.Module], Optimizer], Change]] = {
    "sgd's momentum": (every(SGD, lr=0.1, momentum=0.9), lambda n, _: {"momentum": 0.9 - n / 10}),
    "sgd's momentum begins late": (every(SGD, lr=0.1, dampening=0.5), lambda n, _: {"momentum": 0.9 * (n > 1)}),
    "sgd's momentum pauses": (every(SGD, lr=0.1, momentum=0.9), lambda n, _: {"momentum": 0.9 * (n != 2)}),
    "sgd's other settings": (
        every(SGD, lr=0.1, momentum=0.9),
        lambda n, _: {"nesterov": n > 1, "weight_decay": n / 100, "maximize": n == 2, "lr": 0.1 / (n + 1)},
    ),
    "adam's betas": (every(Adam, lr=0.01), lambda n, _: {"betas": (0.9 - n / 50, 0.99), "eps": 1e-8 * (n + 1)}),
    "adamw's weight decay": (every(AdamW, lr=0.01, amsgrad=True), lambda n, _: {"weight_decay": n / 10}),
    "adagrad's decay": (
        every(Adagrad, lr=0.01, initial_accumulator_value=0.5),
        lambda n, _: {"lr_decay": n / 10, "weight_decay": n / 10},
    ),
    "rmsprop's alpha": (
        every(RMSprop, lr=0.01, momentum=0.9, centered=True),
        lambda n, _: {"alpha": 0.9 + n / 50, "momentum": 0.9 * (n != 1), "centered": n != 2},
    ),
    "one group only": (every(SGD, lr=0.1, momentum=0.9), lambda n, g: {"momentum": 0.5} if g["lr"] == 0.02 else {}),
    "mxnet's sgd": (
        every(echelon.optim.SGD, lr=0.1, momentum=0.0),
        lambda n, _: {"momentum": 0.9 * (n > 0), "weight_decay": n / 100, "clip_gradient": 0.1 * n or None},
    ),
    "mxnet's adam": (every(echelon.optim.Adam, lr=0.01), lambda n, _: {"betas": (0.9 - n / 50, 0.99)}),
}


@pytest.mark.parametrize("name", CHANGES)
def test_every_setting_may_change_in_every_step(name: str) -> None:
    make, change = CHANGES[name]
    steps: dict[int, int] = {}

    def step(model: nn.Module, optimizer: Optimizer, trainer: echelon.Trainer | None, batch: Batch) -> None:
        number = steps[id(optimizer)] = steps.get(id(optimizer), -1) + 1
        for group in optimizer.param_groups:
            group.update(change(number, group))
        loss_of(model, batch).backward()
        end_step(optimizer, trainer)

    assert_same_bits(*with_and_without_trainer(seeded(Net), step, make))


@pytest.mark.parametrize("store", ["dist_sync", "dist_async"])
@pytest.mark.parametrize("kind", [SGD, Adam])
@pytest.mark.parametrize("schedule", [OneCycleLR, CyclicLR])
def test_schedules_of_the_momentum(schedule: type, kind: type[Optimizer], store: str) -> None:
    settings = {"momentum": 0.9} if kind is SGD else {}
    limits = {"total_steps": 8} if schedule is OneCycleLR else {"base_lr": 0.01, "step_size_up": 2}
    schedules: dict[int, Any] = {}

    def step(model: nn.Module, optimizer: Optimizer, trainer: echelon.Trainer | None, batch: Batch) -> None:
        if id(optimizer) not in schedules:
            schedules[id(optimizer)] = schedule(optimizer, max_lr=0.1, **limits)
        loss_of(model, batch).backward()
        end_step(optimizer, trainer)
        schedules[id(optimizer)].step()

    make = every(kind, lr=0.01, **settings)
    assert_same_bits(*with_and_without_trainer(seeded(Net), step, make, store=store))


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        (Adam, {"amsgrad": True}, "adam cannot change amsgrad from False to True after .* the state max_exp_avg_sq"),
        (RMSprop, {"centered": True}, "rmsprop cannot change centered from False to True"),
        (
            RMSprop,
            {"momentum": 0.9},
            "rmsprop cannot change momentum from 0 to 0.9 .* needs? the state momentum_buffer",
        ),
        (SGD, {"momentum": "much"}, "the options of optimizer 'sgd' are incomplete or invalid"),
        (Adam, {"decoupled_weight_decay": True}, "decoupled_weight_decay cannot change"),
        (Adam, {"capturable": True}, "capturable=True cannot run on the servers"),
    ],
)
def test_a_setting_that_needs_another_state_is_refused(
    kind: type[Optimizer], changes: dict[str, Any], words: str
) -> None:
    def program(kv: KVStore) -> None:
        model = nn.Linear(4, 2)
        optimizer = kind(model.parameters(), lr=0.1)  # type: ignore[call-arg]
        trainer = echelon.Trainer(model, optimizer, kv)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        optimizer.param_groups[0].update(changes)

        def step() -> None:
            model(torch.ones(3, 4)).sum().backward()
            trainer.step(3)
            trainer.sync()

        with pytest.raises(UsageError, match=words):
            step()
        assert_same_bits(dict(model.state_dict()), before)

    on_one_worker(program, "dist_sync")


@pytest.mark.parametrize("setting", ["lr", "momentum"])
def test_workers_that_disagree_are_told_once(setting: str, caplog: pytest.LogCaptureFixture) -> None:
    model = seeded(Net)

    def program(kv: KVStore) -> State:
        own = copy.deepcopy(model)
        optimizer = SGD(own.parameters(), lr=0.1, momentum=0.1)
        with echelon.Trainer(own, optimizer, kv) as trainer:
            optimizer.param_groups[0][setting] = 0.1 * (kv.rank + 1)
            take_steps(own, trainer, batches(3))
            return snapshot(own)

    with caplog.at_level(logging.WARNING):
        states = run(program, "dist_sync", num_workers=2)
    assert_same_bits(*states)
    told = [record.getMessage() for record in caplog.records if record.name == "echelon.kvstore.servers.store"]
    text = f"worker 0 has {setting} 0.1 in parameter group 0, but worker 1 has 0.2 in the same step; the servers use"
    assert told == [f"{text} worker 0's. Give all workers the same schedule"] * 2
