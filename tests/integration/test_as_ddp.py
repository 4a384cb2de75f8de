"""Loops that touch gradients, with a Trainer whose workers run the optimizer, and with torch's own DDP.

Every loop runs on the same data in both ways. Workers wait before each backward pass for different times, so that one
that reads gradients before they are averaged is noticed.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from plain_loops import Batch, Net, State, assert_close, assert_same_bits, batches, joined, seeded, snapshot
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer
from torch.utils.checkpoint import checkpoint

import echelon
import tolerances
from echelon.errors import UsageError
from echelon.kvstore import KVStore
from echelon.launch.threads.in_process import run as run_with_servers
from echelon.train.trainer.workers import collective
from echelon.train.trainer.workers.flat_buckets import make_flat_buckets
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


def skips_overflow(worker: Worker, data: Sequence[Batch]) -> None:
    """In the second step the loss of one worker overflows: all skip the step and lower their scale."""
    scaler = GradScaler("cpu", init_scale=8.0, growth_interval=2)
    for number, batch in enumerate(data):
        worker.optimizer.zero_grad()
        loss = worker.loss(batch)
        if number == 1 and worker.rank == 1:
            loss = loss * float("inf")
        worker.backward(scaler.scale(loss))
        scaler.unscale_(worker.optimizer)
        nn.utils.clip_grad_norm_(worker.net.parameters(), 0.2)
        scaler.step(worker.optimizer)
        scaler.update()
        worker.noted.append(scaler.get_scale())


LOOPS: list[Loop] = [
    skips_overflow,
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
            worker = Worker(kv.rank, model, model, optimizer, optimizer.step, trainer.accumulate)
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


# --- models that are not used as a whole, or not in one backward pass


class TwoHeads(nn.Module):
    """The data select a head, so that the workers have gradients for different parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(64, 7)
        self.heads = nn.ModuleList([nn.Linear(7, 5), nn.Linear(7, 5)])
        self.never = nn.Linear(3, 3)

    def forward(self, images: Tensor) -> Tensor:
        head = self.heads[int(images[0, 0, 0, 0] > 0)]
        logits: Tensor = head(self.body(images.flatten(1)).relu())
        return logits


class Checkpointed(nn.Module):
    """Reentrant checkpoints: backward runs inside backward, for the first or the last parameters."""

    def __init__(self, *parts: str) -> None:
        super().__init__()
        self.net = Net()
        self.parts = parts

    def forward(self, images: Tensor) -> Tensor:
        hidden = images.requires_grad_()
        for name in ("first", "middle", "last"):
            layer = self.net.get_submodule(name)
            hidden = hidden.flatten(1) if name == "middle" else hidden
            run = partial(checkpoint, layer, use_reentrant=True) if name in self.parts else layer
            hidden = run(hidden).tanh()
        return hidden


@pytest.mark.parametrize("store", ["nccl_allreduce", "dist_sync"])
def test_workers_that_use_different_parameters(store: str, tmp_path: Path) -> None:
    net, data = seeded(TwoHeads), parts()
    expected = with_ddp(clips_by_norm, net, data, tmp_path, find_unused_parameters=True)
    assert_as_ddp(with_trainer(clips_by_norm, net, data, store), expected, data)


@pytest.mark.parametrize("where", [("first",), ("last",), ("first", "middle", "last")])
def test_reentrant_checkpoints(where: tuple[str, ...], tmp_path: Path) -> None:
    net, data = seeded(lambda: Checkpointed(*where)), parts()
    expected = with_ddp(clips_by_norm, net, data, tmp_path)
    assert_as_ddp(with_trainer(clips_by_norm, net, data), expected, data)


class Words(nn.Module):
    """Embeddings with sparse gradients beside a dense layer. The workers use different rows, and one word twice."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 4, sparse=True)
        self.bag = nn.EmbeddingBag(30, 4, sparse=True, mode="sum")
        self.last = nn.Linear(4, 5)

    def forward(self, images: Tensor) -> Tensor:
        words = (images.flatten(1)[:, :6].abs() * 10).long()
        logits: Tensor = self.last(self.table(words % 50).mean(1) + self.bag(words % 30))
        return logits


def plain_sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.1)  # with weight decay or momentum, SGD refuses sparse gradients


def test_sparse_gradients_are_gathered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "make_optimizer", plain_sgd)
    net, data = seeded(Words), parts()
    expected = with_ddp(reads_gradients, net, data, tmp_path)
    found = with_trainer(reads_gradients, net, data)
    assert any(gradient.is_sparse for gradient in found[0][1])
    assert_as_ddp(found, expected, data)


@pytest.mark.parametrize("store", ["nccl", "dist_sync"])
def test_sparse_gradients_are_refused_where_they_cannot_be_averaged(
    store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "make_optimizer", plain_sgd)
    with pytest.raises(UsageError, match=r"'(bag|table).weight' has sparse gradients, which"):
        with_trainer(reads_gradients, seeded(Words), parts(1), store)


@pytest.mark.parametrize("store", ["nccl_allreduce", "dist_sync"])
def test_parameters_that_the_optimizer_gets_later(store: str) -> None:
    """A part is frozen at first and later made trainable; another part is added to the optimizer later."""

    def loop(worker: Worker, data: Sequence[Batch]) -> None:
        last, first = worker.net.get_submodule("last"), worker.net.get_submodule("first")
        for step, batch in enumerate(data):
            if step == 1:
                worker.net.get_submodule("middle").requires_grad_(True)
            if step == 2:
                nn.init.constant_(last.get_parameter("bias"), 0.1 * (1 + worker.rank))  # rank 0's values count
                worker.optimizer.add_param_group({"params": last.parameters(), "lr": 0.3})
            worker.backward(worker.loss(batch))
            worker.step()
            first.requires_grad_(step != 2)
            worker.optimizer.zero_grad()

    def without_last(model: nn.Module) -> Optimizer:
        model.get_submodule("middle").requires_grad_(False)
        return SGD([p for name, p in model.named_parameters() if "last" not in name], lr=0.1, momentum=0.9)

    net, data = seeded(Net), parts()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "make_optimizer", without_last)
        found = with_trainer(loop, net, data, store)
    plain = copy.deepcopy(net)
    optimizer = without_last(plain)
    loop(Worker(0, plain, plain, optimizer, optimizer.step, nullcontext), joined(data))
    assert_close(found[0][0], snapshot(plain), tolerances.of_training(joined(data)))
    for state, _ in found:
        assert_same_bits(state, found[0][0])


def test_a_graph_that_is_retained_for_a_second_backward_pass() -> None:
    """DDP does not average the second pass. One process on all data shows what is right."""

    def loop(worker: Worker, data: Sequence[Batch]) -> None:
        for batch in data:
            worker.optimizer.zero_grad()
            loss = worker.loss(batch)
            worker.backward(loss, retain_graph=True)
            worker.backward(loss)
            worker.step()

    net, data = seeded(Net), parts()
    found = with_trainer(loop, net, data)
    plain = copy.deepcopy(net)
    optimizer = make_optimizer(plain)
    loop(Worker(0, plain, plain, optimizer, optimizer.step, nullcontext), joined(data))
    assert_close(found[0][0], snapshot(plain), tolerances.of_training(joined(data)))


# --- workers that do not make the same steps


@pytest.mark.parametrize("store", ["nccl_allreduce", "dist_sync"])
@pytest.mark.parametrize("counts", [(4, 2, 3), (1, 4, 4), (0, 3, 0)])
def test_workers_with_different_numbers_of_batches(store: str, counts: tuple[int, ...], tmp_path: Path) -> None:
    """Those that are out of data take part until the last has ended, and end with its weights and optimizer state."""
    net = seeded(Net)
    data = [part[:count] for part, count in zip(parts(), counts, strict=True)]

    def with_join(worker: Worker, batches: Sequence[Batch]) -> None:
        assert isinstance(worker.model, DistributedDataParallel)
        with worker.model.join(divide_by_initial_world_size=False):
            clips_by_norm(worker, batches)

    expected = with_ddp(with_join, net, data, tmp_path)

    def program(kv: KVStore) -> tuple[State, Any]:
        model = copy.deepcopy(net)
        optimizer = make_optimizer(model)
        with echelon.Trainer(model, optimizer, kv, update_on_kvstore=False) as trainer:
            clips_by_norm(Worker(kv.rank, model, model, optimizer, trainer.step, trainer.accumulate), data[kv.rank])
        return snapshot(model), optimizer.state_dict()["state"]

    run = run_with_servers if store == "dist_sync" else run_in_group
    found = run(program, store, num_workers=WORKERS)
    longest = counts.index(max(counts))
    for rank, (state, momenta) in enumerate(found):
        assert_same_bits(state, found[0][0])
        if store != "dist_sync" or counts[rank] == max(counts):
            torch.testing.assert_close(momenta, found[longest][1], rtol=0, atol=0)
    assert_close(found[0][0], expected[longest][0], tolerances.of_training(joined(parts())))


def test_a_step_on_some_workers_only_is_an_error() -> None:
    """A worker that looks at its own loss after backward and does not make the step would have other weights."""

    def loop(worker: Worker, data: Sequence[Batch]) -> None:
        for number, batch in enumerate(data):
            worker.backward(worker.loss(batch))
            if not (worker.rank == 1 and number == 1):
                worker.step()

    for store in ("nccl_allreduce", "dist_sync"):
        with pytest.raises(UsageError, match="but other workers are at other clocks"):
            with_trainer(loop, seeded(Net), parts(), store)


@pytest.mark.parametrize("sends", [False, True])
def test_a_backward_pass_that_fails_can_be_repeated_if_nothing_was_sent(sends: bool) -> None:
    """Then the others wait for the next pass of the worker. Otherwise it has missed a part of what they did."""

    def program(kv: KVStore) -> State:
        if sends:
            vars(collective)["make_flat_buckets"] = partial(make_flat_buckets, limit=100)  # in this process only
        model = seeded(Net)
        failures = [ArithmeticError("in a hook")] if kv.rank == 0 else []

        def fail_once(_: Tensor) -> None:
            if failures:
                raise failures.pop()

        with echelon.Trainer(model, make_optimizer(model), kv) as trainer:
            model.get_parameter("first.weight").register_hook(fail_once)
            for images, labels in batches(3):
                try:
                    nn.functional.cross_entropy(model(images), labels).backward()
                except ArithmeticError:
                    trainer.zero_grad()
                else:
                    trainer.step()
        return snapshot(model)

    if sends:
        with pytest.raises(UsageError, match="worker 0: a backward pass failed at clock 0"):
            run_in_group(program, "nccl_allreduce", num_workers=2)
    else:
        found = run_in_group(program, "nccl_allreduce", num_workers=2)
        assert_same_bits(found[0], found[1])
