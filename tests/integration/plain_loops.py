"""The same training loops in plain PyTorch and with a Trainer, on the workers of a job in this process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler

import echelon
from echelon.errors import UsageError
from echelon.kvstore import KVStore, create
from echelon.launch.threads.in_process import run

STORES: dict[str, dict[str, Any]] = {
    "local": {},
    "device": {},
    "dist_sync": {},
    "dist_async": {},
    "dist_ssync": {"staleness": 2},
    "dist_gsync": {"groups": [[0]]},
}

MakeOptimizer = Callable[[nn.Module], Optimizer]
MakeSchedule = Callable[[Optimizer], LRScheduler]
Batch = tuple[Tensor, Tensor]
State = dict[str, Tensor]
Step = Callable[[nn.Module, Optimizer, echelon.Trainer | None, Batch], None]
STEPS = 4  # of most loops


class Net(nn.Module):
    """Has a strided convolution, odd sizes, and one key (30,003 elements) that is divided between servers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 3, 3, stride=2)
        self.middle = nn.Linear(27, 1111)
        self.last = nn.Linear(1111, 5)

    def forward(self, images: Tensor) -> Tensor:
        hidden = torch.relu(self.first(images)).flatten(1)
        logits: Tensor = self.last(torch.tanh(self.middle(hidden)))
        return logits


def seeded(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """Return a model with fixed first weights. Call it before threads start: they share torch's generator."""
    torch.manual_seed(seed)
    return make()


def batches(count: int, size: int = 6, seed: int = 1, dtype: torch.dtype = torch.float32) -> list[Batch]:
    """Return batches of random images and labels."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(size, 1, 8, 8, generator=generator).to(dtype),
            torch.randint(0, 5, (size,), generator=generator),
        )
        for _ in range(count)
    ]


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean loss over the batch."""
    images, labels = batch
    return nn.functional.cross_entropy(model(images), labels)


@dataclass(frozen=True)
class Loop:
    """A model, its optimizer and its schedule."""

    model: nn.Module
    optimizer: MakeOptimizer
    schedule: MakeSchedule | None = None

    def plain(self, data: Sequence[Batch]) -> State:
        """Train with plain PyTorch and return the last weights."""
        model = copy.deepcopy(self.model)
        optimizer = self.optimizer(model)
        schedule = self.schedule(optimizer) if self.schedule else None
        for batch in data:
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
            if schedule:
                schedule.step()
        return snapshot(model)

    def worker(self, kv: KVStore, data: Sequence[Batch], pass_size: bool = True, **options: Any) -> State:
        """Train with a Trainer as one worker and return the last weights."""
        torch.set_num_threads(1)  # otherwise a new thread's first convolution uses all cores and sums in another order
        model = copy.deepcopy(self.model)
        optimizer = self.optimizer(model)
        schedule = self.schedule(optimizer) if self.schedule else None
        trainer = echelon.Trainer(model, optimizer, kv, **options)
        for batch in data:
            loss_of(model, batch).backward()
            trainer.step(len(batch[0]) if pass_size else None)
            if schedule:
                schedule.step()
        state = snapshot(model)
        kv.barrier()
        trainer.close()
        return state


def snapshot(model: nn.Module) -> State:
    """Return a copy of a model's parameters and buffers."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def on_one_worker(program: Callable[[KVStore], Any], store: str, **options: Any) -> Any:
    """Run a program on the only worker of a store, and return its result."""
    if store in ("local", "device"):
        with create(store) as kv:
            return program(kv)
    return run(program, store, num_workers=1, **STORES[store], **options)[0]


def assert_same_bits(actual: State, expected: State) -> None:
    """Check that both states have the same tensors, bit for bit."""
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        assert torch.equal(value, expected[name]), f"{name} differs by up to {(value - expected[name]).abs().max()}"


def assert_close(actual: State, expected: State, tolerance: float) -> None:
    """Check that elements differ by at most a tolerance, absolute and relative."""
    for name, value in actual.items():
        torch.testing.assert_close(value, expected[name], rtol=tolerance, atol=tolerance)


def differs(one: State, other: State) -> bool:
    """Return whether any tensor differs."""
    return any(not torch.equal(value, other[name]) for name, value in one.items())


def joined(parts: Sequence[Sequence[Batch]]) -> list[Batch]:
    """Return the batches of all workers, joined step by step, for one process."""
    return [
        (torch.cat([images for images, _ in step]), torch.cat([labels for _, labels in step]))
        for step in zip(*parts, strict=True)
    ]


def parts_of(sizes: Sequence[int], steps: int = STEPS, **more: Any) -> list[list[Batch]]:
    """Return each worker's batches, of the given sizes."""
    return [batches(steps, size, seed=rank + 1, **more) for rank, size in enumerate(sizes)]


def two_groups(model: nn.Module) -> Optimizer:
    """Return an optimizer with other settings for biases, which alternate with the weights. It has frozen ones, too."""
    named = list(model.named_parameters())
    groups: list[dict[str, Any]] = [
        {"params": [p for name, p in named if "bias" not in name]},
        {"params": [p for name, p in named if "bias" in name], "lr": 0.5, "weight_decay": 0.0},
    ]
    return SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.01)


def take_steps(model: nn.Module, trainer: echelon.Trainer, data: Sequence[Batch]) -> None:
    """Make one step per batch."""
    for batch in data:
        loss_of(model, batch).backward()
        trainer.step()


def usage_error(call: Callable[[], object]) -> str:
    """Return the message of the UsageError that the call raises."""
    try:
        call()
    except UsageError as error:
        return str(error)
    raise AssertionError("no UsageError was raised")


def momentum(model: nn.Module) -> Optimizer:
    """Return SGD with momentum and weight decay for the parameters that require a gradient."""
    return SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9, weight_decay=0.01)


def end_step(optimizer: Optimizer, trainer: echelon.Trainer | None, samples: int | None = None) -> None:
    """End a step of a loop with a Trainer, or without one."""
    if trainer is None:
        optimizer.step()
        optimizer.zero_grad()
    else:
        trainer.step(samples)


def plain_step(model: nn.Module, optimizer: Optimizer, trainer: echelon.Trainer | None, batch: Batch) -> None:
    """Make a step of the simplest loop."""
    loss_of(model, batch).backward()
    end_step(optimizer, trainer)


def with_and_without_trainer(
    model: nn.Module,
    step: Step,
    optimizer: MakeOptimizer = momentum,
    store: str = "dist_sync",
    data: list[Batch] | None = None,
    **options: Any,
) -> tuple[State, State]:
    """Return the weights after a loop of `step` with a Trainer on one worker, and without one."""
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
