"""When a model has its new weights: in forward, in state_dict, after sync and after close; and loaded weights."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable

import pytest
import torch
from plain_loops import (
    STORES,
    Batch,
    Net,
    State,
    batches,
    end_step,
    loss_of,
    momentum,
    on_one_worker,
    plain_step,
    seeded,
    snapshot,
    with_and_without_trainer,
)
from torch import Tensor, nn
from torch.optim import Optimizer

import echelon
import tolerances
from echelon.kvstore import KVStore
from echelon.launch.threads.in_process import run

pytestmark = pytest.mark.numeric


class Direct(nn.Module):
    """Reads a module's parameters without calling the module, as nn.MultiheadAttention does."""

    def __init__(self) -> None:
        super().__init__()
        self.direct = nn.Linear(64, 50, bias=False)
        self.last = nn.Linear(50, 5)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.last(nn.functional.linear(images.flatten(1), self.direct.weight).tanh())
        return logits


@pytest.mark.parametrize("reader", ["forward", "state_dict", "sync"])
@pytest.mark.parametrize("make", [Net, Direct])
def test_readers_wait_for_late_weights(make: Callable[[], nn.Module], reader: str) -> None:
    """The other worker pushes only when this one is about to read, so the weights cannot have arrived before."""
    model = seeded(make)
    data = batches(5)
    reading = threading.Semaphore(0)

    def read(mine: nn.Module, trainer: echelon.Trainer) -> Tensor:
        if reader == "forward":
            with torch.no_grad():
                result: Tensor = mine(data[0][0])
            return result
        if reader == "state_dict":
            return next(iter(snapshot(mine).values()))
        reading.release()
        trainer.sync()
        return next(mine.parameters()).detach().clone()

    def program(kv: KVStore) -> list[Tensor]:
        torch.set_num_threads(1)
        mine = copy.deepcopy(model)
        if kv.rank == 0:  # these hooks run before the Trainer's
            mine.register_forward_pre_hook(lambda module, _: None if torch.is_grad_enabled() else reading.release())
            mine.register_state_dict_pre_hook(lambda *_: reading.release())
        seen = []
        with echelon.Trainer(mine, momentum(mine), kv, overlap=kv.rank == 0, lazy_pull=True) as trainer:
            for batch in data:
                loss_of(mine, batch).backward()
                if kv.rank == 1:
                    reading.acquire()
                trainer.step()
                if kv.rank == 0:
                    seen.append(read(mine, trainer))
        return seen

    plain = copy.deepcopy(model)
    optimizer = momentum(plain)
    seen, _ = run(program, "dist_sync", num_workers=2)
    tolerance = tolerances.of_training(data)
    for batch, found in zip(data, seen, strict=True):
        plain_step(plain, optimizer, None, batch)
        with torch.no_grad():
            expected = plain(data[0][0]) if reader == "forward" else next(plain.parameters())
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("store", STORES)
def test_state_dict_and_eval_see_the_newest_weights(store: str) -> None:
    """Directly after step(), without sync()."""
    outputs: dict[bool, list[Tensor]] = {False: [], True: []}

    def step(model: nn.Module, optimizer: Optimizer, trainer: echelon.Trainer | None, batch: Batch) -> None:
        loss_of(model, batch).backward()
        end_step(optimizer, trainer)
        model.eval()
        with torch.no_grad():
            outputs[trainer is not None].append(model(batch[0]))
        model.train()
        loss_of(model, batch).backward()
        end_step(optimizer, trainer)
        outputs[trainer is not None].append(snapshot(model)["last.weight"])

    with_and_without_trainer(seeded(Net), step, store=store)
    for found, expected in zip(outputs[True], outputs[False], strict=True):
        assert torch.equal(found, expected)


def test_a_model_can_be_used_and_saved_after_close() -> None:
    def program(kv: KVStore) -> tuple[Tensor, State]:
        model = seeded(Net)
        with echelon.Trainer(model, momentum(model), kv) as trainer:
            loss_of(model, batches(1)[0]).backward()
            trainer.step()
        loss_of(model, batches(1)[0]).backward()  # no hook sends this
        return model(batches(1)[0][0]).detach(), snapshot(model)

    output, state = on_one_worker(program, "dist_sync")
    model = Net()
    model.load_state_dict(state)
    assert torch.equal(model(batches(1)[0][0]), output)
