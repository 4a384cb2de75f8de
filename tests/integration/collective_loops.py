"""Loops on a group of forked processes, and the same in one process on the joined batch."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from plain_loops import Batch, Loop, State, loss_of, snapshot
from torch import Tensor, nn

import echelon
from echelon.kvstore import KVStore
from forked import run

KINDS = ("nccl_allreduce", "nccl")  # everybody updates everything; each its part
STORES = ("local", "device", *KINDS, "dist_device_sync", "dist_sync_device", "dist_sync")


class Normed(nn.Module):
    """BatchNorm, channels-last weights, a parameter that is not used, one that is frozen, one of a single element."""

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
    """What one process would see: the batches of all, step by step."""
    return [
        (torch.cat([images for images, _ in step]), torch.cat([labels for _, labels in step]))
        for step in zip(*parts, strict=True)
    ]


def train(kv: KVStore, loop: Loop, data: Sequence[Batch], told: bool = True, **options: Any) -> State:
    """A worker's weights at the end."""
    model = copy.deepcopy(loop.model)
    optimizer = loop.optimizer(model)
    schedule = loop.schedule(optimizer) if loop.schedule else None
    trainer = echelon.Trainer(model, optimizer, kv, **options)
    for batch in data:
        loss_of(model, batch).backward()
        trainer.step(len(batch[0]) if told else None)
        if schedule:
            schedule.step()
    trainer.close()
    return snapshot(model)


def on_group(store: str, loop: Loop, parts: Sequence[Sequence[Batch]], **options: Any) -> list[State]:
    """What every worker ends with."""
    return run(lambda kv: train(kv, loop, parts[kv.rank], **options), store, num_workers=len(parts))


def largest_difference(actual: State, expected: State) -> float:
    """The largest relative difference of a tensor, by its norm."""
    worst = 0.0
    for name, value in expected.items():
        if value.is_floating_point():
            gap = (actual[name] - value).double().norm() / value.double().norm().clamp_min(1e-12)
            worst = max(worst, float(gap))
    return worst
