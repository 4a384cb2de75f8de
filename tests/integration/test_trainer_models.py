"""The Trainer with unusual models: unused, frozen, tied, empty and shared parameters, and buffers."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from plain_loops import (
    STORES,
    Loop,
    Net,
    State,
    assert_close,
    assert_same_bits,
    batches,
    joined,
    loss_of,
    momentum,
    on_one_worker,
    plain_step,
    seeded,
    snapshot,
    take_steps,
    with_and_without_trainer,
)
from torch import Tensor, nn
from torch.optim import Adam

import echelon
import tolerances
from echelon.errors import UsageError
from echelon.kvstore import KVStore
from echelon.launch.threads.in_process import run

pytestmark = pytest.mark.numeric


class TwoHeads(nn.Module):
    """The batch size selects a head, so the other head gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(64, 7)
        self.heads = nn.ModuleList([nn.Linear(7, 5), nn.Linear(7, 5)])
        self.never = nn.Linear(3, 3)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.heads[len(images) % 2](self.body(images.flatten(1)).relu())
        return logits


@pytest.mark.parametrize("optimizer", [momentum, lambda model: Adam(model.parameters(), lr=0.01)])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("store", ["local", "dist_sync", "dist_async"])
def test_parameters_without_a_gradient_do_not_change(store: str, overlap: bool, optimizer: Any) -> None:
    """As in torch: no update, not even by momentum or decay, and Adam counts the steps of each parameter separately."""
    data = [batches(1, size, seed=size)[0] for size in (2, 3, 3, 4, 5)]
    found, expected = with_and_without_trainer(seeded(TwoHeads), plain_step, optimizer, store, data, overlap=overlap)
    assert_same_bits(found, expected)


@pytest.mark.parametrize("on_servers", [True, False])
def test_a_gradient_that_only_some_workers_have_is_zero_for_the_others(on_servers: bool) -> None:
    """As under DDP: the mean is over the samples of all workers. A parameter without any gradient does not change."""
    model = seeded(TwoHeads)
    sizes = ((2, 3), (3, 4), (2, 2))  # by step, by worker
    data = [[batches(1, pair[rank], seed=10 * rank + i)[0] for i, pair in enumerate(sizes)] for rank in range(2)]
    loop = Loop(model, momentum)
    found = run(
        lambda kv: loop.worker(kv, data[kv.rank], update_on_kvstore=None if on_servers else False),
        "dist_sync",
        num_workers=2,
    )
    plain = copy.deepcopy(model)
    optimizer = momentum(plain)
    for step in zip(*data, strict=True):
        total = sum(len(images) for images, _ in step)
        for batch in step:
            (loss_of(plain, batch) * (len(batch[0]) / total)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same_bits(found[0], found[1])
    assert_close(found[0], snapshot(plain), tolerances.of_training(joined(data)))
    assert torch.equal(found[0]["never.weight"], model.get_parameter("never.weight"))


@pytest.mark.parametrize("store", ["local", "dist_sync"])
def test_frozen_parameters_do_not_change_and_have_no_key(store: str) -> None:
    model = seeded(Net)
    model.get_submodule("middle").requires_grad_(False)
    frozen = snapshot(model.get_submodule("middle"))
    found, expected = with_and_without_trainer(model, plain_step, store=store)
    assert_same_bits(found, expected)
    assert torch.equal(found["middle.weight"], frozen["weight"])

    def keys(kv: KVStore) -> str:
        mine = copy.deepcopy(model)
        with echelon.Trainer(mine, momentum(mine), kv), pytest.raises(UsageError) as caught:
            kv.pull("middle.weight", torch.empty(1111, 27))
        return str(caught.value)

    assert "'middle.weight' is not initialised" in on_one_worker(keys, store)


class Tied(nn.Module):
    """Two modules share a matrix, and one module is called twice in a forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(64, 9)
        self.square = nn.Linear(9, 9)
        self.decode = nn.Linear(9, 64, bias=False)
        self.decode.weight = nn.Parameter(self.encode.weight.detach().t().contiguous())
        self.again = nn.Linear(9, 64, bias=False)
        self.again.weight = self.decode.weight
        self.last = nn.Linear(64, 5)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.square(self.square(self.encode(images.flatten(1))).tanh()).tanh()
        logits: Tensor = self.last(self.decode(hidden) + self.again(hidden.relu()))
        return logits


@pytest.mark.parametrize("store", STORES)
def test_tied_weights_and_modules_used_twice(store: str) -> None:
    assert_same_bits(*with_and_without_trainer(seeded(Tied), plain_step, store=store))


class Odd(Net):
    """Has an empty parameter and a scalar one."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(0, 3))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images) * self.scale + self.nothing.sum()


@pytest.mark.parametrize("store", STORES)
def test_empty_and_scalar_parameters(store: str) -> None:
    assert_same_bits(*with_and_without_trainer(seeded(Odd), plain_step, store=store))


class Normed(nn.Module):
    """Has a BatchNorm layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(1)
        self.net = Net()

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.net(self.norm(images))
        return logits


@pytest.mark.parametrize("store", ["dist_sync", "dist_async"])
def test_batchnorm_statistics_stay_local_until_they_are_averaged(store: str) -> None:
    model = seeded(Normed)
    data = [[(images * (rank + 1) + rank, labels) for images, labels in batches(2)] for rank in range(3)]

    def program(kv: KVStore) -> tuple[State, State, State]:
        torch.set_num_threads(1)
        mine = copy.deepcopy(model)
        with echelon.Trainer(mine, momentum(mine), kv, average_buffers=True) as trainer:
            take_steps(mine, trainer, data[kv.rank])
            before = snapshot(mine)
            trainer.average_buffers()
            after = snapshot(mine)
            take_steps(mine, trainer, data[kv.rank])
            trainer.average_buffers()
            return before, after, snapshot(mine)

    found = run(program, store, num_workers=3)
    for name in ("norm.running_mean", "norm.running_var"):
        own = torch.stack([before[name] for before, _, _ in found])
        assert len(own.unique()) == 3, "each worker has its own data"
        for _, after, later in found:
            torch.testing.assert_close(after[name], own.mean(0))
            assert torch.equal(later[name], found[0][2][name])
            assert not torch.equal(later[name], after[name])
    assert {int(before["norm.num_batches_tracked"]) for before, _, _ in found} == {2}


def test_without_average_buffers_nothing_is_averaged() -> None:
    model = seeded(Normed)
    expected = Loop(model, momentum).plain(batches(2))

    def program(kv: KVStore) -> State:
        torch.set_num_threads(1)
        mine = copy.deepcopy(model)
        with echelon.Trainer(mine, momentum(mine), kv) as trainer:
            for images, labels in batches(2):
                loss_of(mine, (images + 100 * kv.rank, labels)).backward()
                trainer.step()
            trainer.average_buffers()
            kv.barrier()
            return snapshot(mine)

    alone, other = run(program, "dist_sync", num_workers=2)
    assert torch.equal(alone["norm.running_mean"], expected["norm.running_mean"])
    assert (other["norm.running_mean"] > 10).all()


@pytest.mark.parametrize("store", ["local", "dist_sync"])
def test_a_saved_or_copied_model_has_no_part_in_the_training(store: str) -> None:
    """As in plain PyTorch, `torch.save(model)` and `deepcopy(model)` work; the result is a model without a Trainer."""
    model, (batch, other) = seeded(Net), batches(2)

    def program(kv: KVStore) -> bytes:
        mine = copy.deepcopy(model)
        trainer = echelon.Trainer(mine, momentum(mine), kv, push_factors=True)
        copied = copy.deepcopy(mine)
        file = io.BytesIO()
        torch.save(mine, file)
        loss_of(mine, batch).backward()
        loss_of(copied, (other[0][:1], other[1][:1])).backward()
        trainer.step()
        assert trainer.samples_trained == len(batch[0])
        assert_same_bits(snapshot(copied), snapshot(model))
        trainer.close()
        return file.getvalue()

    data = on_one_worker(program, store)
    assert b"echelon" not in data
    loaded = torch.load(io.BytesIO(data), weights_only=False)
    assert_same_bits(snapshot(loaded), snapshot(model))
    assert torch.equal(loaded(batch[0]), model(batch[0]))
