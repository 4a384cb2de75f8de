"""What a loop does to optimizers and parameters under stores without servers: hooks, states, memory, closures."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from collective_loops import KINDS, adam
from plain_loops import (
    STEPS,
    Loop,
    Net,
    State,
    assert_close,
    assert_same_bits,
    batches,
    joined,
    loss_of,
    parts_of,
    seeded,
    snapshot,
)
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim import LBFGS, SGD, Optimizer

import echelon
import tolerances
from echelon.errors import JobError, UsageError
from echelon.kvstore import KVStore, create
from forked import run

pytestmark = pytest.mark.numeric


def note_hooks(optimizer: Optimizer) -> list[str]:
    """Register hooks of both kinds. Return the list in which they note that they ran."""
    calls: list[str] = []

    def before(optimizer: Optimizer, *_: Any) -> None:
        calls.append("before")

    def after(optimizer: Optimizer, *_: Any) -> None:
        calls.append("after")

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    return calls


@pytest.mark.parametrize("store", KINDS)
def test_step_hooks_run_once_per_step(store: str) -> None:
    def program(kv: KVStore) -> list[str]:
        model = seeded(Net)
        optimizer = adam(model)
        calls = note_hooks(optimizer)
        with echelon.Trainer(model, optimizer, kv):
            for batch in batches(2):
                optimizer.zero_grad()
                loss_of(model, batch).backward()
                optimizer.step()
        return calls

    assert run(program, store, num_workers=2) == [["before", "after"] * 2] * 2


def test_the_state_of_a_divided_optimizer_is_whole() -> None:
    """state_dict() of nccl is that of nccl_allreduce, and a run that continues from it gives the same bits."""
    data = parts_of((4, 3))

    def program(kv: KVStore, start: dict[str, Any] | None, begin: int, end: int) -> dict[str, Any]:
        model = seeded(Net, seed=kv.rank)
        optimizer = adam(model)
        if start is not None and kv.rank == 0:  # rank 0's weights and state count
            model.load_state_dict(start["model"])
            optimizer.load_state_dict(start["optimizer"])
        with echelon.Trainer(model, optimizer, kv) as trainer:
            for batch in data[kv.rank][begin:end]:
                optimizer.zero_grad()
                loss_of(model, batch).backward()
                trainer.step()
            return {"model": snapshot(model), "optimizer": copy.deepcopy(optimizer.state_dict())}

    whole = run(lambda kv: program(kv, None, 0, STEPS), "nccl_allreduce", num_workers=2)
    for store in KINDS:
        half = run(lambda kv: program(kv, None, 0, 2), store, num_workers=2)
        other = KINDS[KINDS.index(store) - 1]
        found = run(partial(program, start=half[0], begin=2, end=STEPS), other, num_workers=2)
        for rank in range(2):
            assert_same_bits(found[rank]["model"], whole[0]["model"])
            torch.testing.assert_close(found[rank]["optimizer"], whole[0]["optimizer"], rtol=0, atol=0)


# --- memory


class Convolutions(nn.Sequential):
    """Has weights that channels-last order changes."""

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(1, 3, 3, stride=2), nn.Tanh(), nn.Conv2d(3, 4, 2), nn.Flatten(), nn.Linear(16, 5))


def convert(model: nn.Module) -> None:
    model.double()
    model.float()


def replace(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.clone() * 0.5


def as_vector(model: nn.Module) -> None:
    vector_to_parameters(parameters_to_vector(model.parameters()).detach() * 0.5, model.parameters())


def share(model: nn.Module) -> None:
    model.share_memory()


def reorder(model: nn.Module) -> None:
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


@pytest.mark.parametrize("move", [convert, replace, as_vector, share, reorder])
@pytest.mark.parametrize("store", KINDS)
def test_parameters_that_get_other_memory(store: str, move: Callable[[nn.Module], None]) -> None:
    data = parts_of((4, 4))

    def program(kv: KVStore) -> State:
        model = seeded(Convolutions)
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
        with echelon.Trainer(model, optimizer, kv):
            train(model, optimizer, data[kv.rank])
        return snapshot(model)

    def train(model: nn.Module, optimizer: Optimizer, steps: list[Any]) -> None:
        for number, batch in enumerate(steps):
            if number in (1, 2):
                move(model)
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()

    found = run(program, store, num_workers=2)
    plain = seeded(Convolutions)
    train(plain, SGD(plain.parameters(), lr=0.1, momentum=0.9), joined(data))
    assert_close(found[0], snapshot(plain), tolerances.of_training(joined(data)))
    assert_same_bits(found[0], found[1])


@pytest.mark.parametrize("store", KINDS)
def test_another_dtype_is_an_error(store: str) -> None:
    def program(kv: KVStore) -> None:
        model = seeded(Net)
        optimizer = SGD(model.parameters(), lr=0.1)
        with echelon.Trainer(model, optimizer, kv):
            model.double()
            loss_of(model, batches(1, dtype=torch.float64)[0]).backward()
            optimizer.step()

    with pytest.raises(UsageError, match=r"was torch.float32 on cpu when the Trainer .* is torch.float64 on cpu now"):
        run(program, store, num_workers=2)


def test_workers_with_other_layouts_are_an_error() -> None:
    def program(kv: KVStore) -> str:
        model = seeded(Convolutions)
        if kv.rank:
            reorder(model)
        with pytest.raises((UsageError, JobError)) as caught:  # rank 0 notices that rank 1 has failed
            echelon.Trainer(model, SGD(model.parameters(), lr=0.1), kv)
        return str(caught.value)

    said = run(program, "nccl_allreduce", num_workers=2)
    assert "with strides (12, 1, 6, 3)" in said[1]


# --- closures


def lbfgs(model: nn.Module) -> Optimizer:
    return LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")


def with_closure(model: nn.Module, optimizer: Optimizer, data: list[Any]) -> list[float]:
    losses = []
    for batch in data:

        def closure(batch: Any = batch) -> Any:
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            return loss

        loss: Any = optimizer.step(closure)
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("make", [lbfgs, adam])
def test_a_closure_in_one_process(make: Callable[[nn.Module], Optimizer]) -> None:
    model, plain = seeded(Net), seeded(Net)
    optimizer = make(model)
    with echelon.Trainer(model, optimizer, "local") as trainer:
        losses = with_closure(model, optimizer, batches(3))
        assert trainer.clock == 3
    assert losses == with_closure(plain, make(plain), batches(3))
    assert_same_bits(snapshot(model), snapshot(plain))


def test_a_closure_in_a_group() -> None:
    data = parts_of((4, 3))

    def program(kv: KVStore) -> State:
        model = seeded(Net)
        optimizer = adam(model)
        with echelon.Trainer(model, optimizer, kv):
            with_closure(model, optimizer, data[kv.rank])
        return snapshot(model)

    expected = Loop(seeded(Net), adam).plain(joined(data))
    for state in run(program, "nccl_allreduce", num_workers=2):
        assert_close(state, expected, tolerances.of_training(joined(data), magnification=10))


def test_lbfgs_in_a_group_is_refused() -> None:
    def program(kv: KVStore) -> None:
        model = seeded(Net)
        echelon.Trainer(model, lbfgs(model), kv)

    with pytest.raises(UsageError, match=r"LBFGS decides by a worker's own loss .*kvstore='local'"):
        run(program, "nccl_allreduce", num_workers=2)


def test_a_second_step_without_a_forward_pass() -> None:
    """The gradients of the last backward pass are used again, as in plain PyTorch."""
    model = seeded(Net)
    optimizer = SGD(model.parameters(), lr=0.1)
    plain = copy.deepcopy(model)
    with create("local") as kv, echelon.Trainer(model, optimizer, kv):
        for trained, own in ((model, optimizer), (plain, SGD(plain.parameters(), lr=0.1))):
            loss_of(trained, batches(1)[0]).backward()
            own.step()
            own.step()
    assert_same_bits(snapshot(model), snapshot(plain))
