"""The Trainer in the loops people write: batches in parts, models in parts, buffers, errors, reading the weights."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from plain_loops import (
    STORES,
    Batch,
    Loop,
    Net,
    State,
    assert_same_bits,
    batches,
    differs,
    loss_of,
    on_one_worker,
    seeded,
    snapshot,
)
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

import echelon
import tolerances
from echelon.errors import UsageError
from echelon.kvstore import KVStore, create
from echelon.launch.in_process import run

STEPS = 4
Step = Callable[[nn.Module, Optimizer, echelon.Trainer | None, Batch], None]


def momentum(model: nn.Module) -> Optimizer:
    return SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9, weight_decay=0.01)


def both(
    model: nn.Module,
    step: Step,
    optimizer: Callable[[nn.Module], Optimizer] = momentum,
    store: str = "dist_sync",
    data: list[Batch] | None = None,
    **options: Any,
) -> tuple[State, State]:
    """What `step` makes of a model with a Trainer on one worker, and without one."""
    chosen = batches(STEPS) if data is None else data

    def with_trainer(kv: KVStore) -> State:
        torch.set_num_threads(1)
        mine = copy.deepcopy(model)
        made = optimizer(mine)
        with echelon.Trainer(mine, made, kv, **options) as trainer:
            for batch in chosen:
                step(mine, made, trainer, batch)
            return snapshot(mine)

    plain = copy.deepcopy(model)
    made = optimizer(plain)
    for batch in chosen:
        step(plain, made, None, batch)
    assert differs(snapshot(plain), snapshot(model)), "the loop trains nothing"
    return on_one_worker(with_trainer, store), snapshot(plain)


def end_step(optimizer: Optimizer, trainer: echelon.Trainer | None, samples: int | None = None) -> None:
    if trainer is None:
        optimizer.step()
        optimizer.zero_grad()
    else:
        trainer.step(samples)


# --- optimizers and models that come from elsewhere


@pytest.mark.parametrize("store", STORES)
def test_groups_may_have_names_and_more(store: str) -> None:
    def named(model: nn.Module) -> Optimizer:
        return SGD(model.named_parameters(), lr=0.1, momentum=0.9)

    def described(model: nn.Module) -> Optimizer:
        return Adam([{"params": list(model.parameters()), "name": "all", "mine": [1, "two"]}], lr=0.01)

    for optimizer in (named, described):
        assert_same_bits(*both(seeded(Net), plain_step, optimizer, store=store))


def experienced(kind: Callable[[nn.Module], Optimizer]) -> Callable[[nn.Module], Optimizer]:
    """An optimizer that has made some steps with another copy of the model."""

    def make(model: nn.Module) -> Optimizer:
        other = copy.deepcopy(model)
        before, after = kind(other), kind(model)
        for batch in batches(3, seed=5):
            loss_of(other, batch).backward()
            before.step()
            before.zero_grad()
        after.load_state_dict(before.state_dict())
        return after

    return make


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("kind", [momentum, lambda model: Adam(model.parameters(), lr=0.01, amsgrad=True)])
def test_an_optimizer_goes_on_with_what_it_remembers(store: str, kind: Callable[[nn.Module], Optimizer]) -> None:
    assert_same_bits(*both(seeded(Net), plain_step, experienced(kind), store=store))


def test_what_is_thawed_later_is_an_error() -> None:
    def program(kv: KVStore) -> str:
        model = seeded(Net)
        model.middle.requires_grad_(False)
        trainer = echelon.Trainer(model, SGD(model.parameters(), lr=0.1), kv)
        plain_step(model, trainer.optimizer, trainer, batches(1)[0])
        model.middle.requires_grad_(True)
        with pytest.raises(UsageError) as caught:
            plain_step(model, trainer.optimizer, trainer, batches(1)[0])
        return str(caught.value)

    assert on_one_worker(program, "dist_sync").startswith("'middle.weight' did not require a gradient when the Trainer")


def test_weights_that_are_loaded_past_the_trainer_are_told(caplog: pytest.LogCaptureFixture) -> None:
    def program(kv: KVStore) -> None:
        model = seeded(Net)
        weights = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
        with echelon.Trainer(model, momentum(model), kv) as trainer:
            trainer.load_weights(weights)
            copy.deepcopy(model).load_state_dict(weights)
            assert not caplog.messages
            model.load_state_dict(weights)

    on_one_worker(program, "dist_sync")
    assert "call trainer.load_weights(weights) on all workers" in caplog.messages[0]


def test_a_sparse_gradient_is_an_error() -> None:
    def program(kv: KVStore) -> str:
        model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 2))
        echelon.Trainer(model, SGD(model.parameters(), lr=0.1), kv)
        with pytest.raises(UsageError) as caught:
            model(torch.tensor([1, 2])).sum().backward()
        return str(caught.value)

    assert "the gradient of '0.weight' is sparse" in on_one_worker(program, "dist_sync")


def test_gradients_that_are_cleared_after_they_left_are_an_error() -> None:
    def program(kv: KVStore) -> str:
        model = seeded(Net)
        trainer = echelon.Trainer(model, momentum(model), kv)
        loss_of(model, batches(1)[0]).backward()
        trainer.optimizer.zero_grad()
        with pytest.raises(UsageError) as caught:
            trainer.step()
        return str(caught.value)

    assert "was changed after gradients were sent during backward" in on_one_worker(program, "dist_sync")


# --- batches in parts


@pytest.mark.parametrize("store", ["local", "dist_sync"])
@pytest.mark.parametrize("samples", [-4, 2.5, float("nan")])
def test_a_batch_has_a_whole_number_of_samples(store: str, samples: float) -> None:
    def program(kv: KVStore) -> str:
        model = seeded(Net)
        trainer = echelon.Trainer(model, momentum(model), kv)
        loss_of(model, batches(1)[0]).backward()
        with pytest.raises(UsageError) as caught:
            trainer.step(samples)  # type: ignore[arg-type]
        return str(caught.value)

    assert on_one_worker(program, store) == f"step({samples}): the number of samples must be a whole number, 0 or more"


def test_what_was_accumulated_can_be_forgotten() -> None:
    def program(kv: KVStore) -> tuple[int, float]:
        model = seeded(Net)
        with echelon.Trainer(model, momentum(model), kv) as trainer:
            with trainer.accumulate():
                loss_of(model, batches(1)[0]).backward()
            trainer.zero_grad()
            batch = batches(1)[0]
            loss_of(model, batch).backward()
            trainer.step(len(batch[0]))
            return len(batch[0]), trainer.samples

    samples, counted = on_one_worker(program, "dist_sync")
    assert counted == samples


@pytest.mark.parametrize("last_inside", [True, False], ids=["all parts inside", "the last part outside"])
@pytest.mark.parametrize("store", ["local", "dist_sync"])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("told", [True, False], ids=["batch size told", "batch size seen"])
def test_accumulate(last_inside: bool, store: str, overlap: bool, told: bool) -> None:
    samples: list[int] = []

    def step(model: nn.Module, optimizer: Optimizer, trainer: echelon.Trainer | None, batch: Batch) -> None:
        images, labels = batch
        parts = [(images[:2], labels[:2]), (images[2:3], labels[2:3]), (images[3:], labels[3:])]
        for index, part in enumerate(parts):
            inside = trainer is not None and (last_inside or index < len(parts) - 1)
            with trainer.accumulate() if trainer is not None and inside else nullcontext():
                (loss_of(model, part) * (len(part[0]) / len(images))).backward()
                if trainer is not None and inside:
                    trainer.step()  # does nothing in there
        end_step(optimizer, trainer, len(images) if told else None)
        if trainer is not None:
            samples.append(trainer.samples)

    found, expected = both(seeded(Net), step, store=store, overlap=overlap)
    assert_same_bits(found, expected)
    assert samples == [6, 12, 18, 24]


def test_two_backwards_need_accumulate() -> None:
    """Without it the first backward's gradients have left: a second would change them under the servers' hands."""

    def program(kv: KVStore) -> str:
        model = seeded(Net)
        with echelon.Trainer(model, momentum(model), kv) as trainer:
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


def test_two_backwards_are_fine_without_overlap() -> None:
    def step(model: nn.Module, optimizer: Optimizer, trainer: echelon.Trainer | None, batch: Batch) -> None:
        loss_of(model, batch).backward()
        (loss_of(model, batch) * 0.5).backward()
        end_step(optimizer, trainer, 6)

    assert_same_bits(*both(seeded(Net), step, overlap=False))


def test_clipping_needs_no_overlap() -> None:
    def step(model: nn.Module, optimizer: Optimizer, trainer: echelon.Trainer | None, batch: Batch) -> None:
        loss_of(model, batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        end_step(optimizer, trainer, 6)

    for store in STORES:
        assert_same_bits(*both(seeded(Net), step, store=store, overlap=False))


# --- parts of models


class TwoHeads(nn.Module):
    """Which head is used depends on the input, so that the other gets no gradient."""

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
def test_parameters_without_a_gradient_are_left_alone(store: str, overlap: bool, optimizer: Any) -> None:
    """As in torch: no gradient, no step, not even of momentum or decay; and Adam counts steps for each by itself."""
    data = [batches(1, size, seed=size)[0] for size in (2, 3, 3, 4, 5)]
    found, expected = both(seeded(TwoHeads), plain_step, optimizer, store, data, overlap=overlap)
    assert_same_bits(found, expected)


def plain_step(model: nn.Module, optimizer: Optimizer, trainer: echelon.Trainer | None, batch: Batch) -> None:
    loss_of(model, batch).backward()
    end_step(optimizer, trainer)


def test_workers_that_use_different_parts_end_alike() -> None:
    """A parameter's gradient is the mean over the samples that used it."""
    model = seeded(TwoHeads)
    sizes = ((2, 3), (3, 4), (2, 2))  # by step, by worker
    data = [[batches(1, pair[rank], seed=10 * rank + i)[0] for i, pair in enumerate(sizes)] for rank in range(2)]
    loop = Loop(model, momentum)
    found = run(lambda kv: loop.worker(kv, data[kv.rank]), "dist_sync", num_workers=2)
    assert_same_bits(found[0], found[1])
    assert differs(found[0], snapshot(model))
    assert torch.equal(found[0]["never.weight"], model.get_parameter("never.weight"))


@pytest.mark.parametrize("store", ["local", "dist_sync"])
def test_frozen_parameters_stay_and_are_not_sent(store: str) -> None:
    model = seeded(Net)
    model.get_submodule("middle").requires_grad_(False)
    frozen = snapshot(model.get_submodule("middle"))
    found, expected = both(model, plain_step, store=store)
    assert_same_bits(found, expected)
    assert torch.equal(found["middle.weight"], frozen["weight"])

    def keys(kv: KVStore) -> str:
        mine = copy.deepcopy(model)
        with echelon.Trainer(mine, momentum(mine), kv), pytest.raises(UsageError) as caught:
            kv.pull("middle.weight", torch.empty(1111, 27))
        return str(caught.value)

    assert "'middle.weight' is not initialised" in on_one_worker(keys, store)


class Tied(nn.Module):
    """One matrix in two places, and called twice in a forward pass."""

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
    assert_same_bits(*both(seeded(Tied), plain_step, store=store))


class Odd(Net):
    """Parameters of no element, and of one without a dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(0, 3))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images) * self.scale + self.nothing.sum()


@pytest.mark.parametrize("store", STORES)
def test_parameters_of_odd_sizes(store: str) -> None:
    assert_same_bits(*both(seeded(Odd), plain_step, store=store))


@pytest.mark.parametrize("store", STORES)
def test_a_model_called_twice_a_step(store: str) -> None:
    def step(model: nn.Module, optimizer: Optimizer, trainer: echelon.Trainer | None, batch: Batch) -> None:
        images, labels = batch
        (loss_of(model, batch) + loss_of(model, (images.flip(3), labels))).backward()
        end_step(optimizer, trainer, len(images))

    assert_same_bits(*both(seeded(Net), step, store=store))


class Direct(nn.Module):
    """Reads a module's parameters without calling it, as nn.MultiheadAttention does."""

    def __init__(self) -> None:
        super().__init__()
        self.direct = nn.Linear(64, 50, bias=False)
        self.last = nn.Linear(50, 5)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.last(nn.functional.linear(images.flatten(1), self.direct.weight).tanh())
        return logits


@pytest.mark.parametrize("reader", ["forward", "state_dict", "sync"])
@pytest.mark.parametrize("make", [Net, Direct])
def test_late_weights_are_waited_for(make: Callable[[], nn.Module], reader: str) -> None:
    """The other worker pushes only when this one is about to read, so the weights cannot be there yet."""
    model = seeded(make)
    data = batches(5)
    reading = threading.Semaphore(0)

    def read(mine: nn.Module, trainer: echelon.Trainer) -> Tensor:
        if reader == "forward":
            with torch.no_grad():
                result: Tensor = mine(data[0][0])
            return result
        if reader == "state_dict":
            return next(iter(snapshot(mine).values()))
        reading.release()
        trainer.sync()
        return next(mine.parameters()).detach().clone()

    def program(kv: KVStore) -> list[Tensor]:
        torch.set_num_threads(1)
        mine = copy.deepcopy(model)
        if kv.rank == 0:  # these hooks come before the Trainer's
            mine.register_forward_pre_hook(lambda module, _: None if torch.is_grad_enabled() else reading.release())
            mine.register_state_dict_pre_hook(lambda *_: reading.release())
        seen = []
        with echelon.Trainer(mine, momentum(mine), kv, overlap=kv.rank == 0) as trainer:
            for batch in data:
                loss_of(mine, batch).backward()
                if kv.rank == 1:
                    reading.acquire()
                trainer.step()
                if kv.rank == 0:
                    seen.append(read(mine, trainer))
        return seen

    plain = copy.deepcopy(model)
    optimizer = momentum(plain)
    seen, _ = run(program, "dist_sync", num_workers=2)
    tolerance = tolerances.of_training(data)
    for batch, found in zip(data, seen, strict=True):
        plain_step(plain, optimizer, None, batch)
        with torch.no_grad():
            expected = plain(data[0][0]) if reader == "forward" else next(plain.parameters())
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


class ByKeyword(nn.Module):
    """Its forward takes nothing by position."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, *, scale: float, images: Tensor) -> Tensor:
        logits: Tensor = self.net(images) * scale
        return logits


def test_a_forward_of_keywords_only() -> None:
    def step(model: nn.Module, optimizer: Optimizer, trainer: echelon.Trainer | None, batch: Batch) -> None:
        images, labels = batch
        nn.functional.cross_entropy(model(scale=2.0, images=images), labels).backward()
        end_step(optimizer, trainer)
        assert trainer is None or trainer.samples == 6 * trainer.clock

    assert_same_bits(*both(seeded(ByKeyword), step))


# --- batch sizes


def test_the_batch_size_is_seen_by_the_forward_pass() -> None:
    """Three workers with unequal batches and step() without a number are weighted as with one."""
    loop = Loop(seeded(Net), momentum)
    data = [batches(STEPS, 2 + 3 * rank, seed=rank) for rank in range(3)]

    def silent(kv: KVStore) -> State:
        torch.set_num_threads(1)
        model = copy.deepcopy(loop.model)
        with echelon.Trainer(model, momentum(model), kv) as trainer:
            for batch in data[kv.rank]:
                loss_of(model, batch).backward()
                trainer.step()
            kv.barrier()
            return snapshot(model)

    told = run(lambda kv: loop.worker(kv, data[kv.rank]), "dist_sync", num_workers=3)
    for state in run(silent, "dist_sync", num_workers=3):
        assert_same_bits(state, told[0])


def test_a_worker_without_data_takes_part_with_nothing() -> None:
    """step(0) after no backward: the others' mean is not diluted."""
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


def test_a_wrong_batch_size_is_an_error_and_the_right_one_still_goes() -> None:
    def step(model: nn.Module, optimizer: Optimizer, trainer: echelon.Trainer | None, batch: Batch) -> None:
        loss_of(model, batch).backward()
        if trainer is not None:
            with pytest.raises(UsageError, match=r"step\(7\), but the forward pass saw 6 samples.*overlap=False"):
                trainer.step(7)
        end_step(optimizer, trainer, 6)

    assert_same_bits(*both(seeded(Net), step))


def test_without_overlap_any_batch_size_is_believed() -> None:
    def step(model: nn.Module, optimizer: Optimizer, trainer: echelon.Trainer | None, batch: Batch) -> None:
        loss_of(model, batch).backward()
        end_step(optimizer, trainer, 7)
        assert trainer is None or trainer.samples == 7 * trainer.clock

    assert_same_bits(*both(seeded(Net), step, overlap=False))


def test_a_step_that_nobody_told_the_size_of() -> None:
    model = seeded(Net)
    with create("local") as kv, echelon.Trainer(model, momentum(model), kv) as trainer:
        with pytest.raises(UsageError, match="step\\(\\) could not infer the batch size"):
            trainer.step()
        with torch.no_grad():
            model(batches(1)[0][0])
        with pytest.raises(UsageError, match="step\\(\\) could not infer the batch size"):
            trainer.step()
        assert trainer.clock == 0


# --- buffers


class Normed(nn.Module):
    """With BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(1)
        self.net = Net()

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.net(self.norm(images))
        return logits


@pytest.mark.parametrize("store", ["dist_sync", "dist_async"])
def test_batchnorms_statistics_stay_with_the_worker_unless_averaged(store: str) -> None:
    model = seeded(Normed)
    data = [[(images * (rank + 1) + rank, labels) for images, labels in batches(2)] for rank in range(3)]

    def program(kv: KVStore) -> tuple[State, State, State]:
        torch.set_num_threads(1)
        mine = copy.deepcopy(model)
        with echelon.Trainer(mine, momentum(mine), kv, average_buffers=True) as trainer:
            for batch in data[kv.rank]:
                loss_of(mine, batch).backward()
                trainer.step()
            before = snapshot(mine)
            trainer.average_buffers()
            after = snapshot(mine)
            for batch in data[kv.rank]:
                loss_of(mine, batch).backward()
                trainer.step()
            trainer.average_buffers()
            return before, after, snapshot(mine)

    found = run(program, store, num_workers=3)
    for name in ("norm.running_mean", "norm.running_var"):
        own = torch.stack([before[name] for before, _, _ in found])
        assert len(own.unique()) == 3, "each has seen other data"
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


# --- reading the weights


@pytest.mark.parametrize("store", STORES)
def test_state_dict_and_eval_see_the_newest_weights(store: str) -> None:
    """At once after step(), without sync()."""
    outputs: dict[bool, list[Tensor]] = {False: [], True: []}

    def step(model: nn.Module, optimizer: Optimizer, trainer: echelon.Trainer | None, batch: Batch) -> None:
        loss_of(model, batch).backward()
        end_step(optimizer, trainer)
        model.eval()
        with torch.no_grad():
            outputs[trainer is not None].append(model(batch[0]))
        model.train()
        loss_of(model, batch).backward()
        end_step(optimizer, trainer)
        outputs[trainer is not None].append(snapshot(model)["last.weight"])

    both(seeded(Net), step, store=store)
    for found, expected in zip(outputs[True], outputs[False], strict=True):
        assert torch.equal(found, expected)


def test_a_model_can_be_used_and_saved_after_close() -> None:
    def program(kv: KVStore) -> tuple[Tensor, State]:
        model = seeded(Net)
        with echelon.Trainer(model, momentum(model), kv) as trainer:
            loss_of(model, batches(1)[0]).backward()
            trainer.step()
        loss_of(model, batches(1)[0]).backward()  # no hook sends this anywhere
        return model(batches(1)[0][0]).detach(), snapshot(model)

    output, state = on_one_worker(program, "dist_sync")
    model = Net()
    model.load_state_dict(state)
    assert torch.equal(model(batches(1)[0][0]), output)


# --- mistakes


def test_check_finite_names_the_gradient_and_the_job_goes_on() -> None:
    """Worker 1 skips the step whose gradient is bad; nothing of it reaches the servers' weights."""
    model = seeded(Net)

    def program(kv: KVStore) -> tuple[str, State]:
        torch.set_num_threads(1)
        mine = copy.deepcopy(model)
        message = ""
        with echelon.Trainer(mine, momentum(mine), kv, check_finite=True) as trainer:
            for number, (images, labels) in enumerate(batches(3)):
                bad = kv.rank == 1 and number == 1
                try:
                    loss_of(mine, (images * float("nan") if bad else images, labels)).backward()
                except UsageError as error:
                    message = str(error)
                    trainer.zero_grad()
                trainer.step()
            kv.barrier()
            return message, snapshot(mine)

    (nothing, state), (message, other) = run(program, "dist_sync", num_workers=2)
    assert nothing == ""
    assert message.startswith("worker 1: the gradient of ")
    assert "at clock 1 contains NaN or infinity" in message
    assert_same_bits(state, other)
    assert all(value.isfinite().all() for value in state.values())


def test_trainers_that_cannot_be() -> None:
    model = seeded(Net)
    stranger = nn.Linear(2, 2)
    with create("local") as kv:
        for optimizer, options, words in (
            (momentum(stranger), {}, "2 parameters that do not belong to the model"),
            (momentum(model), {"staleness": 3}, "are only valid with the name of a store"),
            (torch.optim.LBFGS(model.parameters()), {}, "LBFGS needs a closure"),
        ):
            with pytest.raises(UsageError, match=words):
                echelon.Trainer(model, optimizer, kv, **options)
    with pytest.raises(UsageError, match="did you mean 'dist_sync'"):
        echelon.Trainer(model, momentum(model), "dist_sink")
    with pytest.raises(UsageError, match="dist_ssync needs a scheduler"):
        echelon.Trainer(model, momentum(model), "dist_ssync", staleness=3)


def test_optimizers_that_servers_do_not_have() -> None:
    def program(kv: KVStore) -> None:
        model = seeded(Net)
        with pytest.raises(UsageError, match="Adamax cannot run on the servers"):
            echelon.Trainer(model, torch.optim.Adamax(model.parameters()), kv)

    on_one_worker(program, "dist_sync")


def test_a_trainer_makes_its_store_by_name() -> None:
    model = seeded(Net)
    expected = Loop(model, momentum).plain(batches(2))
    with echelon.Trainer(model, momentum(model), "local") as trainer:
        for batch in batches(2):
            loss_of(model, batch).backward()
            trainer.step()
    assert trainer.kvstore.type == "local"
    assert trainer.progress()["clock"] == 2
    assert_same_bits(snapshot(model), expected)


def clip(model: nn.Linear) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def replace_gradient(model: nn.Linear) -> None:
    assert model.weight.grad is not None
    model.weight.grad = model.weight.grad.clamp(-0.1, 0.1)


@pytest.mark.parametrize("change", [clip, replace_gradient])
def test_changing_a_gradient_that_has_left_is_an_error(change: Callable[[nn.Linear], None]) -> None:
    """Clipping between backward and step would otherwise do nothing, silently."""

    def program(kv: KVStore) -> None:
        model = nn.Linear(4, 2)
        trainer = echelon.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), kv)
        model(torch.ones(3, 4)).sum().backward()
        change(model)
        with pytest.raises(UsageError, match=r"changed after gradients were sent.*overlap=False"):
            trainer.step(3)

    on_one_worker(program, "dist_sync")


def test_a_schedule_of_anything_but_the_rate_is_an_error_on_servers() -> None:
    def program(kv: KVStore) -> None:
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        trainer = echelon.Trainer(model, optimizer, kv)
        model(torch.ones(3, 4)).sum().backward()
        optimizer.param_groups[0]["momentum"] = 0.8
        with pytest.raises(UsageError, match=r"momentum changed from 0.9 to 0.8"):
            trainer.step(3)

    on_one_worker(program, "dist_sync")


# --- alone there is nobody to be careful for


def test_alone_clipping_and_any_schedule_are_plain_pytorch() -> None:
    def step(model: nn.Module, optimizer: Optimizer, trainer: echelon.Trainer | None, batch: Batch) -> None:
        loss_of(model, batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.param_groups[0]["momentum"] *= 0.9
        end_step(optimizer, trainer)

    for optimizer in (momentum, lambda model: torch.optim.Adamax(model.parameters())):
        if optimizer is momentum:
            assert_same_bits(*both(seeded(Net), step, optimizer, "local"))
        assert_same_bits(*both(seeded(Net), plain_step, optimizer, "device"))


def test_alone_a_step_comes_in_two_parts_for_who_captures_it() -> None:
    model = seeded(Net)
    expected = Loop(model, momentum).plain(batches(2))
    with echelon.Trainer(model, momentum(model), "device") as trainer:
        assert trainer.capturable
        for batch in batches(2):
            loss_of(model, batch).backward()
            trainer.update()
            trainer.zero_grad()
            trainer.count(6)
        assert (trainer.clock, trainer.samples) == (2, 12)
        assert next(model.parameters()).grad is None
    assert_same_bits(snapshot(model), expected)
