"""What every training step computes, and the step that the host drives.

`ForwardPass` is the part that all engines share: forward pass, loss and metrics, in the precision of the run.
`EagerStep` runs it kernel by kernel (or, if compiled, with fewer kernels) and lets the trainer reduce the gradients and
update the weights. `captured` has steps that are CUDA graphs; `choose` decides which engine a run uses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias

import torch
from torch import Tensor, nn

from echelon.data.loading.loader import Batches
from echelon.train.recipe.pace import Pacer
from echelon.train.step.average import MovingAverage
from echelon.train.step.losses import Mixup, MixupLabels, cross_entropy
from echelon.train.step.metrics import Metrics
from echelon.train.step.precision import LossScaler, Precision
from echelon.train.trainer.base import Trainer

Batch: TypeAlias = tuple[Tensor, Tensor]


class ForwardPass:
    """Forward pass, loss and metrics of a batch. `sums` accumulates the metrics on the device, in float64."""

    def __init__(
        self, model: nn.Module, precision: Precision, metrics: Metrics, batch_size: int, label_smoothing: float = 0.0
    ) -> None:
        self.model = model
        self.precision = precision
        self.metrics = metrics
        self.batch_size = batch_size
        self._label_smoothing = label_smoothing
        self.sums = torch.zeros(metrics.num_sums, dtype=torch.float64, device=precision.device)

    def run(
        self,
        images: Tensor,
        labels: Tensor,
        network: Callable[[Tensor], Tensor] | None = None,
        mixed: MixupLabels | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the loss and the metric sums of a batch. Reads no value on the host, so it can be captured."""
        with self.precision.autocast():
            logits = (network or self.model)(images)
        return self.loss_and_metrics(logits, labels, mixed)

    def loss_and_metrics(
        self, logits: Tensor, labels: Tensor, mixed: MixupLabels | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return what `run` returns, from the outputs of the network."""
        logits = logits.float()
        loss = cross_entropy(logits, labels, self._label_smoothing, mixed)
        return loss, self.metrics.measure(logits, labels)


class EagerStep:
    """Steps that the host drives. With `compiled`, Inductor generates the kernels of forward and backward."""

    def __init__(
        self,
        forward_pass: ForwardPass,
        trainer: Trainer,
        scaler: LossScaler | None,
        pacer: Pacer,
        *,
        compiled: bool = False,
        mixup: Mixup | None = None,
        average: MovingAverage | None = None,
    ) -> None:
        self.forward_pass = forward_pass
        self._average = average
        self._trainer = trainer
        self._scaler = scaler
        self._pacer = pacer
        self._mixup = mixup
        self._run_forward = torch.compile(forward_pass.run) if compiled else forward_pass.run

    def batches(self, loader: Batches) -> Iterable[Batch | None]:
        """Return the rest of an epoch."""
        return loader

    def step(self, batch: Batch | None) -> None:
        """Make one step."""
        assert batch is not None
        if not len(batch[1]):  # of records that cannot be read
            self._trainer.make_empty_step()
            return
        device = self.forward_pass.precision.device
        images = batch[0].to(device, non_blocking=True).contiguous(memory_format=torch.channels_last)
        labels = batch[1].to(device, non_blocking=True)
        mixed = None
        if self._mixup is not None:
            images, mixed = self._mixup(images, labels, self._trainer.clock)
        self._pacer.begin()
        loss, sums = self._run_forward(images, labels, None, mixed)
        if self._average is not None:
            self._average.update()  # after the forward pass, which has waited for all weights
        self._pacer.hold(self._trainer.clock)
        (loss if self._scaler is None else self._scaler.scaled(loss)).backward()
        self._pacer.end()
        if self._scaler is not None:
            self._unscale(self._scaler)
        self._trainer.step(len(images))
        self.forward_pass.sums += sums

    def close(self) -> None:
        """Do nothing: an eager step holds no resources."""

    def _unscale(self, scaler: LossScaler) -> None:
        """Divide the gradients by the loss scale. If any overflowed, drop them all: the step then changes nothing."""
        parameters = [p for group in self._trainer.optimizer.param_groups for p in group["params"]]
        scaler.unscale([p.grad for p in parameters if p.grad is not None])
        if scaler.found_inf.item():
            for parameter in parameters:
                parameter.grad = None
        scaler.update()
