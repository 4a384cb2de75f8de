"""The Trainer without servers, on real processes: the joined batch, and the same bits in all stores."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from collective_loops import ELEMENTWISE, KINDS, STORES, Normed, adam, largest_difference, on_group
from plain_loops import (
    STEPS,
    Batch,
    Loop,
    Net,
    State,
    assert_same_bits,
    batches,
    differs,
    joined,
    loss_of,
    parts_of,
    seeded,
    snapshot,
    take_steps,
    two_groups,
)
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import OneCycleLR, StepLR

import echelon
import tolerances
from echelon.kvstore import KVStore
from echelon.train.trainer.workers import collective as collective_trainer
from echelon.train.trainer.workers.flat_buckets import make_flat_buckets
from forked import run

pytestmark = pytest.mark.numeric

SIZES = (6, 2, 5)  # of the batches of three ranks

# --- the joined batch


@pytest.mark.parametrize("store", STORES)
def test_a_group_is_one_process_on_the_joined_batch(store: str) -> None:
    """Unequal batches are weighted by their samples, and all stores give the same bits."""
    loop = Loop(seeded(Net), two_groups)
    parts = parts_of(SIZES)
    found = on_group(store, loop, parts)
    assert largest_difference(found[0], loop.plain(joined(parts))) < tolerances.of_training(joined(parts))
    for state in [*found, *on_group("nccl_allreduce", loop, parts, overlap=False, pass_size=False)]:
        assert_same_bits(state, found[0])


@pytest.mark.parametrize("store", KINDS)
def test_the_number_of_buckets_does_not_change_the_weights(store: str) -> None:
    """Also if one rank sends its gradients during backward and the other one at its end."""
    loop = Loop(seeded(Net), adam)
    one = on_group(store, loop, parts_of((4, 3)))

    def program(kv: KVStore) -> tuple[State, int]:
        vars(collective_trainer)["make_flat_buckets"] = partial(make_flat_buckets, limit=100)  # in this process only
        model = copy.deepcopy(loop.model)
        sent = 0

        def count(_: object) -> None:
            nonlocal sent
            sent = max(sent, trainer._reductions.num_started)  # type: ignore[attr-defined]

        with echelon.Trainer(model, adam(model), kv, overlap=kv.rank == 0) as trainer:
            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(count)
            for batch in parts_of((4, 3))[kv.rank]:
                loss_of(model, batch).backward()
                trainer.step()
        return snapshot(model), sent

    found = run(program, store, num_workers=2)
    assert [sent for _, sent in found] == [6, 0], "one parameter per bucket, sent before backward has ended"
    for state, _ in found:
        assert_same_bits(state, one[0])


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_sharded_optimizers_give_the_weights_of_whole_ones(name: str) -> None:
    loop = Loop(seeded(Net), ELEMENTWISE[name], lambda optimizer: StepLR(optimizer, 2, gamma=0.5))
    whole, sharded = (on_group(store, loop, parts_of((4, 3))) for store in KINDS)
    assert differs(whole[0], snapshot(loop.model))
    for state in [*whole, *sharded]:
        assert_same_bits(state, whole[0])


def test_in_float64_only_rounding_differs() -> None:
    loop = Loop(seeded(Net).double(), adam)
    parts = parts_of(SIZES, dtype=torch.float64)
    for store in KINDS:
        difference = largest_difference(on_group(store, loop, parts)[0], loop.plain(joined(parts)))
        assert difference < tolerances.of_training(joined(parts), magnification=10)  # Adam


def test_half_precision_is_summed_in_float32() -> None:
    """2048 + 1 + 1 + 2 is 2052, and the mean is 513. In float16, 2048 + 1 would be 2048."""

    def program(kv: KVStore) -> list[float]:
        model = nn.Linear(1, 3, bias=False).half()
        nn.init.zeros_(model.weight)
        with echelon.Trainer(model, SGD(model.parameters(), lr=1.0), kv) as trainer:
            (model(torch.ones(1, 1).half()) * (2048.0, 1.0, 1.0, 2.0)[kv.rank]).sum().backward()
            trainer.step(1)
        return [float(value) for value in model.weight.detach().view(-1)]

    for store in KINDS:
        assert run(program, store, num_workers=4) == [[-513.0] * 3] * 4


def test_a_schedule_of_learning_rate_and_momentum() -> None:
    def once(optimizer: Optimizer) -> OneCycleLR:
        return OneCycleLR(optimizer, max_lr=0.1, total_steps=STEPS + 1)

    loop = Loop(seeded(Net), lambda model: SGD(model.parameters(), lr=0.1, momentum=0.9), once)
    expected = loop.plain(joined(parts_of(SIZES)))
    for store in KINDS:
        difference = largest_difference(on_group(store, loop, parts_of(SIZES))[0], expected)
        assert difference < tolerances.of_training(joined(parts_of(SIZES)))


# --- models


def replicas(loop: Loop, parts: list[list[Batch]]) -> State:
    """Train in one process as a group does, with separate buffers for each rank."""
    models = [copy.deepcopy(loop.model) for _ in parts]
    optimizer = loop.optimizer(models[0])
    for step in zip(*parts, strict=True):
        total = sum(len(images) for images, _ in step)
        for model, batch in zip(models, step, strict=True):
            model.zero_grad()
            (loss_of(model, batch) * (len(batch[0]) / total)).backward()
        for same in zip(*(model.parameters() for model in models), strict=True):
            if same[0].grad is not None:
                same[0].grad = torch.stack([p.grad for p in same if p.grad is not None]).sum(0)
        optimizer.step()
        for model in models[1:]:
            for own, first in zip(model.parameters(), models[0].parameters(), strict=True):
                own.data.copy_(first.data)
    return snapshot(models[0])


@pytest.mark.parametrize("store", KINDS)
def test_batchnorm_frozen_unused_and_channels_last(store: str) -> None:
    """In float64, where the effect of the order of sums is far smaller than that of a mistake."""
    loop = Loop(seeded(Normed).double(), two_groups)
    parts = parts_of(SIZES, dtype=torch.float64)

    def program(kv: KVStore) -> tuple[State, bool]:
        model = loop.model if kv.rank == 0 else seeded(Normed, seed=kv.rank).double()  # rank 0's first weights count
        state = Loop(model, two_groups).worker(kv, parts[kv.rank])
        return state, state["first.weight"].is_contiguous(memory_format=torch.channels_last)

    found = run(program, store, num_workers=3)
    expected = replicas(loop, parts)
    assert largest_difference(found[0][0], expected) < tolerances.of_training(joined(parts))
    assert all(kept for _, kept in found), "channels-last weights stay channels-last"
    start = snapshot(loop.model)
    for name in ("never.weight", "frozen.weight"):
        assert torch.equal(found[1][0][name], start[name]), name
    means = [state["norm.running_mean"] for state, _ in found]
    assert not torch.equal(means[0], means[1]), "each rank has its own statistics"


def test_buffers_are_averaged_on_request() -> None:
    def program(kv: KVStore) -> tuple[State, State]:
        model = seeded(Normed)
        with echelon.Trainer(model, adam(model), kv, average_buffers=True) as trainer:
            loss_of(model, batches(1, seed=kv.rank)[0]).backward()
            trainer.step()
            before = snapshot(model)
            trainer.average_buffers()
            return before, snapshot(model)

    (mine, after), (theirs, other) = run(program, "device", num_workers=2)
    torch.testing.assert_close(
        after["norm.running_mean"], (mine["norm.running_mean"] + theirs["norm.running_mean"]) / 2
    )
    assert torch.equal(after["norm.running_mean"], other["norm.running_mean"])


class TwoHeads(nn.Module):
    """The batch size selects a head."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(64, 5), nn.Linear(64, 5)])

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.heads[len(images) % 2](images.flatten(1))
        return logits


@pytest.mark.parametrize("store", KINDS)
def test_ranks_that_use_different_parts_of_a_model(store: str) -> None:
    """A gradient that one rank does not have counts as zero. A parameter without any gradient does not change."""
    model = seeded(TwoHeads)
    sizes = ((2, 3), (3, 3), (3, 4))
    parts = [[batches(1, pair[rank], seed=10 * rank + i)[0] for i, pair in enumerate(sizes)] for rank in range(2)]
    found = on_group(store, Loop(model, two_groups), parts)
    assert_same_bits(found[0], found[1])
    plain = copy.deepcopy(model)
    optimizer = two_groups(plain)
    for step in zip(*parts, strict=True):
        total = sum(len(images) for images, _ in step)
        for batch in step:
            (loss_of(plain, batch) * (len(batch[0]) / total)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert largest_difference(found[0], snapshot(plain)) < tolerances.of_training(joined(parts))


# --- loops


@pytest.mark.parametrize("store", KINDS)
def test_accumulate_and_ranks_without_data(store: str) -> None:
    """Rank 0 has its batch in two parts, rank 1 in one, and rank 2 has none."""
    loop = Loop(seeded(Net), two_groups)
    data = parts_of((6, 4))

    def program(kv: KVStore) -> tuple[State, int]:
        model = copy.deepcopy(loop.model)
        with echelon.Trainer(model, two_groups(model), kv) as trainer:
            for step in range(STEPS):
                if kv.rank == 0:
                    images, labels = data[0][step]
                    with trainer.accumulate():
                        (loss_of(model, (images[:2], labels[:2])) / 3).backward()
                        trainer.step()
                    (loss_of(model, (images[2:], labels[2:])) * 2 / 3).backward()
                    trainer.step()
                elif kv.rank == 1:
                    loss_of(model, data[1][step]).backward()
                    trainer.step()
                else:
                    trainer.step(0)
        return snapshot(model), trainer.samples_trained

    found = run(program, store, num_workers=3)
    assert [samples for _, samples in found] == [6 * STEPS, 4 * STEPS, 0]
    assert largest_difference(found[0][0], loop.plain(joined(data))) < tolerances.of_training(joined(data))
    for state, _ in found:
        assert_same_bits(state, found[0][0])


def test_a_rank_without_more_data_makes_steps_of_0_samples() -> None:
    """retire() returns when all ranks have called it. The last steps only use the data of the others."""
    loop = Loop(seeded(Net), two_groups)
    data = [batches(4, 6, seed=1), batches(2, 6, seed=2)]

    def program(kv: KVStore) -> State:
        model = copy.deepcopy(loop.model)
        with echelon.Trainer(model, two_groups(model), kv) as trainer:
            take_steps(model, trainer, data[kv.rank])
            kv.retire()
        return snapshot(model)

    found = run(program, "nccl", num_workers=2)
    expected = loop.plain([*joined([data[0][:2], data[1]]), *data[0][2:]])
    assert_same_bits(found[0], found[1])
    assert largest_difference(found[0], expected) < tolerances.of_training(data[0])


def test_all_stop_at_the_same_step() -> None:
    def program(kv: KVStore) -> tuple[int, str | None]:
        model = seeded(Net)
        with echelon.Trainer(model, adam(model), kv) as trainer:
            for batch in batches(6):
                loss_of(model, batch).backward()
                if kv.rank == 1 and trainer.clock == 2:
                    kv.halt("enough")
                trainer.step()
                if kv.halted:
                    break
            return trainer.clock, kv.halted

    # The request is sent with the next backward pass.
    assert run(program, "dist_device_sync", num_workers=3) == [(4, "enough")] * 3
