"""Several stores of one job: each has its own keys, optimizer, scheme, clocks, barriers and requests to stop."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from plain_loops import seeded
from torch import Tensor, nn
from torch.optim import SGD, Adam

import echelon
import forked
from echelon.environment import Job
from echelon.errors import UsageError
from echelon.kvstore import KVStore, create
from echelon.launch.local.launcher import run as run_local
from echelon.launch.threads.in_process import run


def two_kinds(kv: KVStore) -> tuple[list[float], list[float], list[str]]:
    """Use a store with an optimizer and one without, with the same key, in turns."""
    with create("dist_async") as other:
        kv.init("w", torch.zeros(2))
        other.init("w", torch.full([2], 10.0))
        other.set_optimizer("sgd", lr=1.0)
        for _ in range(3):
            kv.pushpull("w", torch.ones(2), summed := torch.empty(2))
            other.pushpull("w", torch.ones(2), torch.empty(2))
        other.barrier()
        other.pull("w", moved := torch.empty(2))
        return summed.tolist(), moved.tolist(), [kv.type, other.type]


def test_stores_have_their_own_keys_optimizer_and_scheme() -> None:
    assert run(two_kinds, "dist_sync") == [([2.0, 2.0], [4.0, 4.0], ["dist_sync", "dist_async"])] * 2


def one_after_another(kv: KVStore) -> list[float]:
    kv.close()
    found = []
    for value in (1.0, 2.0, 3.0):
        with create("dist_sync") as fold:
            fold.init("w", torch.full([1], value))
            assert fold.num_workers == 2
            fold.pushpull("w", torch.ones(1), out := torch.empty(1))
            found.append(float(out))
    return found


def test_a_store_can_be_created_after_another_was_closed() -> None:
    assert run(one_after_another, "dist_sync") == [[2.0] * 3] * 2


def test_a_halt_stops_its_own_store_only() -> None:
    def program(kv: KVStore) -> tuple[str | None, str | None]:
        with create("dist_sync") as other:
            if kv.rank == 0:
                kv.halt("enough")
            kv.barrier()
            other.barrier()
            return kv.halted, other.halted

    assert run(program, "dist_sync") == [("enough", None)] * 2


def test_nothing_waits_for_a_worker_that_closed_the_store() -> None:
    """Worker 1 closes one store and takes part in the other; worker 0 continues alone in the first."""

    def program(kv: KVStore) -> tuple[list[int], list[int], float]:
        other = create("dist_sync")
        kv.init("w", torch.zeros(1))
        if kv.rank == 1:
            kv.close()
        else:
            for _ in range(3):
                kv.pushpull("w", torch.ones(1), out := torch.empty(1))
                kv.barrier()
        other.barrier()
        rest, both = kv.workers if kv.rank == 0 else [], other.workers
        other.barrier()
        return rest, both, float(out) if kv.rank == 0 else 0.0

    assert run(program, "dist_sync") == [([0], [0, 1], 1.0), ([], [0, 1], 0.0)]


def test_a_worker_that_has_closed_its_only_store_holds_up_nobody() -> None:
    """It stays in the job, because it may create another store."""
    others_finished = threading.Event()

    def program(kv: KVStore) -> bool:
        kv.init("w", torch.zeros(1))
        if kv.rank == 1:
            kv.close()
            return others_finished.wait(30)
        for _ in range(3):
            kv.pushpull("w", torch.ones(1))
        kv.barrier()
        kv.close()
        others_finished.set()
        return True

    assert run(program, "dist_sync") == [True, True]


def test_a_store_that_one_worker_created_and_closed_has_no_such_worker() -> None:
    created = threading.Event()

    def program(kv: KVStore) -> float:
        if kv.rank == 0:
            create("dist_sync").close()
            created.set()
            kv.barrier()
            return 2.0
        created.wait(30)
        kv.barrier()
        with create("dist_sync") as other:
            assert other.workers == [1]
            other.init("w", torch.full([1], 5.0))
            other.pushpull("w", torch.full([1], 2.0), out := torch.empty(1))
            return float(out)

    assert run(program, "dist_sync") == [2.0, 2.0]


def test_stores_in_a_different_order_are_refused() -> None:
    def program(kv: KVStore) -> None:
        with create("dist_sync" if kv.rank else "dist_async") as other:
            other.barrier()

    with pytest.raises(
        UsageError,
        match=r"worker \d created dist_a?sync\(\), but worker \d created dist_a?sync\(\); all workers must create "
        r"the same stores in the same order: this is store 1 of each, counted from 0",
    ):
        run(program, "dist_sync")


def test_the_other_workers_continue_when_one_with_several_stores_leaves() -> None:
    def program(kv: KVStore) -> list[list[int]]:
        other = create("dist_sync")
        other.init("w", torch.zeros(1))
        if kv.rank == 2:
            return [[], []]  # the in-process launcher closes its stores and leaves
        for _ in range(3):
            other.pushpull("w", torch.ones(1))
        kv.barrier()
        other.barrier()
        found = [kv.workers, other.workers]
        kv.barrier()
        return found

    assert run(program, "dist_sync", num_workers=3) == [[[0, 1]] * 2, [[0, 1]] * 2, [[], []]]


def test_stores_without_servers_halt_one_by_one() -> None:
    def program(kv: KVStore) -> list[str | None]:
        other = create("nccl")
        if kv.rank == 1:
            other.halt("enough")
        kv.barrier()
        other.barrier()
        found = [kv.halted, other.halted]
        kv.close()
        other.init("w", torch.zeros(1))
        other.pushpull("w", torch.ones(1), out := torch.empty(1))
        other.close()
        return [*found, str(float(out))]

    assert forked.run(program, "nccl_allreduce") == [[None, "enough", "2.0"]] * 2


# --- Trainers


def make() -> nn.Module:
    return nn.Linear(3, 2)


def loss_of(model: nn.Module, inputs: Tensor) -> Tensor:
    outputs: Tensor = model(inputs)
    return outputs.square().mean()


def inputs_of(rank: int, step: int) -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + rank))


RUNS = pytest.mark.parametrize(
    ("runs", "store"), [(run, "dist_sync"), (forked.run, "nccl_allreduce"), (forked.run, "nccl")]
)


@RUNS
def test_two_trainers_at_once_train_like_two_plain_optimizers(runs: Callable[..., Any], store: str) -> None:
    """As in a GAN: two networks, two optimizers, steps in turns."""
    firsts = [(seeded(make, 0), seeded(make, 1)) for _ in range(2)]
    plain = (seeded(make, 0), seeded(make, 1))
    optimizers = SGD(plain[0].parameters(), lr=0.1), Adam(plain[1].parameters(), lr=0.01)
    for step in range(3):
        joined = torch.cat([inputs_of(0, step), inputs_of(1, step)])
        for model, optimizer in zip(plain, optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(model, joined).backward()
            optimizer.step()

    def program(kv: KVStore) -> list[Tensor]:
        one, two = firsts[kv.rank]
        trainers = [
            echelon.Trainer(one, SGD(one.parameters(), lr=0.1), store),
            echelon.Trainer(two, Adam(two.parameters(), lr=0.01), store),
        ]
        for step in range(3):
            for model, trainer in zip((one, two), trainers, strict=True):
                loss_of(model, inputs_of(kv.rank, step)).backward()
                trainer.step(4)
        for trainer in trainers:
            trainer.close()
        return [p.detach().clone() for model in (one, two) for p in model.parameters()]

    expected = [p.detach() for model in plain for p in model.parameters()]
    for found in runs(program, store):
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(("runs", "store"), [(run, "dist_sync"), (run, "dist_async"), (forked.run, "nccl_allreduce")])
def test_cross_validation_has_a_trainer_per_fold(runs: Callable[..., Any], store: str) -> None:
    models = [[seeded(make, fold) for fold in range(3)] for _ in range(2)]

    def program(kv: KVStore) -> list[tuple[float, float]]:
        losses = []
        for fold in range(3):
            model = models[kv.rank][fold]
            with echelon.Trainer(model, SGD(model.parameters(), lr=0.1), store) as trainer:
                made = []
                for _ in range(8):
                    made.append(loss := loss_of(model, inputs_of(kv.rank, 0)))
                    loss.backward()
                    trainer.step(4)
            losses.append((made[0].item(), made[-1].item()))
        return losses

    for losses in runs(program, store):
        assert len(losses) == 3
        assert all(last < first for first, last in losses)


def test_two_trainers_with_less_data_on_one_worker_do_not_wait_for_each_other() -> None:
    """Worker 0 waits in the first Trainer's close() while worker 1 still makes steps with both."""

    def program(kv: KVStore) -> list[int]:
        models = [nn.Linear(4, 4), nn.Linear(4, 4)]
        trainers = [echelon.Trainer(one, SGD(one.parameters(), lr=0.1), "dist_sync") for one in models]
        for _ in range(3 + 3 * kv.rank):
            for model, trainer in zip(models, trainers, strict=True):
                model(torch.ones(2, 4)).sum().backward()
                trainer.step()
        for trainer in trainers:
            trainer.close()
        return [trainer.clock for trainer in trainers]

    assert run(program, "dist_sync", num_workers=2) == [[3, 3], [6, 6]]


TWO_UNEVEN = """
import torch, echelon
models = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)]
trainers = [echelon.Trainer(m, torch.optim.SGD(m.parameters(), 0.1, momentum=0.9), "dist_sync") for m in models]
rank = trainers[0].kvstore.rank
for _ in range(3 + 3 * rank):
    for model, trainer in zip(models, trainers):
        model(torch.ones(2, 4)).sum().backward()
        trainer.step()
for trainer in trainers:
    trainer.close()
print([p.sum().item() for m in models for p in m.parameters()])
"""


def test_without_servers_two_trainers_with_less_data_on_one_worker_end_with_equal_weights() -> None:
    """Worker 0 takes part in the steps of both Trainers while it waits in the close() of the first."""
    lines: list[str] = []
    job = Job(num_workers=2, timeout_s=60.0)
    assert run_local(job, [sys.executable, "-c", TWO_UNEVEN], on_line=lambda _, text: lines.append(text)) == 0
    assert len(lines) == 2
    assert lines[0] == lines[1]
