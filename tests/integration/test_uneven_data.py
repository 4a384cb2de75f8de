"""Workers with different numbers of batches: nobody waits for a worker that has no data left, at any call."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from plain_loops import STORES, Batch, assert_same_bits, batches, loss_of, momentum, seeded, snapshot
from torch import Tensor, nn

import echelon
import forked
from echelon.errors import UsageError
from echelon.kvstore import KVStore
from echelon.launch.threads.in_process import run

EPOCHS = 3
COUNTS = (5, 2, 0)  # batches per epoch of each worker


class Normed(nn.Module):
    """Has buffers, which the workers average."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(1)
        self.last = nn.Linear(64, 5)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.last(self.norm(images).flatten(1))
        return logits


def data_of(rank: int, epoch: int) -> list[Batch]:
    return batches(COUNTS[rank], seed=10 * epoch + rank)


def train(kv: KVStore, start: nn.Module) -> list[dict[str, Tensor]]:
    """Train with one call of each kind that waits for all workers per epoch. Return the weights after each epoch."""
    model = copy.deepcopy(start)
    trainer = echelon.Trainer(model, momentum(model), kv, average_buffers=True)
    after = []
    for epoch in range(EPOCHS):
        for batch in data_of(kv.rank, epoch):
            loss_of(model, batch).backward()
            trainer.step(len(batch[0]))
        trainer.average_buffers()
        kv.barrier()
        assert trainer.gather(kv.rank) == [0, 1, 2]
        trainer.refresh()
        after.append({name: value for name, value in snapshot(model).items() if value.is_floating_point()})
        kv.barrier()
    trainer.close()
    return after


@pytest.mark.parametrize("store", ["dist_sync", "dist_async", "dist_ssync", "dist_gsync"])
def test_workers_with_fewer_batches_wait_for_the_others_at_the_end_of_an_epoch(store: str) -> None:
    options: dict[str, Any] = {**STORES[store], **({"groups": [[0, 1], [2]]} if store == "dist_gsync" else {})}
    start = seeded(Normed)
    found = run(lambda kv: train(kv, start), store, num_workers=3, **options)
    for epoch in range(EPOCHS):
        for other in found[1:]:
            assert_same_bits(other[epoch], found[0][epoch])
    assert not torch.equal(found[0][0]["last.weight"], found[0][-1]["last.weight"])


def test_a_local_update_cannot_continue_after_missed_steps() -> None:
    def worker(kv: KVStore) -> str:
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 5))
        trainer = echelon.Trainer(model, momentum(model), kv, update_on_kvstore=False)
        for batch in batches(3 - kv.rank):
            loss_of(model, batch).backward()
            trainer.step()
        kv.barrier()
        loss_of(model, batch).backward()
        try:
            trainer.step()
        except UsageError as error:
            return str(error)
        return ""

    found = run(worker, "dist_sync")
    assert found[0] == ""
    assert found[1].startswith("worker 1 waited in a barrier while others made steps, which its optimizer lacks; give")


@pytest.mark.parametrize("store", ["dist_sync", "nccl"])
def test_without_servers_workers_with_fewer_batches_wait_for_the_others(store: str) -> None:
    start = seeded(Normed)
    found = forked.run(lambda kv: train(kv, start), store, num_workers=3)
    for epoch in range(EPOCHS):
        for other in found[1:]:
            assert_same_bits(other[epoch], found[0][epoch])


@pytest.mark.parametrize(("runs", "store"), [(run, "dist_sync"), (forked.run, "dist_sync"), (forked.run, "nccl")])
def test_nobody_waits_for_a_worker_that_closes_its_trainer_epochs_before_the_others(runs: Any, store: str) -> None:
    start = seeded(Normed)

    def worker(kv: KVStore) -> list[list[int]]:
        model = copy.deepcopy(start)
        ranks = []
        with echelon.Trainer(model, momentum(model), kv, average_buffers=True) as trainer:
            for epoch in range(EPOCHS if kv.rank == 0 else 1):
                for batch in data_of(0, epoch):
                    loss_of(model, batch).backward()
                    trainer.step()
                trainer.average_buffers()
                kv.barrier()
                ranks.append(trainer.gather(kv.rank))
        return ranks

    assert runs(worker, store) == [[[0, 1], [0], [0]], [[0, 1]]]


@pytest.mark.parametrize("store", ["dist_sync", "nccl"])
def test_without_servers_a_worker_that_closes_early_takes_part_to_the_end(store: str) -> None:
    start = seeded(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 5)))

    def worker(kv: KVStore) -> dict[str, Tensor]:
        model = copy.deepcopy(start)
        with echelon.Trainer(model, momentum(model), kv) as trainer:
            for batch in batches(4 - 2 * kv.rank, seed=kv.rank):
                loss_of(model, batch).backward()
                trainer.step()
        return snapshot(model)

    first, second = forked.run(worker, store)
    assert_same_bits(first, second)


def test_in_lock_step_a_round_counts_only_the_workers_that_have_a_batch() -> None:
    """The weights are those of one process that gets the batches of each round as one."""
    start = seeded(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 5)))

    def worker(kv: KVStore) -> dict[str, Tensor]:
        model = copy.deepcopy(start)
        with echelon.Trainer(model, momentum(model), kv) as trainer:
            for epoch in range(EPOCHS):
                for batch in data_of(kv.rank, epoch):
                    loss_of(model, batch).backward()
                    trainer.step(len(batch[0]))
                kv.barrier()
            return snapshot(model)

    plain = copy.deepcopy(start)
    optimizer = momentum(plain)
    for epoch in range(EPOCHS):
        data = [data_of(rank, epoch) for rank in range(len(COUNTS))]
        for index in range(max(COUNTS)):
            parts = [own[index] for own in data if index < len(own)]
            joined = torch.cat([images for images, _ in parts]), torch.cat([labels for _, labels in parts])
            optimizer.zero_grad()
            loss_of(plain, joined).backward()
            optimizer.step()
    for state in run(worker, "dist_sync", num_workers=3):
        for name, value in snapshot(plain).items():
            torch.testing.assert_close(state[name], value)
