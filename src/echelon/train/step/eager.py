"""What a training step computes, and the plainest way to run one.

`Work` is the part that every engine shares: forward, loss, measurements, in the run's precision. `EagerStep` runs it
kernel by kernel (or, compiled, in fewer kernels), hands the gradients to the trainer and lets that update. Whole steps
as CUDA graphs are in `captured`; which engine a run uses is decided in `engine`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from echelon.data.loading.loader import Batches
from echelon.train.recipe.pace import Pacer
from echelon.train.step.average import MovingAverage
from echelon.train.step.losses import Mixed, blend, cross_entropy, draw_weight
from echelon.train.step.metrics import Metrics
from echelon.train.step.precision import LossScaler, Precision

Batch: TypeAlias = tuple[Tensor, Tensor]


class Updates(Protocol):
    """What a step needs of a Trainer."""

    optimizer: Optimizer
    clock: int

    def step(self, batch_size: int | None = None) -> None:
        """Reduce the gradients and update the weights."""

    def update(self) -> None:
        """The device's part of `step`, for one process alone."""

    def count(self, samples: int) -> None:
        """The host's part of `step`."""


class Work:
    """Forward pass, loss and measurements of a batch; `sums` adds the measurements up on the device, in float64."""

    def __init__(
        self, model: nn.Module, precision: Precision, metrics: Metrics, batch_size: int, label_smoothing: float = 0.0
    ) -> None:
        self.model = model
        self.precision = precision
        self.metrics = metrics
        self.batch_size = batch_size
        self._label_smoothing = label_smoothing
        self.sums = torch.zeros(len(metrics.names) + 1, dtype=torch.float64, device=precision.device)

    def run(
        self,
        images: Tensor,
        labels: Tensor,
        network: Callable[[Tensor], Tensor] | None = None,
        mixed: Mixed | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The loss, and the sums of what was measured. Looks at no value: it can be compiled or captured."""
        with self.precision.autocast():
            logits = (network or self.model)(images)
        return self.judge(logits, labels, mixed)

    def judge(self, logits: Tensor, labels: Tensor, mixed: Mixed | None = None) -> tuple[Tensor, Tensor]:
        """The part of `run` after the network."""
        logits = logits.float()
        loss = cross_entropy(logits, labels, self._label_smoothing, mixed)
        return loss, self.metrics.measure(logits, labels)


class Mixup:
    """Blends the batches of a run. `begin`: the steps before this process's first, which a resumed run did not make."""

    def __init__(self, alpha: float, seed: int, rank: int, begin: int = 0) -> None:
        self._alpha, self._seed, self._rank, self._begin = alpha, seed, rank, begin

    def __call__(self, images: Tensor, labels: Tensor, clock: int) -> tuple[Tensor, Mixed]:
        weight = draw_weight(self._alpha, self._seed, self._rank, self._begin + clock)
        return blend(images, labels, torch.tensor(weight, device=images.device))


class EagerStep:
    """Steps that the host drives. With `compiled`, Inductor makes the kernels of forward and backward."""

    def __init__(
        self,
        work: Work,
        updates: Updates,
        scaler: LossScaler | None,
        pacer: Pacer,
        *,
        compiled: bool = False,
        mixup: Mixup | None = None,
        average: MovingAverage | None = None,
    ) -> None:
        self.work = work
        self._average = average
        self._updates = updates
        self._scaler = scaler
        self._pacer = pacer
        self._mixup = mixup
        self._forward = torch.compile(work.run) if compiled else work.run

    def batches(self, loader: Batches) -> Iterable[Batch | None]:
        """The rest of an epoch."""
        return loader

    def step(self, batch: Batch | None) -> None:
        """One step."""
        assert batch is not None
        device = self.work.precision.device
        images = batch[0].to(device, non_blocking=True).contiguous(memory_format=torch.channels_last)
        labels = batch[1].to(device, non_blocking=True)
        mixed = None
        if self._mixup is not None:
            images, mixed = self._mixup(images, labels, self._updates.clock)
        self._pacer.begin()
        loss, sums = self._forward(images, labels, None, mixed)
        if self._average is not None:
            self._average.update()  # here, because forward has waited for all weights
        self._pacer.hold(self._updates.clock)
        (loss if self._scaler is None else self._scaler.scaled(loss)).backward()  # type: ignore[no-untyped-call]
        self._pacer.end()
        if self._scaler is not None:
            self._unscale(self._scaler)
        self._updates.step(len(images))
        self.work.sums += sums

    def _unscale(self, scaler: LossScaler) -> None:
        """Divide the loss scale out; gradients that overflowed are dropped, and the step changes nothing."""
        parameters = [p for group in self._updates.optimizer.param_groups for p in group["params"]]
        scaler.unscale([p.grad for p in parameters if p.grad is not None])
        if scaler.found_inf.item():
            for parameter in parameters:
                parameter.grad = None
        scaler.update()


def set_rate(optimizer: Optimizer, rate: float) -> None:
    """Change the learning rate where it lives: on the host, or on the device of a captured step."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
