"""Trainer(max_grad_norm=…): the gradient of every update is clipped by its global norm, under every kind of store."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import multi_device_jobs
import pytest
import torch
from plain_loops import (
    STEPS,
    STORES,
    Batch,
    MakeOptimizer,
    Net,
    State,
    assert_close,
    assert_same_bits,
    batches,
    joined,
    loss_of,
    momentum,
    on_one_worker,
    parts_of,
    seeded,
    snapshot,
    two_groups,
    usage_error,
)
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

import echelon
import forked
import tolerances
from echelon.errors import UsageError
from echelon.kvstore import KVStore
from echelon.kvstore.servers.store import ServerStore
from echelon.launch.threads.in_process import run
from jobs import until

pytestmark = pytest.mark.numeric

LIMIT = 3.0  # clips some steps of these loops
Found = tuple[list[float], State]


def adam(model: nn.Module) -> Optimizer:
    return Adam(model.parameters(), lr=0.01)


def plain(model: nn.Module, data: Sequence[Batch], optimizer: MakeOptimizer = momentum, limit: float = LIMIT) -> Found:
    """Train with plain PyTorch. Return the norm of every step and the last weights."""
    model = copy.deepcopy(model)
    made = optimizer(model)
    norms = []
    for batch in data:
        made.zero_grad()
        loss_of(model, batch).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), limit)))
        made.step()
    return norms, snapshot(model)


def worker(
    kv: KVStore,
    model: nn.Module,
    data: Sequence[Batch],
    optimizer: MakeOptimizer = momentum,
    limit: float = LIMIT,
    **options: Any,
) -> Found:
    """Do the same as one worker with a Trainer."""
    torch.set_num_threads(1)
    model = copy.deepcopy(model)
    norms = []
    with echelon.Trainer(model, optimizer(model), kv, max_grad_norm=limit, **options) as trainer:
        for batch in data:
            loss_of(model, batch).backward()
            norm = trainer.step(len(batch[0]))
            assert isinstance(norm, Tensor)
            assert norm.ndim == 0
            assert norm is trainer.grad_norm
            norms.append(float(norm))
        trainer.sync()
        state = snapshot(model)
        kv.barrier()
    return norms, state


def check(results: Sequence[Found], expected: Found, tolerance: float) -> None:
    """Check that all workers have the same numbers, within a tolerance of the expected ones."""
    for norms, weights in results:
        assert norms == results[0][0]
        assert norms == pytest.approx(expected[0], rel=tolerance)
        assert_close(weights, expected[1], tolerance)


# --- one worker


@pytest.mark.parametrize("optimizer", [momentum, adam])
@pytest.mark.parametrize("store", STORES)
def test_one_worker_gives_the_bits_of_plain_pytorch(store: str, optimizer: MakeOptimizer) -> None:
    model, data = seeded(Net), batches(STEPS)
    norms, weights = on_one_worker(lambda kv: worker(kv, model, data, optimizer), store)
    expected = plain(model, data, optimizer)
    assert norms == expected[0]
    assert max(norms) > LIMIT, "some steps are clipped"
    assert_same_bits(weights, expected[1])


def test_infinity_measures_without_clipping() -> None:
    model, data = seeded(Net), batches(2)
    norms, weights = on_one_worker(lambda kv: worker(kv, model, data, limit=math.inf), "dist_sync")
    assert norms == plain(model, data, limit=math.inf)[0]
    assert_same_bits(weights, plain(model, data, limit=math.inf)[1])


def fused(model: nn.Module) -> Optimizer:
    """Return an optimizer that divides by the loss scale itself, if GradScaler lets it."""
    return SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)


@pytest.mark.parametrize("optimizer", [momentum, fused])
@pytest.mark.parametrize("store", ["local", "dist_sync"])
def test_gradients_are_unscaled_before_they_are_clipped(store: str, optimizer: MakeOptimizer) -> None:
    model, data = seeded(Net), batches(STEPS)

    def scaled(mine: nn.Module, made: Optimizer, trainer: echelon.Trainer | None) -> Found:
        torch.set_num_threads(1)
        scaler, norms = torch.amp.GradScaler("cpu"), []
        for batch in data:
            made.zero_grad()
            scaler.scale(loss_of(mine, batch)).backward()
            if trainer is None:
                scaler.unscale_(made)
                norms.append(float(nn.utils.clip_grad_norm_(mine.parameters(), LIMIT)))
            scaler.step(made)
            if trainer is not None:
                assert trainer.grad_norm is not None
                norms.append(float(trainer.grad_norm))
            scaler.update()
        return norms, snapshot(mine)

    def with_trainer(kv: KVStore) -> Found:
        mine = copy.deepcopy(model)
        made = optimizer(mine)
        with echelon.Trainer(mine, made, kv, max_grad_norm=LIMIT) as trainer:
            return scaled(mine, made, trainer)

    norms, weights = on_one_worker(with_trainer, store)
    alone = copy.deepcopy(model)
    expected = scaled(alone, optimizer(alone), None)
    assert norms == expected[0]
    assert_same_bits(weights, expected[1])


# --- several workers whose gradients are summed


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("num_servers", [1, 2])
@pytest.mark.parametrize("sizes", [(4, 2), (3, 2, 1)])
def test_workers_equal_one_process_on_the_joined_batch(sizes: tuple[int, ...], num_servers: int, overlap: bool) -> None:
    model, parts = seeded(Net), parts_of(sizes)
    results = run(
        lambda kv: worker(kv, model, parts[kv.rank], two_groups, overlap=overlap),
        "dist_sync",
        num_workers=len(sizes),
        num_servers=num_servers,
    )
    data = joined(parts)
    check(results, plain(model, data, two_groups), tolerances.of_training(data))


@pytest.mark.parametrize(("store", "sums"), [("dist_sync", True), ("dist_async", False)])
def test_workers_that_have_left_do_not_change_where_gradients_are_clipped(store: str, sums: bool) -> None:
    """Otherwise a worker would clip its own gradient, and one that joins later would let the servers clip the sum."""

    def program(kv: KVStore) -> bool:
        assert isinstance(kv, ServerStore)
        if kv.rank == 0:
            until(lambda: kv._session.hosts.keys() == {0}, "a view without the other worker")
        return kv.sums_with_others

    assert run(program, store, num_workers=2) == [sums, sums]


def test_two_trainers_clip_apart_and_weights_may_come_back_later() -> None:
    firsts, parts, limits = [seeded(Net), seeded(Net, seed=5)], parts_of((4, 2)), (LIMIT, LIMIT / 10)

    def program(kv: KVStore) -> list[Found]:
        torch.set_num_threads(1)
        models = [copy.deepcopy(model) for model in firsts]
        trainers = [
            echelon.Trainer(model, momentum(model), "dist_sync", max_grad_norm=limit, lazy_pull=True)
            for model, limit in zip(models, limits, strict=True)
        ]
        norms: list[list[float]] = [[], []]
        for batch in parts[kv.rank]:
            for model, trainer, found in zip(models, trainers, norms, strict=True):
                loss_of(model, batch).backward()
                found.append(float(trainer.step()))  # type: ignore[arg-type]
        for trainer in trainers:
            trainer.close()
        return [(found, snapshot(model)) for found, model in zip(norms, models, strict=True)]

    results, data = run(program, "dist_sync", num_servers=2), joined(parts)
    for number, (model, limit) in enumerate(zip(firsts, limits, strict=True)):
        expected = plain(model, data, limit=limit)
        check([found[number] for found in results], expected, tolerances.of_training(data))


def test_servers_that_only_sum() -> None:
    model, parts = seeded(Net), parts_of((4, 2))
    results = run(lambda kv: worker(kv, model, parts[kv.rank], update_on_kvstore=False), "dist_sync")
    data = joined(parts)
    check(results, plain(model, data), tolerances.of_training(data))


@pytest.mark.parametrize("store", ["dist_device_sync", "nccl_allreduce", "nccl"])
def test_stores_without_servers(store: str) -> None:
    model, parts = seeded(Net), parts_of((4, 2))
    results = forked.run(lambda kv: worker(kv, model, parts[kv.rank]), store, num_workers=2)
    data = joined(parts)
    check(results, plain(model, data), tolerances.of_training(data))


@pytest.mark.parametrize("sizes", [(1, 2, 1), (2, 2, 2)], ids=["one worker", "two workers"])
def test_workers_of_several_devices(sizes: tuple[int, int, int]) -> None:
    model, parts = seeded(Net), parts_of((3, 4, 1, 5)[: sizes[0] * sizes[1]])
    results = multi_device_jobs.run(lambda kv: worker(kv, model, parts[kv.rank]), "dist_sync", sizes=sizes)
    data = joined(parts)
    check(results, plain(model, data), tolerances.of_training(data))


def test_batches_in_parts_are_clipped_once() -> None:
    model, (first, second) = seeded(Net), batches(2)

    def program(kv: KVStore) -> tuple[Tensor | None, Tensor | None, State]:
        torch.set_num_threads(1)
        mine = copy.deepcopy(model)
        with echelon.Trainer(mine, momentum(mine), kv, max_grad_norm=LIMIT) as trainer:
            with trainer.accumulate():
                (loss_of(mine, first) / 2).backward()
                early = trainer.step()
            (loss_of(mine, second) / 2).backward()
            norm = trainer.step()
            trainer.sync()
            return early, norm, snapshot(mine)

    norms, weights = plain(model, [(torch.cat([first[0], second[0]]), torch.cat([first[1], second[1]]))])
    for num_workers in (1, 2):
        for early, norm, found in run(program, "dist_sync", num_workers=num_workers):
            assert early is None
            tolerance = tolerances.of_training([first, second])
            assert float(norm) == pytest.approx(norms[0], rel=tolerance)  # type: ignore[arg-type]
            assert_close(found, weights, tolerance)


def test_factors_of_gradients_are_measured_as_gradients() -> None:
    wide = seeded(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 300), nn.Tanh(), nn.Linear(300, 5)))
    parts = parts_of((3, 3))
    results = run(lambda kv: worker(kv, wide, parts[kv.rank], push_factors=True), "dist_sync", num_servers=2)
    data = joined(parts)
    check(results, plain(wide, data), tolerances.of_training(data))


class Branches(nn.Module):
    """Has a layer that only some batches use, and one that none uses."""

    def __init__(self) -> None:
        super().__init__()
        self.sometimes = nn.Linear(64, 5)
        self.always = nn.Linear(64, 5)
        self.never = nn.Linear(2, 2)

    def forward(self, images: Tensor) -> Tensor:
        flat = images.flatten(1)
        logits: Tensor = self.always(flat)
        return logits + self.sometimes(flat) if len(images) == 2 else logits


def test_parameters_without_gradients_on_some_workers() -> None:
    """A gradient that only worker 1 has counts as zero for worker 0, as under DDP."""
    model, parts = seeded(Branches), parts_of((4, 2))
    results = run(lambda kv: worker(kv, model, parts[kv.rank]), "dist_sync", num_servers=2)

    mine = copy.deepcopy(model)
    made, norms = momentum(mine), []
    for batch in zip(*parts, strict=True):
        made.zero_grad()
        for part, share in zip(batch, (4 / 6, 2 / 6), strict=True):
            (loss_of(mine, part) * share).backward()
        norms.append(float(nn.utils.clip_grad_norm_(mine.parameters(), LIMIT)))
        made.step()
    check(results, (norms, snapshot(mine)), tolerances.of_training(joined(parts)))


class Words(nn.Module):
    """Has a sparse table beside a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(300, 8, sparse=True)
        self.last = nn.Linear(8, 5)

    def forward(self, images: Tensor) -> Tensor:
        numbers = (images.flatten(1)[:, :7].abs() * 1000).long() % 300
        logits: Tensor = self.last(self.table(numbers).sum(1))
        return logits


@pytest.mark.parametrize("sizes", [(6,), (4, 2)])
def test_sparse_gradients_are_part_of_the_norm(sizes: tuple[int, ...]) -> None:
    """torch refuses to clip sparse gradients, so the plain loop has a dense table."""
    model, parts = seeded(Words), parts_of(sizes)

    def sgd(mine: nn.Module) -> Optimizer:
        return SGD(mine.parameters(), lr=0.1)

    results = run(lambda kv: worker(kv, model, parts[kv.rank], sgd), "dist_sync", num_workers=len(sizes))
    dense = copy.deepcopy(model)
    dense.table.sparse = False  # type: ignore[union-attr]
    data = joined(parts)
    check(results, plain(dense, data, sgd), tolerances.of_training(data))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_has_the_effect_that_it_has_in_torch(bad: float) -> None:
    model, parts = seeded(Net), parts_of((4, 2), 1)
    parts[1][0][0][0, 0, 0, 0] = bad
    results = run(lambda kv: worker(kv, model, parts[kv.rank]), "dist_sync", num_servers=2)
    expected = plain(model, joined(parts))
    for norms, weights in results:
        assert str(norms) == str(expected[0])
        for name, value in weights.items():
            assert torch.equal(value.isnan(), expected[1][name].isnan()), name


# --- loops that end in the middle of a step, or at different steps


@pytest.mark.parametrize("broken", [(0, 1), (1,)], ids=["all workers", "one worker"])
def test_a_loop_may_end_after_backward(broken: tuple[int, ...]) -> None:
    """Gradients that were sent during backward are not waited for if no step follows."""
    model, parts = seeded(Net), parts_of((4, 2))

    def program(kv: KVStore) -> int:
        torch.set_num_threads(1)
        mine = copy.deepcopy(model)
        with echelon.Trainer(mine, momentum(mine), kv, max_grad_norm=LIMIT, overlap=True) as trainer:
            for number, batch in enumerate(parts[kv.rank]):
                loss_of(mine, batch).backward()
                if number == 2 and kv.rank in broken:
                    break
                trainer.step()
            return trainer.clock

    assert run(program, "dist_sync", num_servers=2) == [2 if rank in broken else STEPS for rank in (0, 1)]


def test_a_worker_with_fewer_batches_leaves_the_rounds_of_the_others() -> None:
    model, parts = seeded(Net), parts_of((4, 2))
    found = run(lambda kv: ends_early(kv, model, parts[kv.rank][: STEPS - 2 * kv.rank]), "dist_sync", num_servers=2)
    data = [*joined([part[:2] for part in parts]), *parts[0][2:]]
    expected = plain(model, data)
    tolerance = tolerances.of_training(data)
    assert found[0][0] == pytest.approx(expected[0], rel=tolerance)
    assert_close(found[0][1], expected[1], tolerance)


def ends_early(kv: KVStore, model: nn.Module, data: Sequence[Batch]) -> Found:
    """Train without a barrier at the end, so that a worker with less data leaves first."""
    torch.set_num_threads(1)
    mine = copy.deepcopy(model)
    with echelon.Trainer(mine, momentum(mine), kv, max_grad_norm=LIMIT) as trainer:
        norms = []
        for batch in data:
            loss_of(mine, batch).backward()
            norms.append(float(trainer.step()))  # type: ignore[arg-type]
        trainer.sync()
        return norms, snapshot(mine)


def test_a_pull_in_the_middle_of_a_step_is_refused() -> None:
    """It would wait for the end of the step that it is in."""
    model, parts = seeded(Net), parts_of((4, 2))

    def program(kv: KVStore) -> str:
        mine = copy.deepcopy(model)
        with echelon.Trainer(mine, momentum(mine), kv, max_grad_norm=LIMIT, overlap=True) as trainer:
            trainer.kvstore.barrier()
            for batch in parts[kv.rank]:
                loss_of(mine, batch).backward()
                text = usage_error(trainer.refresh) if trainer.clock else ""
                trainer.step()
            return text

    for text in run(program, "dist_sync"):
        assert "was pushed in a step that has not ended" in text


# --- groups and workers that update on their own


def test_each_group_clips_its_own_mean() -> None:
    model, parts = seeded(Net), parts_of((4, 2, 3), 1)
    results = run(
        lambda kv: worker(kv, model, parts[kv.rank]), "dist_gsync", num_workers=3, groups=[[0, 1], [2]], staleness=0
    )
    pair, single = plain(model, joined(parts[:2]))[0], plain(model, parts[2])[0]
    tolerance = tolerances.of_training(joined(parts))
    assert [norms for norms, _ in results] == [pytest.approx(one, rel=tolerance) for one in (pair, pair, single)]


@pytest.mark.parametrize(("store", "options"), [("dist_async", {}), ("dist_ssync", {"staleness": 1})])
def test_workers_that_update_alone_clip_their_own_gradient(store: str, options: dict[str, Any]) -> None:
    model, parts = seeded(Net), parts_of((4, 2), 6)
    results = run(lambda kv: worker(kv, model, parts[kv.rank]), store, **options)
    for rank, (norms, weights) in enumerate(results):
        assert len(norms) == 6
        assert norms[0] == plain(model, parts[rank][:1])[0][0]
        assert all(value.isfinite().all() for value in weights.values())


# --- what is refused


@pytest.mark.parametrize("limit", [0, -1.0, math.nan, "much"])
def test_a_limit_must_be_a_number_above_zero(limit: Any) -> None:
    model = seeded(Net)
    text = usage_error(lambda: echelon.Trainer(model, momentum(model), max_grad_norm=limit))
    assert text == f"max_grad_norm must be a number above 0 (None: do not clip), not {limit!r}"


@pytest.mark.parametrize("update_on_kvstore", [True, False])
def test_workers_with_different_limits_are_told(update_on_kvstore: bool) -> None:
    model, parts = seeded(Net), parts_of((4, 2))
    with pytest.raises(UsageError) as error:
        run(
            lambda kv: worker(kv, model, parts[kv.rank], limit=1.0 + kv.rank, update_on_kvstore=update_on_kvstore),
            "dist_sync",
        )
    assert "max_grad_norm=" in str(error.value)
    assert "1" in str(error.value)
    assert "2" in str(error.value)
