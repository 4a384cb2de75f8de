"""Mistakes in a training loop, which are errors instead of silently wrong weights."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable

import pytest
import torch
from plain_loops import (
    Net,
    State,
    assert_same_bits,
    batches,
    loss_of,
    momentum,
    on_one_worker,
    plain_step,
    seeded,
    snapshot,
    usage_error,
)
from torch import nn
from torch.optim import SGD

import echelon
from echelon.errors import UsageError
from echelon.kvstore import KVStore, create
from echelon.launch.threads.in_process import run

pytestmark = pytest.mark.numeric


def test_invalid_arguments() -> None:
    model = seeded(Net)
    stranger = nn.Linear(2, 2)
    with create("local") as kv:
        with pytest.raises(UsageError, match="2 parameters that do not belong to the model"):
            echelon.Trainer(model, momentum(stranger), kv)
        with pytest.raises(UsageError, match="are only valid with the name of a store"):
            echelon.Trainer(model, momentum(model), kv, staleness=3)
    with pytest.raises(UsageError, match="kvstore must be the name of a store or a KVStore, not 3"):
        echelon.Trainer(model, momentum(model), 3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="did you mean 'dist_sync'"):
        echelon.Trainer(model, momentum(model), "dist_sink")
    with pytest.raises(UsageError, match="dist_ssync needs a scheduler"):
        echelon.Trainer(model, momentum(model), "dist_ssync", staleness=3)


def test_a_gradient_of_a_parameter_that_was_frozen_at_the_start() -> None:
    def program(kv: KVStore) -> str:
        model = seeded(Net)
        model.middle.requires_grad_(False)
        trainer = echelon.Trainer(model, SGD(model.parameters(), lr=0.1), kv)
        plain_step(model, trainer.optimizer, trainer, batches(1)[0])
        model.middle.requires_grad_(True)
        return usage_error(lambda: plain_step(model, trainer.optimizer, trainer, batches(1)[0]))

    assert on_one_worker(program, "dist_sync").startswith("'middle.weight' did not require a gradient when the Trainer")


def test_the_last_trainer_of_an_optimizer_steps_it() -> None:
    model = nn.Linear(2, 1)
    optimizer = SGD(model.parameters(), lr=0.1)
    for _ in range(2):  # the first Trainer is not closed
        trainer = echelon.Trainer(model, optimizer)
        before = model.weight.detach().clone()
        model(torch.ones(1, 2)).sum().backward()
        trainer.step()
        assert not torch.equal(model.weight, before)


def test_clearing_gradients_after_they_were_sent() -> None:
    def program(kv: KVStore) -> str:
        model = seeded(Net)
        trainer = echelon.Trainer(model, momentum(model), kv, overlap=True)
        loss_of(model, batches(1)[0]).backward()
        trainer.optimizer.zero_grad()
        return usage_error(trainer.step)

    assert "which was sent during backward" in on_one_worker(program, "dist_sync")


def clip(model: nn.Linear) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def replace_gradient(model: nn.Linear) -> None:
    assert model.weight.grad is not None
    model.weight.grad = model.weight.grad.clamp(-0.1, 0.1)


def end(change: Callable[[nn.Linear], object], model: nn.Linear, trainer: echelon.Trainer) -> None:
    change(model)
    trainer.step(3)


@pytest.mark.parametrize("change", [clip, replace_gradient])
def test_changing_a_gradient_after_it_was_sent(change: Callable[[nn.Linear], object]) -> None:
    """Otherwise clipping between backward and step would silently have no effect."""

    def program(kv: KVStore) -> None:
        model = nn.Linear(4, 2)
        trainer = echelon.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), kv, overlap=True)
        model(torch.ones(3, 4)).sum().backward()
        message = usage_error(lambda: end(change, model, trainer))  # the change itself raises, or the step does
        assert re.search(r"would change the gradient of.*which was sent.*overlap=False", message)

    on_one_worker(program, "dist_sync")


def test_check_finite_names_the_gradient_and_the_job_continues() -> None:
    """Worker 1 skips the step with the bad gradient, which does not reach the weights on the servers."""
    model = seeded(Net)

    def program(kv: KVStore) -> tuple[str, State]:
        torch.set_num_threads(1)
        mine = copy.deepcopy(model)
        message = ""
        with echelon.Trainer(mine, momentum(mine), kv, check_finite=True) as trainer:
            for number, (images, labels) in enumerate(batches(3)):
                bad = kv.rank == 1 and number == 1
                try:
                    loss_of(mine, (images * float("nan") if bad else images, labels)).backward()
                except UsageError as error:
                    message = str(error)
                    trainer.zero_grad()
                trainer.step()
            kv.barrier()
            return message, snapshot(mine)

    (no_message, state), (message, other) = run(program, "dist_sync", num_workers=2)
    assert no_message == ""
    assert message.startswith("worker 1: the gradient of ")
    assert "at clock 1 contains NaN or infinity" in message
    assert_same_bits(state, other)
    assert all(value.isfinite().all() for value in state.values())
