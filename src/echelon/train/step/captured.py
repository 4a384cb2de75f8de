"""A whole training step as one CUDA graph: batch, forward, backward, update and metrics, without work on the host.

A step of a small network is hundreds of kernels of a few microseconds each. Launching them one by one takes longer than
running them; a replayed graph launches all of them at once. If Inductor compiles the step before it is captured, there
are also fewer kernels.

The first steps run without a graph: they tune convolutions, compile, and create the optimizer's states. The next step
is then captured. All of these steps train. Everything that changes from step to step is on the device: the position in
the data (or the buffer that a batch is copied into), the learning rate, the loss scale and the sums of the metrics.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from echelon.data.loading.loader import Batches
from echelon.optim import Rule
from echelon.train.step.average import MovingAverage
from echelon.train.step.eager import Batch, ForwardPass
from echelon.train.step.forward import Compiler, Forward, WholeForward
from echelon.train.step.precision import LossScaler
from echelon.train.trainer.base import Trainer

WARM_UP_STEPS = 3
FUSED = (SGD, Adam, AdamW)  # one kernel updates all parameters, and does nothing if gradients overflowed


class StepBody:
    """Batch, forward, backward, update and metrics as one function without host work. It runs on any device."""

    def __init__(
        self,
        forward_pass: ForwardPass,
        trainer: Trainer,
        scaler: LossScaler | None,
        compiler: Compiler | None = None,
        average: MovingAverage | None = None,
    ) -> None:
        self.forward = WholeForward(forward_pass)
        self.forward.use(compiler)
        self._half_weights = self.forward.half_weights
        self._sums = forward_pass.sums
        self._average = average
        self._trainer = trainer
        self._scaler = scaler
        self._parameters = [p for group in trainer.optimizer.param_groups for p in group["params"]]
        make_capturable(trainer.optimizer, forward_pass.precision.device, scaler)

    def __call__(self) -> None:
        """Make a step."""
        self.update(self.forward_backward())

    def forward_backward(self) -> Tensor:
        """Compute the gradients, with compiled kernels if there are any; returns the batch's sums of the metrics."""
        for parameter in self._parameters:
            parameter.grad = None
        if self._half_weights is not None:
            self._half_weights.clear_gradients()
        loss, sums = self.forward()
        (loss if self._scaler is None else self._scaler.scaled(loss)).backward()
        return sums

    def update(self, sums: Tensor) -> None:
        """Average and update the weights, and add the sums of the metrics."""
        if self._average is not None:
            self._average.update()
        if self._half_weights is not None:
            self._half_weights.convert_gradients()
        if self._scaler is not None:
            self._scaler.unscale([p.grad for p in self._parameters if p.grad is not None])
        self._trainer.update()
        if self._scaler is not None:
            self._scaler.update()
        if self._half_weights is not None:
            self._half_weights.renew()
        self._sums.add_(sums)


class CapturedStep:
    """Makes steps by replaying a graph. With `compiled`, Inductor generates the kernels."""

    def __init__(
        self,
        forward_pass: ForwardPass,
        trainer: Trainer,
        scaler: LossScaler | None,
        *,
        compiled: bool,
        average: MovingAverage | None = None,
    ) -> None:
        self._batch_size = forward_pass.batch_size
        self._trainer = trainer
        self._body = StepBody(forward_pass, trainer, scaler, torch.compile if compiled else None, average)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._num_warm_up = 0
        self._stream = torch.cuda.Stream(forward_pass.precision.device)

    @property
    def forward(self) -> Forward:
        """The part that Inductor can compile."""
        return self._body.forward

    @property
    def is_captured(self) -> bool:
        """Whether the first steps are done and the next one replays the graph."""
        return self._graph is not None

    def use_compiler(self) -> None:
        """Compile the next step and capture it again. The state of the training is not touched."""
        torch.cuda.synchronize()
        self._graph = None
        self._num_warm_up = 0
        self.forward.use(torch.compile)

    def batches(self, loader: Batches) -> Iterator[Batch | None]:
        """Yield the rest of an epoch: batches, or None for each batch of a loader on the device."""
        return self.forward.input.batches(loader)

    def step(self, batch: Batch | None) -> None:
        """Make one step; `batch` is None if the loader is on the device."""
        if batch is not None:
            self.forward.input.copy_in(batch)
        if self._graph is None:
            self._warm_up()
        else:
            self._graph.replay()
        self._trainer.count(self._batch_size)

    def close(self) -> None:
        """Do nothing: the graph is freed with this object."""

    def _warm_up(self) -> None:
        """Make one of the first steps without a graph; after the last of them, capture the graph."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            if self.forward.compiled and not self._num_warm_up:
                self._body.update(self.forward.run_first(self._body.forward_backward))
            else:
                self._body()
        current.wait_stream(self._stream)
        self._num_warm_up += 1
        if self._num_warm_up == WARM_UP_STEPS:
            torch.cuda.synchronize()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._body()


def make_capturable(optimizer: Optimizer, device: torch.device, scaler: LossScaler | None) -> None:
    """Keep an optimizer's learning rate and counters on the device, and let it skip steps that overflowed."""
    for group in optimizer.param_groups:
        group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32).to(device)
        if isinstance(optimizer, FUSED):
            group["fused"] = True
        if "capturable" in group:
            group["capturable"] = True
        if isinstance(optimizer, SGD) and group["momentum"]:
            # The first step would create these uninitialised, and leave them so if it overflows and is skipped.
            for parameter in group["params"]:
                optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))
    if scaler is not None:
        optimizer.found_inf = scaler.found_inf  # type: ignore[attr-defined]
        optimizer.grad_scale = None  # type: ignore[attr-defined]


def why_not_capturable(optimizer: Optimizer, half: torch.dtype | None) -> str | None:
    """Return why a step with this optimizer cannot be captured, or None if it can."""
    name = type(optimizer).__name__
    if isinstance(optimizer, Rule):
        capturable, skips_overflow = optimizer.capturable, optimizer.skips_overflow
    else:
        skips_overflow = isinstance(optimizer, FUSED)
        capturable = skips_overflow or "capturable" in optimizer.param_groups[0]
    if not capturable:
        return f"{name} runs host code between its kernels"
    if half is torch.float16 and not skips_overflow:
        return f"with float16, {name} reads on the host whether gradients overflowed"
    return None


def set_learning_rate(optimizer: Optimizer, rate: float) -> None:
    """Set the learning rate: a number on the host, or a tensor on the device if steps are captured."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
