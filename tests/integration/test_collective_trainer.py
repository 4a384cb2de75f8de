"""The Trainer without servers, on real processes: the joined batch, the same bits in all stores, states, mistakes."""

from __future__ import annotations

import copy
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from collective_loops import KINDS, STORES, Normed, joined, largest_difference, on_group, train
from plain_loops import (
    Batch,
    Loop,
    MakeOptimizer,
    Net,
    State,
    assert_same_bits,
    batches,
    differs,
    loss_of,
    seeded,
    snapshot,
)
from torch import nn
from torch.optim import SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RMSprop
from torch.optim.lr_scheduler import OneCycleLR, StepLR

import echelon
import tolerances
from echelon.environment import Job
from echelon.errors import JobError, UsageError
from echelon.kvstore import KVStore, create
from echelon.launch.in_process import run as run_with_servers
from echelon.train.trainer import collective as collective_trainer
from echelon.train.trainer.flat_buckets import make_flat_buckets
from forked import run

STEPS = 4
SIZES = (6, 2, 5)


def two_groups(model: nn.Module) -> Optimizer:
    """Rates and decay by layer; frozen parameters are in, too."""
    named = list(model.named_parameters())
    groups: list[dict[str, Any]] = [
        {"params": [p for name, p in named if "bias" not in name]},
        {"params": [p for name, p in named if "bias" in name], "lr": 0.5, "weight_decay": 0.0},
    ]
    return SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.01)


def adam(model: nn.Module) -> Optimizer:
    return Adam(model.parameters(), lr=0.01, amsgrad=True)


ELEMENTWISE: dict[str, MakeOptimizer] = {
    "sgd": two_groups,
    "adam": adam,
    "adamw": lambda model: AdamW(model.parameters(), lr=0.01, weight_decay=0.1),
    "rmsprop": lambda model: RMSprop(model.parameters(), lr=0.001, centered=True, momentum=0.5),
    "adagrad": lambda model: Adagrad(model.parameters(), lr=0.05, initial_accumulator_value=0.3),
    "adadelta": lambda model: Adadelta(model.parameters(), lr=0.5),
    "adamax": lambda model: Adamax(model.parameters(), lr=0.01),
    "nadam": lambda model: NAdam(model.parameters(), lr=0.01),
}


def parts_of(sizes: tuple[int, ...] = SIZES, steps: int = STEPS, **more: Any) -> list[list[Batch]]:
    return [batches(steps, size, seed=rank + 1, **more) for rank, size in enumerate(sizes)]


# --- the joined batch


@pytest.mark.parametrize("store", STORES)
def test_a_group_is_one_process_on_the_joined_batch(store: str) -> None:
    """Unequal parts, each weighted by its samples; and every store gives the bits of every other."""
    loop = Loop(seeded(Net), two_groups)
    found = on_group(store, loop, parts_of())
    assert largest_difference(found[0], loop.plain(joined(parts_of()))) < tolerances.of_training(joined(parts_of()))
    for state in [*found, *on_group("nccl_allreduce", loop, parts_of(), overlap=False, told=False)]:
        assert_same_bits(state, found[0])


@pytest.mark.parametrize("store", KINDS)
def test_many_buckets_are_as_good_as_one(store: str) -> None:
    """Also when one rank's gradients leave during backward and the other's at step()."""
    loop = Loop(seeded(Net), adam)
    one = on_group(store, loop, parts_of((4, 3)))

    def program(kv: KVStore) -> tuple[State, int]:
        collective_trainer.make_flat_buckets = partial(make_flat_buckets, limit=100)  # in this process alone
        model = copy.deepcopy(loop.model)
        with echelon.Trainer(model, adam(model), kv, overlap=kv.rank == 0) as trainer:
            for batch in parts_of((4, 3))[kv.rank]:
                loss_of(model, batch).backward()
                left = len(trainer._reductions)  # type: ignore[attr-defined]
                trainer.step()
        return snapshot(model), left

    found = run(program, store, num_workers=2)
    assert [left for _, left in found] == [6, 0], "one parameter a bucket"
    for state, _ in found:
        assert_same_bits(state, one[0])


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_optimizers_on_parts_are_optimizers_on_the_whole(name: str) -> None:
    loop = Loop(seeded(Net), ELEMENTWISE[name], lambda optimizer: StepLR(optimizer, 2, gamma=0.5))
    whole, part = (on_group(store, loop, parts_of((4, 3))) for store in KINDS)
    assert differs(whole[0], snapshot(loop.model))
    for state in [*whole, *part]:
        assert_same_bits(state, whole[0])


def test_in_float64_the_difference_is_rounding() -> None:
    loop = Loop(seeded(Net).double(), adam)
    parts = parts_of(dtype=torch.float64)
    for store in KINDS:
        difference = largest_difference(on_group(store, loop, parts)[0], loop.plain(joined(parts)))
        assert difference < tolerances.of_training(joined(parts), magnification=10)  # Adam


def test_half_precision_is_summed_in_float32() -> None:
    """2048 + 1 + 1 + 2 is 2052, and 513 the mean: in float16, one after the other, 2048 + 1 would stay 2048."""

    def program(kv: KVStore) -> list[float]:
        model = nn.Linear(1, 3, bias=False).half()
        nn.init.zeros_(model.weight)
        with echelon.Trainer(model, SGD(model.parameters(), lr=1.0), kv) as trainer:
            (model(torch.ones(1, 1).half()) * (2048.0, 1.0, 1.0, 2.0)[kv.rank]).sum().backward()
            trainer.step(1)
        return [float(value) for value in model.weight.detach().view(-1)]

    for store in KINDS:
        assert run(program, store, num_workers=4) == [[-513.0] * 3] * 4


def test_a_schedule_of_rate_and_momentum() -> None:
    def once(optimizer: Optimizer) -> OneCycleLR:
        return OneCycleLR(optimizer, max_lr=0.1, total_steps=STEPS + 1)

    loop = Loop(seeded(Net), lambda model: SGD(model.parameters(), lr=0.1, momentum=0.9), once)
    expected = loop.plain(joined(parts_of()))
    for store in KINDS:
        difference = largest_difference(on_group(store, loop, parts_of())[0], expected)
        assert difference < tolerances.of_training(joined(parts_of()))


# --- models


def replicas(loop: Loop, parts: list[list[Batch]]) -> State:
    """In one process what a group does to a model whose buffers are each rank's own."""
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
    """In float64, where what the order of sums makes is far below what a mistake makes."""
    loop = Loop(seeded(Normed).double(), two_groups)
    parts = parts_of(dtype=torch.float64)

    def program(kv: KVStore) -> tuple[State, bool]:
        model = loop.model if kv.rank == 0 else seeded(Normed, seed=kv.rank).double()  # rank 0's first weights count
        state = train(kv, Loop(model, two_groups), parts[kv.rank])
        return state, state["first.weight"].is_contiguous(memory_format=torch.channels_last)

    found = run(program, store, num_workers=3)
    expected = replicas(loop, parts)
    assert largest_difference(found[0][0], expected) < tolerances.of_training(joined(parts))
    assert all(kept for _, kept in found), "channels-last weights stay so"
    start = snapshot(loop.model)
    for name in ("never.weight", "frozen.weight"):
        assert torch.equal(found[1][0][name], start[name]), name
    means = [state["norm.running_mean"] for state, _ in found]
    assert not torch.equal(means[0], means[1]), "statistics are each rank's own"


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
    """Which head is used depends on the input."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(64, 5), nn.Linear(64, 5)])

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.heads[len(images) % 2](images.flatten(1))
        return logits


@pytest.mark.parametrize("store", KINDS)
def test_ranks_that_use_different_parts(store: str) -> None:
    """Gradients that others have not count as zero there; those that nobody has are left alone, momentum and all."""
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
    """Rank 0 brings its batch in two parts, rank 1 whole, rank 2 brings none."""
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
        return snapshot(model), trainer.samples

    found = run(program, store, num_workers=3)
    assert [samples for _, samples in found] == [6 * STEPS, 4 * STEPS, 0]
    assert largest_difference(found[0][0], loop.plain(joined(data))) < tolerances.of_training(joined(data))
    for state, _ in found:
        assert_same_bits(state, found[0][0])


def test_a_rank_that_runs_out_of_data_stands_by() -> None:
    """retire() returns when all have come to it; the last steps are the others' alone."""
    loop = Loop(seeded(Net), two_groups)
    data = [batches(4, 6, seed=1), batches(2, 6, seed=2)]

    def program(kv: KVStore) -> State:
        model = copy.deepcopy(loop.model)
        with echelon.Trainer(model, two_groups(model), kv) as trainer:
            for batch in data[kv.rank]:
                loss_of(model, batch).backward()
                trainer.step()
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

    assert run(program, "dist_device_sync", num_workers=3) == [(3, "enough")] * 3


# --- states and weights


def half_way(kv: KVStore, loop: Loop, given: tuple[State, State] | None = None) -> tuple[State, State, State]:
    """Two steps from the start, or from given weights and state; returns weights, state, and weights two steps on."""
    model = copy.deepcopy(loop.model)
    data = parts_of((4, 3), steps=4)[kv.rank]
    with echelon.Trainer(model, loop.optimizer(model), kv) as trainer:
        if given is not None:
            trainer.load_weights(given[0])
            trainer.load_optimizer_state(given[1])
        for batch in data[2 if given else 0 :]:
            if trainer.clock == 2 and not given:
                middle = snapshot(model), trainer.optimizer_state()
            loss_of(model, batch).backward()
            trainer.step()
        trainer.sync()
        kv.barrier()
        if given is not None:
            middle = given
        return *middle, snapshot(model)


@pytest.mark.parametrize("name", ["sgd", "adam", "rmsprop", "adagrad"])
def test_a_state_goes_from_any_store_to_any_other(name: str) -> None:
    """To the bit between stores without servers; servers weight gradients in another order of operations."""
    loop = Loop(seeded(Net), ELEMENTWISE[name])
    runs: dict[str, Callable[..., Any]] = {"nccl": run, "nccl_allreduce": run, "dist_async": run_with_servers}
    results = {
        store: launch(lambda kv: half_way(kv, loop), "dist_sync" if store == "dist_async" else store, num_workers=2)
        for store, launch in runs.items()
    }
    kinds = results["nccl"][0][1].keys()
    assert any(name.startswith("middle.weight/") for name in kinds)
    for saved in results.values():
        for weights, state, _ in saved:
            assert state.keys() == kinds
            assert state["middle.weight/" + next(iter(kinds)).rpartition("/")[2]].device.type == "cpu"
            assert_same_bits(weights, saved[0][0])
    expected = results["nccl"][0][2]
    for source, saved in results.items():
        for target, launch in runs.items():
            store = "dist_sync" if target == "dist_async" else target
            found = launch(lambda kv, saved=saved: half_way(kv, loop, saved[0][:2]), store, num_workers=2)
            if "dist_async" in (source, target):
                # rmsprop and Adam divide by the root of a small number.
                tolerance = tolerances.of_training(joined(parts_of((4, 3))), magnification=10)
                assert largest_difference(found[0][2], expected) < tolerance
            else:
                assert_same_bits(found[0][2], expected)


def test_states_alone_are_those_of_torch() -> None:
    model = seeded(Net)
    optimizer = two_groups(model)
    with echelon.Trainer(model, optimizer, "device") as trainer:
        assert trainer.optimizer_state() == {}
        loss_of(model, batches(1)[0]).backward()
        trainer.step()
        state = trainer.optimizer_state()
        assert state.keys() == {f"{name}/momentum_buffer" for name, _ in model.named_parameters()}
        trainer.load_optimizer_state({name: tensor * 2 for name, tensor in state.items()})
        buffer = optimizer.state[model.get_parameter("last.bias")]["momentum_buffer"]
        assert torch.equal(buffer, state["last.bias/momentum_buffer"] * 2)
        for bad, said in (
            ({"nowhere/momentum_buffer": torch.ones(1)}, "'nowhere', which this model does not train"),
            ({"last.bias/momentum_buffer": torch.ones(6)}, r"momentum_buffer of 'last.bias' is \(6,\), .* is \(5,\)"),
        ):
            with pytest.raises(UsageError, match=said):
                trainer.load_optimizer_state(bad)


# --- mistakes


def test_mistakes_on_a_group() -> None:
    def program(kv: KVStore) -> list[str]:
        said = []
        model = seeded(Net)
        for optimizer in (torch.optim.Rprop(model.parameters()), torch.optim.LBFGS(model.parameters())):
            with pytest.raises(UsageError) as caught:
                echelon.Trainer(model, optimizer, kv)
            said.append(str(caught.value))
        trainer = echelon.Trainer(model, two_groups(model), kv, check_finite=True)
        batch = batches(1)[0]
        loss_of(model, batch).backward()
        for wrong in (lambda: loss_of(model, batch).backward(), lambda: trainer.step(7), lambda: trainer.update()):
            with pytest.raises(UsageError) as caught:
                wrong()
            said.append(str(caught.value))
        trainer.zero_grad()  # what the second backward added
        trainer.step()
        loss_of(model, batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        with pytest.raises(UsageError) as caught:
            trainer.step()
        said.append(str(caught.value))
        return said

    for rank, said in enumerate(run(program, "nccl", num_workers=2)):
        for text, words in zip(
            said,
            (
                "Rprop cannot run on shards of tensors, which nccl uses; use nccl_allreduce",
                "LBFGS needs a closure",
                f"worker {rank}: a second backward pass before step()",
                "step(7), but the forward pass saw 6 samples",
                "nccl communicates in every step",
                "was changed after gradients were sent during backward",
            ),
            strict=True,
        ):
            assert words in text


def test_models_that_differ_are_refused() -> None:
    def program(kv: KVStore) -> str:
        model = nn.Linear(3, 2 + kv.rank)
        if kv.rank == 0:
            kv.group.check_same("the model's parameters", "weight (2, 3)")  # type: ignore[attr-defined]
            return ""
        with pytest.raises(UsageError) as caught:
            echelon.Trainer(model, SGD(model.parameters(), lr=0.1), kv)
        return str(caught.value)

    said = run(program, "nccl_allreduce", num_workers=2)[1]
    assert said.startswith(
        "worker 0, device 1: the model's parameters must be the same on all: worker 0, device 0 has "
    )
    assert "has weight (2, 3), this process has bias (3,)" in said


def test_who_does_not_come_is_named() -> None:
    with pytest.raises(JobError, match=r"worker 0, device 1 did not arrive at 127.0.0.1:\d+ in 1 s"):
        create("nccl", job=Job(num_devices=2, device_port=free_port(), timeout_s=1.0))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])
