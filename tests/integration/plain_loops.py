"""The same training loop twice: in plain PyTorch, and with a Trainer on the workers of a job in this process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

import echelon
from echelon.kvstore import KVStore, create
from echelon.launch.in_process import run

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


class Net(nn.Module):
    """Convolution, strided and odd sizes, one key (30,003 elements) that is cut over the servers."""

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
    """A model with known first weights; threads share torch's generator, so make it before they start."""
    torch.manual_seed(seed)
    return make()


def batches(count: int, size: int = 6, seed: int = 1, dtype: torch.dtype = torch.float32) -> list[Batch]:
    """Images and labels."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(size, 1, 8, 8, generator=generator).to(dtype),
            torch.randint(0, 5, (size,), generator=generator),
        )
        for _ in range(count)
    ]


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """The mean over the batch."""
    images, labels = batch
    return nn.functional.cross_entropy(model(images), labels)


@dataclass(frozen=True)
class Loop:
    """What to train and how."""

    model: nn.Module
    optimizer: MakeOptimizer
    schedule: MakeSchedule | None = None

    def plain(self, data: Sequence[Batch]) -> State:
        """The weights that plain PyTorch ends with."""
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

    def worker(self, kv: KVStore, data: Sequence[Batch], **options: Any) -> State:
        """The weights that a worker with a Trainer ends with."""
        torch.set_num_threads(1)  # a new thread's first convolution would use all cores, and sum in another order
        model = copy.deepcopy(self.model)
        optimizer = self.optimizer(model)
        schedule = self.schedule(optimizer) if self.schedule else None
        trainer = echelon.Trainer(model, optimizer, kv, **options)
        for batch in data:
            loss_of(model, batch).backward()
            trainer.step(len(batch[0]))
            if schedule:
                schedule.step()
        state = snapshot(model)
        kv.barrier()
        trainer.close()
        return state


def snapshot(model: nn.Module) -> State:
    """A copy of everything a model has."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def on_one_worker(program: Callable[[KVStore], Any], store: str, **options: Any) -> Any:
    """Run a program on the only worker of a store."""
    if store in ("local", "device"):
        with create(store) as kv:
            return program(kv)
    return run(program, store, num_workers=1, **STORES[store], **options)[0]


def assert_same_bits(actual: State, expected: State) -> None:
    """Every tensor of one is every tensor of the other, to the bit."""
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        assert torch.equal(value, expected[name]), f"{name} differs by up to {(value - expected[name]).abs().max()}"


def assert_close(actual: State, expected: State, tolerance: float) -> None:
    """Every element within a tolerance, absolute and relative."""
    for name, value in actual.items():
        torch.testing.assert_close(value, expected[name], rtol=tolerance, atol=tolerance)


def differs(one: State, other: State) -> bool:
    """Whether any tensor does."""
    return any(not torch.equal(value, other[name]) for name, value in one.items())
