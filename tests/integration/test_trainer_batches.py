"""The Trainer and batches: in several parts, of any size, with a batch size that is passed or inferred."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from plain_loops import (
    STEPS,
    STORES,
    Batch,
    Loop,
    Net,
    State,
    assert_close,
    assert_same_bits,
    batches,
    end_step,
    joined,
    loss_of,
    momentum,
    on_one_worker,
    seeded,
    snapshot,
    take_steps,
    usage_error,
    with_and_without_trainer,
)
from torch import Tensor, nn
from torch.optim import Optimizer

import echelon
import tolerances
from echelon.errors import UsageError
from echelon.kvstore import KVStore
from echelon.launch.threads.in_process import run

pytestmark = pytest.mark.numeric


@pytest.mark.parametrize("store", ["local", "dist_sync"])
@pytest.mark.parametrize("samples", [-4, 2.5, float("nan")])
def test_the_number_of_samples_must_be_a_whole_number(store: str, samples: float) -> None:
    def program(kv: KVStore) -> str:
        model = seeded(Net)
        trainer = echelon.Trainer(model, momentum(model), kv)
        loss_of(model, batches(1)[0]).backward()
        return usage_error(lambda: trainer.step(samples))  # type: ignore[arg-type]

    assert on_one_worker(program, store) == f"step({samples}): the number of samples must be a whole number, 0 or more"


def test_zero_grad_discards_accumulated_gradients_and_their_samples() -> None:
    def program(kv: KVStore) -> tuple[int, float]:
        model = seeded(Net)
        with echelon.Trainer(model, momentum(model), kv) as trainer:
            with trainer.accumulate():
                loss_of(model, batches(1)[0]).backward()
            trainer.zero_grad()
            batch = batches(1)[0]
            loss_of(model, batch).backward()
            trainer.step(len(batch[0]))
            return len(batch[0]), trainer.samples_trained

    samples, counted = on_one_worker(program, "dist_sync")
    assert counted == samples


@pytest.mark.parametrize("last_inside", [True, False], ids=["all parts inside", "the last part outside"])
@pytest.mark.parametrize("store", ["local", "dist_sync"])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("passed", [True, False], ids=["batch size passed", "batch size inferred"])
def test_accumulate(last_inside: bool, store: str, overlap: bool, passed: bool) -> None:
    samples: list[int] = []

    def step(model: nn.Module, optimizer: Optimizer, trainer: echelon.Trainer | None, batch: Batch) -> None:
        images, labels = batch
        parts = [(images[:2], labels[:2]), (images[2:3], labels[2:3]), (images[3:], labels[3:])]
        for index, part in enumerate(parts):
            inside = trainer is not None and (last_inside or index < len(parts) - 1)
            with trainer.accumulate() if trainer is not None and inside else nullcontext():
                (loss_of(model, part) * (len(part[0]) / len(images))).backward()
                if trainer is not None and inside:
                    trainer.step()  # does nothing inside accumulate()
        end_step(optimizer, trainer, len(images) if passed else None)
        if trainer is not None:
            samples.append(trainer.samples_trained)

    found, expected = with_and_without_trainer(seeded(Net), step, store=store, overlap=overlap)
    assert_same_bits(found, expected)
    assert samples == [6, 12, 18, 24]


def test_two_backward_passes_need_accumulate() -> None:
    """Without it the gradients of the first backward pass were sent, and servers may be reading them."""

    def program(kv: KVStore) -> str:
        model = seeded(Net)
        with echelon.Trainer(model, momentum(model), kv, overlap=True) as trainer:
            batch = batches(1)[0]
            loss_of(model, batch).backward()
            with pytest.raises(UsageError) as caught:
                loss_of(model, batch).backward()
            trainer.zero_grad()
            trainer.step()
            loss_of(model, batch).backward()
            trainer.step()
            return str(caught.value)

    assert "accumulate" in on_one_worker(program, "dist_sync")


def test_two_backward_passes_add_up_without_overlap() -> None:
    def step(model: nn.Module, optimizer: Optimizer, trainer: echelon.Trainer | None, batch: Batch) -> None:
        loss_of(model, batch).backward()
        (loss_of(model, batch) * 0.5).backward()
        end_step(optimizer, trainer, 6)

    assert_same_bits(*with_and_without_trainer(seeded(Net), step, overlap=False))


@pytest.mark.parametrize("store", STORES)
def test_a_model_that_is_called_twice_in_a_step(store: str) -> None:
    def step(model: nn.Module, optimizer: Optimizer, trainer: echelon.Trainer | None, batch: Batch) -> None:
        images, labels = batch
        (loss_of(model, batch) + loss_of(model, (images.flip(3), labels))).backward()
        end_step(optimizer, trainer, len(images))

    assert_same_bits(*with_and_without_trainer(seeded(Net), step, store=store))


def test_the_batch_size_is_inferred_from_the_forward_pass() -> None:
    """Three workers with unequal batches have the same weight with step() as with step(batch_size)."""
    loop = Loop(seeded(Net), momentum)
    data = [batches(STEPS, 2 + 3 * rank, seed=rank) for rank in range(3)]

    def inferring(kv: KVStore) -> State:
        torch.set_num_threads(1)
        model = copy.deepcopy(loop.model)
        with echelon.Trainer(model, momentum(model), kv) as trainer:
            take_steps(model, trainer, data[kv.rank])
            kv.barrier()
            return snapshot(model)

    passing = run(lambda kv: loop.worker(kv, data[kv.rank]), "dist_sync", num_workers=3)
    for state in run(inferring, "dist_sync", num_workers=3):
        assert_same_bits(state, passing[0])


class ByKeyword(nn.Module):
    """Its forward has no positional arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, *, scale: float, images: Tensor) -> Tensor:
        logits: Tensor = self.net(images) * scale
        return logits


def test_the_batch_size_is_inferred_from_keyword_arguments() -> None:
    def step(model: nn.Module, optimizer: Optimizer, trainer: echelon.Trainer | None, batch: Batch) -> None:
        images, labels = batch
        nn.functional.cross_entropy(model(scale=2.0, images=images), labels).backward()
        end_step(optimizer, trainer)
        assert trainer is None or trainer.samples_trained == 6 * trainer.clock

    assert_same_bits(*with_and_without_trainer(seeded(ByKeyword), step))


def test_a_worker_without_data_makes_steps_of_0_samples() -> None:
    """step(0) without a backward pass does not change the mean of the other workers."""
    loop = Loop(seeded(Net), momentum)
    data = batches(STEPS)

    def program(kv: KVStore) -> State:
        if kv.rank == 0:
            return loop.worker(kv, data)
        model = copy.deepcopy(loop.model)
        with echelon.Trainer(model, momentum(model), kv) as trainer:
            for _ in data:
                trainer.step(0)
            state = snapshot(model)
            kv.barrier()
            return state

    for state in run(program, "dist_sync", num_workers=2):
        assert_same_bits(state, loop.plain(data))


def test_after_a_wrong_batch_size_the_right_one_is_accepted() -> None:
    def step(model: nn.Module, optimizer: Optimizer, trainer: echelon.Trainer | None, batch: Batch) -> None:
        loss_of(model, batch).backward()
        if trainer is not None:
            with pytest.raises(UsageError, match=r"step\(7\), but the forward pass saw 6 samples.*overlap=False"):
                trainer.step(7)
        end_step(optimizer, trainer, 6)

    assert_same_bits(*with_and_without_trainer(seeded(Net), step, overlap=True))


def test_without_overlap_any_batch_size_is_accepted() -> None:
    def step(model: nn.Module, optimizer: Optimizer, trainer: echelon.Trainer | None, batch: Batch) -> None:
        loss_of(model, batch).backward()
        end_step(optimizer, trainer, 7)
        assert trainer is None or trainer.samples_trained == 7 * trainer.clock

    assert_same_bits(*with_and_without_trainer(seeded(Net), step, overlap=False))


def test_step_without_any_forward_pass_of_the_model_counts_one_sample() -> None:
    """All workers then count the same, as under DDP."""

    def step(model: nn.Module, optimizer: Optimizer, trainer: echelon.Trainer | None, batch: Batch) -> None:
        nn.functional.cross_entropy(model.forward(batch[0]), batch[1]).backward()  # runs no hooks
        end_step(optimizer, trainer)
        assert trainer is None or trainer.samples_trained == trainer.clock

    assert_same_bits(*with_and_without_trainer(seeded(Net), step))


def test_a_step_whose_batch_size_is_missing_after_others_had_one() -> None:
    def program(kv: KVStore) -> tuple[str, int]:
        model = seeded(Net)
        with echelon.Trainer(model, momentum(model), kv) as trainer:
            loss_of(model, batches(1)[0]).backward()
            trainer.step()
            with torch.no_grad():
                model(batches(1)[0][0])
            return usage_error(trainer.step), trainer.clock

    message, clock = on_one_worker(program, "dist_sync")
    assert "step() could not infer the batch size" in message
    assert clock == 1


@pytest.mark.parametrize("overlap", [None, True, False])
def test_a_forward_pass_between_backward_and_step_does_not_count(overlap: bool | None) -> None:
    """Worker 0 looks at its model with other inputs, in training mode."""
    model, parts = seeded(Net), [batches(STEPS, seed=seed) for seed in (1, 2)]

    def program(kv: KVStore) -> State:
        mine = copy.deepcopy(model)
        with echelon.Trainer(mine, momentum(mine), kv, overlap=overlap) as trainer:
            for batch in parts[kv.rank]:
                loss_of(mine, batch).backward()
                if kv.rank == 0:
                    mine(batch[0][:1])
                trainer.step()
            return snapshot(mine)

    plain = copy.deepcopy(model)
    optimizer = momentum(plain)
    for batch in joined(parts):
        optimizer.zero_grad()
        loss_of(plain, batch).backward()
        optimizer.step()
    for state in run(program, "dist_sync", num_workers=2):
        assert_close(state, snapshot(plain), tolerances.of_training(joined(parts)))
