"""A whole training step as one CUDA graph: batch, forward, backward, update and metrics, without work on the host.

A step of a small network is hundreds of kernels of a few microseconds each. Launching them one by one takes longer than
running them; a replayed graph launches all of them at once. If Inductor compiles the step before it is captured, there
are also fewer kernels.

The first steps run without a graph: they tune convolutions, compile, and create the optimizer's states. The next step
is then captured. All of these steps train. Everything that changes from step to step is on the device: the position in
the data (or the buffer that a batch is copied into), the learning rate, the loss scale and the sums of the metrics.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.func import functional_call
from torch.optim import SGD, Adam, AdamW, Optimizer

from echelon.data.loading.device import DeviceMemoryLoader
from echelon.data.loading.loader import Batches
from echelon.train.step.average import MovingAverage
from echelon.train.step.eager import Batch, ForwardPass
from echelon.train.step.precision import HalfWeights, LossScaler, weights_to_halve
from echelon.train.trainer.base import Trainer

log = logging.getLogger(__name__)

Compiler: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]
WARM_UP_STEPS = 3
FUSED = (SGD, Adam, AdamW)  # one kernel updates all parameters, and does nothing if gradients overflowed


class BatchInput:
    """The batch that a captured step reads: gathered by `loader` on the device, or else copied into `buffer`.

    A replayed graph reads the same memory every time. So a batch from the host is copied into a fixed buffer before the
    replay. A loader that has its data on the device gathers the batch inside the graph, and nothing is copied.
    """

    def __init__(self, device: torch.device) -> None:
        self.loader: DeviceMemoryLoader | None = None
        self.buffer: Batch | None = None
        self._device = device
        self._copied: Tensor | None = None  # the images that were copied last

    def batches(self, loader: Batches) -> Iterator[Batch | None]:
        """Yield the rest of an epoch: each batch to copy in, or None for each batch of a loader on the device."""
        if not isinstance(loader, DeviceMemoryLoader):
            yield from loader
            return
        self.loader = loader
        for _ in range(loader.begin()):
            loader.advance()
            yield None

    def copy_in(self, batch: Batch) -> None:
        """Copy a batch into the buffer. Synthetic data is always the same batch, which is copied once."""
        if self.buffer is None:
            images = batch[0].to(self._device, memory_format=torch.channels_last, copy=True)
            self.buffer = images, batch[1].to(self._device, copy=True)
        elif batch[0] is not self._copied:
            self.buffer[0].copy_(batch[0], non_blocking=True)
            self.buffer[1].copy_(batch[1], non_blocking=True)
        self._copied = batch[0]

    def read(self) -> Batch:
        """Return the batch of this step, with device operations only."""
        if self.loader is not None:
            return self.loader.gather()
        assert self.buffer is not None
        return self.buffer


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
        self._forward_pass = forward_pass
        self._average = average
        self._trainer = trainer
        self._scaler = scaler
        model, half = forward_pass.model, forward_pass.precision.half
        self._half_weights = HalfWeights(model, half) if half is not None and weights_to_halve(model) else None
        self._parameters = [p for group in trainer.optimizer.param_groups for p in group["params"]]
        self._run_forward = compiler(self._forward) if compiler is not None else self._forward
        self.input = BatchInput(forward_pass.precision.device)
        make_capturable(trainer.optimizer, forward_pass.precision.device, scaler)

    def __call__(self) -> None:
        """Make a step."""
        for parameter in self._parameters:
            parameter.grad = None
        if self._half_weights is not None:
            self._half_weights.clear_gradients()
        loss, sums = self._run_forward()
        if self._average is not None:
            self._average.update()
        (loss if self._scaler is None else self._scaler.scaled(loss)).backward()
        if self._half_weights is not None:
            self._half_weights.convert_gradients()
        if self._scaler is not None:
            self._scaler.unscale([p.grad for p in self._parameters if p.grad is not None])
        self._trainer.update()
        if self._scaler is not None:
            self._scaler.update()
        if self._half_weights is not None:
            self._half_weights.renew()
        self._forward_pass.sums.add_(sums)

    def stop_compiling(self) -> None:
        """Use the kernels of torch instead of compiled ones."""
        self._run_forward = self._forward

    def _forward(self) -> tuple[Tensor, Tensor]:
        images, labels = self.input.read()
        return self._forward_pass.run(images, labels, self._call_model)

    def _call_model(self, images: Tensor) -> Tensor:
        if self._half_weights is None:
            output: Tensor = self._forward_pass.model(images)
        else:
            output = functional_call(self._forward_pass.model, self._half_weights.copies, (images,))
        return output


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
        self._forward_pass = forward_pass
        self._trainer = trainer
        self._compiled = compiled
        self._body = StepBody(forward_pass, trainer, scaler, torch.compile if compiled else None, average)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._num_warm_up = 0
        self._stream = torch.cuda.Stream(forward_pass.precision.device)

    def batches(self, loader: Batches) -> Iterator[Batch | None]:
        """Yield the rest of an epoch: batches, or None for each batch of a loader on the device."""
        return self._body.input.batches(loader)

    def step(self, batch: Batch | None) -> None:
        """Make one step; `batch` is None if the loader is on the device."""
        if batch is not None:
            self._body.input.copy_in(batch)
        if self._graph is None:
            self._warm_up()
        else:
            self._graph.replay()
        self._trainer.count(self._forward_pass.batch_size)

    def close(self) -> None:
        """Do nothing: the graph is freed with this object."""

    def _warm_up(self) -> None:
        """Make one of the first steps without a graph; after the last of them, capture the graph."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            self._first_step() if not self._num_warm_up else self._body()
        current.wait_stream(self._stream)
        self._num_warm_up += 1
        if self._num_warm_up == WARM_UP_STEPS:
            torch.cuda.synchronize()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._body()

    def _first_step(self) -> None:
        """Make the first step, which compiles. If compiling fails, training continues without it."""
        try:
            self._body()
        except Exception as error:  # Inductor raises any exception of its parts
            if not self._compiled:
                raise
            log.warning("engine graph instead of compile: %s: %s", type(error).__name__, str(error).splitlines()[0])
            self._body.stop_compiling()
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
    if not isinstance(optimizer, FUSED) and "capturable" not in optimizer.param_groups[0]:
        return f"{name} runs host code between its kernels"
    if half is torch.float16 and not isinstance(optimizer, FUSED):
        return f"with float16, {name} reads on the host whether gradients overflowed"
    return None


def set_learning_rate(optimizer: Optimizer, rate: float) -> None:
    """Set the learning rate: a number on the host, or a tensor on the device if steps are captured."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
