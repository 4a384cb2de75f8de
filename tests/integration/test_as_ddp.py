"""Loops that touch gradients, with a Trainer whose workers run the optimizer, and with torch's own DDP.

Every loop runs on the same data in both ways. Workers wait before each backward pass for different times, so that one
that reads gradients before they are averaged is noticed.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from plain_loops import Batch, Net, State, assert_close, assert_same_bits, batches, joined, seeded, snapshot
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

import echelon
import tolerances
from echelon.kvstore import KVStore
from echelon.launch.in_process import run as run_with_servers
from forked import Fork
from forked import run as run_in_group

pytestmark = pytest.mark.numeric

WORKERS = 3
STEPS = 4
DELAYS_S = (0.0, 0.02, 0.005)


@dataclass
class Worker:
    """What a loop sees of one worker, whoever averages its gradients."""

    rank: int
    net: nn.Module  # has the parameters
    model: nn.Module  # is called
    optimizer: Optimizer
    step: Callable[[], object]
    accumulate: Callable[[], AbstractContextManager[Any]]
    noted: list[Any] = field(default_factory=list)  # what the loop has read

    def loss(self, batch: Batch) -> Tensor:
        return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

    def backward(self, loss: Tensor, **options: Any) -> None:
        time.sleep(DELAYS_S[self.rank])
        loss.backward(**options)

    def note_gradients(self) -> None:
        self.noted += [None if p.grad is None else p.grad.clone() for p in self.net.parameters()]


Loop = Callable[[Worker, Sequence[Batch]], None]


def clips_by_norm(worker: Worker, data: Sequence[Batch]) -> None:
    for batch in data:
        worker.optimizer.zero_grad()
        worker.backward(worker.loss(batch))
        worker.noted.append(nn.utils.clip_grad_norm_(worker.net.parameters(), 0.1))
        worker.step()


def clips_by_value_in_place(worker: Worker, data: Sequence[Batch]) -> None:
    for batch in data:
        worker.optimizer.zero_grad(set_to_none=False)
        worker.backward(worker.loss(batch))
        nn.utils.clip_grad_value_(worker.net.parameters(), 0.01)
        worker.step()


def reads_gradients(worker: Worker, data: Sequence[Batch]) -> None:
    for batch in data:
        worker.optimizer.zero_grad()
        worker.backward(worker.loss(batch))
        worker.note_gradients()
        worker.step()


def adds_two_losses(worker: Worker, data: Sequence[Batch]) -> None:
    for batch in data:
        worker.optimizer.zero_grad()
        worker.backward(worker.loss(batch))
        worker.backward(worker.loss((batch[0] * 2, batch[1])) * 0.3)
        worker.note_gradients()
        worker.step()


def accumulates(worker: Worker, data: Sequence[Batch]) -> None:
    for images, labels in data:
        worker.optimizer.zero_grad()
        with worker.accumulate():
            worker.backward(worker.loss((images[:3], labels[:3])) / 2)
        worker.backward(worker.loss((images[3:], labels[3:])) / 2)
        worker.step()


def keeps_two_sets_of_gradients(worker: Worker, data: Sequence[Batch]) -> None:
    """As gradient surgery does: it holds the tensors of the first backward pass during the second."""
    for batch in data:
        worker.optimizer.zero_grad()
        worker.backward(worker.loss(batch))
        first = [p.grad for p in worker.net.parameters()]
        worker.optimizer.zero_grad()
        worker.backward(worker.loss((batch[0] + 1, batch[1])))
        for parameter, gradient in zip(worker.net.parameters(), first, strict=True):
            assert parameter.grad is not None
            assert gradient is not None
            parameter.grad = 0.7 * parameter.grad + 0.3 * gradient
        worker.step()


LOOPS: list[Loop] = [
    clips_by_norm,
    clips_by_value_in_place,
    reads_gradients,
    adds_two_losses,
    accumulates,
    keeps_two_sets_of_gradients,
]


def make_optimizer(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


Found = tuple[State, list[Any]]


def with_ddp(loop: Loop, net: nn.Module, data: list[list[Batch]], folder: Path, **options: Any) -> list[Found]:
    """Run a loop with DDP, one process per part of the data."""

    def program(rank: int) -> Found:
        dist.init_process_group("gloo", f"file://{folder}/ddp", rank=rank, world_size=len(data))
        model = DistributedDataParallel(net, **options)
        optimizer = make_optimizer(net)
        worker = Worker(rank, net, model, optimizer, optimizer.step, model.no_sync)
        loop(worker, data[rank])
        found = snapshot(net), worker.noted
        dist.barrier()
        return found  # the fork exits with its process group, whose destructor may wait for DDP's

    return _results([Fork(program, rank) for rank in range(len(data))])


def with_trainer(
    loop: Loop, net: nn.Module, data: list[list[Batch]], store: str = "nccl_allreduce", **options: Any
) -> list[Found]:
    """Run a loop with a Trainer, on a store without servers, or on servers that only sum."""

    def program(kv: KVStore) -> Found:
        model = copy.deepcopy(net)
        optimizer = make_optimizer(model)
        with echelon.Trainer(model, optimizer, kv, update_on_kvstore=False, **options) as trainer:
            worker = Worker(kv.rank, model, model, optimizer, trainer.step, trainer.accumulate)
            loop(worker, data[kv.rank])
            found = snapshot(model), worker.noted
            kv.barrier()
        return found

    if store == "dist_sync":
        return run_with_servers(program, store, num_workers=len(data))
    return run_in_group(program, store, num_workers=len(data))


def _results(forks: list[Fork]) -> list[Any]:
    found = [fork.result() for fork in forks]
    for error in found:
        if isinstance(error, BaseException):
            raise error
    return found


def parts(steps: int = STEPS, workers: int = WORKERS) -> list[list[Batch]]:
    return [batches(steps, seed=10 + rank) for rank in range(workers)]


def assert_as_ddp(ours: list[Found], theirs: list[Found], data: list[list[Batch]]) -> None:
    """Check that the weights are DDP's within rounding, equal on all workers, and that the loops read the same."""
    tolerance = tolerances.of_training(joined(data))
    assert_close(ours[0][0], theirs[0][0], tolerance)
    for state, _ in ours:
        assert_same_bits(state, ours[0][0])
    for (_, mine), (_, wanted) in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_a_loop_is_as_under_ddp(loop: Loop, tmp_path: Path) -> None:
    net, data = seeded(Net), parts()
    expected = with_ddp(loop, net, data, tmp_path)
    assert_as_ddp(with_trainer(loop, net, data), expected, data)
    assert_as_ddp(with_trainer(loop, net, data, overlap=False), expected, data)
    assert_as_ddp(with_trainer(loop, net, data, "dist_sync"), expected, data)
