"""A script that calls torch.set_default_device: tensors of the store and of the Trainer stay on the CPU.

The default device here is `meta`, which has no values: a tensor that is created there by mistake is an error.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from plain_loops import State, assert_close, batches, loss_of, on_one_worker, seeded, snapshot
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

import echelon
import forked
from echelon.kvstore import KVStore
from echelon.launch.threads.in_process import run
from tolerances import reordering

STEPS = 3
MAX_NORM = 0.05


class Tables(nn.Module):
    """A table of embeddings with sparse gradients, and one of which no row is used."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Embedding(40, 5, sparse=True)
        self.unused = nn.Embedding(30, 5, sparse=True)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.used((images.flatten(1)[:, :7] * 4).long() % 40).sum(1)
        return logits


def images_model() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 5))


def train(kv: KVStore, model: nn.Module, make: Any, options: dict[str, Any], default: str = "meta") -> State:
    """Train on a worker, use what reads and writes the store besides, and return what it ends with."""
    torch.set_num_threads(1)
    mine = copy.deepcopy(model)
    data = batches(STEPS, seed=kv.rank)
    optimizer: Optimizer = make(mine.parameters())
    with torch.device(default), echelon.Trainer(mine, optimizer, kv, **options) as trainer:
        for batch in data:
            loss_of(mine, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        trainer.load_optimizer_state(trainer.optimizer_state())
        with trainer.edit_weights():
            next(mine.parameters()).data.mul_(0.5)
        trainer.average_buffers()
        total = trainer.all_reduce(data[0][0].sum(), op="sum")
        return snapshot(mine) | trainer.optimizer_state() | {"total": total}


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("local", [False, True])
def test_with_servers(local: bool, clips: bool) -> None:
    options: dict[str, Any] = {"max_grad_norm": MAX_NORM} if clips else {}
    options |= {"update_on_kvstore": False} if local else {}
    model = seeded(images_model)

    def program(default: str) -> list[State]:
        return run(lambda kv: train(kv, model, momentum, options, default), "dist_sync", num_workers=2)

    check(program("meta"), program("cpu"))


def test_a_sparse_table() -> None:
    model = seeded(Tables)

    def program(default: str) -> State:
        found: State = on_one_worker(lambda kv: train(kv, model, lambda p: SGD(p, lr=0.1), {}, default), "dist_sync")
        return found

    check([program("meta")], [program("cpu")])


def test_rows_of_a_key() -> None:
    def program(kv: KVStore) -> Tensor:
        with torch.device("meta"):
            kv.init("rows", torch.arange(12.0, device="cpu").view(6, 2).to_sparse(1))
            out = torch.zeros(2, 2, device="cpu")
            kv.row_sparse_pull("rows", out, row_ids=torch.tensor([4, 1], device="cpu"))
            return out

    assert on_one_worker(program, "dist_sync").tolist() == [[8, 9], [2, 3]]


@pytest.mark.parametrize("store", ["nccl", "nccl_allreduce"])
def test_without_servers(store: str) -> None:
    model = seeded(images_model)
    found, expected = (
        forked.run(lambda kv, d=d: train(kv, model, momentum, {}, d), store)  # type: ignore[misc]
        for d in ("meta", "cpu")
    )
    check(found, expected)


def test_adam_with_a_step_that_is_a_tensor() -> None:
    model = seeded(images_model)

    def program(default: str) -> State:
        found: State = on_one_worker(lambda kv: train(kv, model, lambda p: Adam(p), {}, default), "dist_sync")
        return found

    check([program("meta")], [program("cpu")])


def momentum(parameters: Any) -> Optimizer:
    return SGD(parameters, lr=0.1, momentum=0.9)


def check(found: list[State], expected: list[State]) -> None:
    """Check all tensors of all workers. The order of sums may differ between jobs."""
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        assert {tensor.device.type for tensor in one.values()} == {"cpu"}
        assert_close(one, other, reordering(torch.float32, 6 * 144, STEPS, magnification=10))
