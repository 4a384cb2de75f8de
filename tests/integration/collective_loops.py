"""Training loops on a group of forked processes, and in one process on the joined batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from plain_loops import Batch, Loop, MakeOptimizer, State, two_groups
from torch import Tensor, nn
from torch.optim import Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RMSprop

from forked import run

KINDS = ("nccl_allreduce", "nccl")  # every rank updates all weights; each rank updates its shard
STORES = ("local", "device", *KINDS, "dist_device_sync", "dist_sync_device", "dist_sync")


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


def on_group(store: str, loop: Loop, parts: Sequence[Sequence[Batch]], **options: Any) -> list[State]:
    """Return the last weights of every worker."""
    return run(lambda kv: loop.worker(kv, parts[kv.rank], **options), store, num_workers=len(parts))


def largest_difference(actual: State, expected: State) -> float:
    """Return the largest relative difference of a tensor, measured by its norm."""
    worst = 0.0
    for name, value in expected.items():
        if value.is_floating_point():
            gap = (actual[name] - value).double().norm() / value.double().norm().clamp_min(1e-12)
            worst = max(worst, float(gap))
    return worst
