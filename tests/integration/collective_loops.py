"""Training loops on a group of forked processes, and in one process on the joined batch."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from plain_loops import Batch, Loop, MakeOptimizer, State, batches, loss_of, snapshot
from torch import Tensor, nn
from torch.optim import SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RMSprop

import echelon
from echelon.kvstore import KVStore
from forked import run

KINDS = ("nccl_allreduce", "nccl")  # every rank updates all weights; each rank updates its shard
STEPS = 4
SIZES = (6, 2, 5)
STORES = ("local", "device", *KINDS, "dist_device_sync", "dist_sync_device", "dist_sync")


def two_groups(model: nn.Module) -> Optimizer:
    """Return an optimizer with other settings for biases. It has the frozen parameters, too."""
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
    """Return each rank's batches, of the given sizes."""
    return [batches(steps, size, seed=rank + 1, **more) for rank, size in enumerate(sizes)]


class Normed(nn.Module):
    """Has BatchNorm, channels-last weights, an unused parameter, a frozen one and a scalar one."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(1)
        self.first = nn.Conv2d(1, 3, 3, stride=2)
        self.frozen = nn.Linear(27, 27).requires_grad_(False)
        self.last = nn.Linear(27, 5)
        self.scale = nn.Parameter(torch.ones(()))
        self.never = nn.Linear(2, 2)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, images: Tensor) -> Tensor:
        hidden = torch.relu(self.first(self.norm(images))).flatten(1)
        logits: Tensor = self.last(torch.tanh(self.frozen(hidden))) * self.scale
        return logits


def joined(parts: Sequence[Sequence[Batch]]) -> list[Batch]:
    """Return the batches of all processes, joined step by step, for one process."""
    return [
        (torch.cat([images for images, _ in step]), torch.cat([labels for _, labels in step]))
        for step in zip(*parts, strict=True)
    ]


def train(kv: KVStore, loop: Loop, data: Sequence[Batch], pass_size: bool = True, **options: Any) -> State:
    """Train as one worker and return the last weights."""
    model = copy.deepcopy(loop.model)
    optimizer = loop.optimizer(model)
    schedule = loop.schedule(optimizer) if loop.schedule else None
    trainer = echelon.Trainer(model, optimizer, kv, **options)
    for batch in data:
        loss_of(model, batch).backward()
        trainer.step(len(batch[0]) if pass_size else None)
        if schedule:
            schedule.step()
    trainer.close()
    return snapshot(model)


def on_group(store: str, loop: Loop, parts: Sequence[Sequence[Batch]], **options: Any) -> list[State]:
    """Return the last weights of every worker."""
    return run(lambda kv: train(kv, loop, parts[kv.rank], **options), store, num_workers=len(parts))


def largest_difference(actual: State, expected: State) -> float:
    """Return the largest relative difference of a tensor, measured by its norm."""
    worst = 0.0
    for name, value in expected.items():
        if value.is_floating_point():
            gap = (actual[name] - value).double().norm() / value.double().norm().clamp_min(1e-12)
            worst = max(worst, float(gap))
    return worst
