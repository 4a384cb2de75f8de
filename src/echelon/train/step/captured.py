"""A whole training step as one CUDA graph: data, forward, backward, update and measurements, without host work.

A step of a small network is hundreds of kernels of a few microseconds, and launching them one by one takes longer than
running them; a replayed graph launches them all at once. Compiled by Inductor before it is captured, kernels are fewer,
too.

The first steps of the run are done as they are (they tune convolutions, compile, and make the optimizer's states), then
one is captured; all of them train. What changes from step to step lives on the device: the cursor into the data (or the
memory a batch is copied to), the learning rate, the loss scale, the sums of the measurements.

In half precision the weights of convolutions and matrix products have half copies, renewed in one go after the update;
autocast would cast each of them by itself, and each of their gradients back.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import SGD, Adam, AdamW, Optimizer

from echelon.data.loading.loader import Batches
from echelon.train.step.average import MovingAverage
from echelon.train.step.eager import Batch, Updates, Work
from echelon.train.step.precision import LossScaler

log = logging.getLogger(__name__)

Compiler: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]
WARM_STEPS = 3
FUSED = (SGD, Adam, AdamW)  # one kernel updates all parameters, and does nothing if gradients overflowed


@runtime_checkable
class OnDevice(Protocol):
    """A loader whose batches come into being on the device."""

    def begin(self) -> int:
        """Begin what is left of an epoch; returns its batches."""

    def gather(self) -> tuple[Tensor, Tensor]:
        """The next batch, without host work."""

    def advance(self) -> int:
        """Count a batch."""


def halved_weights(model: nn.Module) -> dict[str, Tensor]:
    """The weights that autocast would cast, by name.

    Not those with several names (tied ones, and those of a module that is used twice): each is one parameter, and its
    gradient is the sum over all uses. Autocast sees to them.
    """
    kinds = (nn.Linear, nn.modules.conv._ConvNd)
    owners = {name: module for name, module in model.named_modules() if isinstance(module, kinds)}
    found = {f"{name}.weight" if name else "weight": module.weight for name, module in owners.items()}
    names = Counter(id(weight) for _, weight in model.named_parameters(remove_duplicate=False))
    return {name: weight for name, weight in found.items() if weight.requires_grad and names[id(weight)] == 1}


class HalfWeights:
    """Half copies of the weights that autocast would cast, and the way of their gradients back."""

    def __init__(self, model: nn.Module, half: torch.dtype) -> None:
        self._full = halved_weights(model)
        self.copies = {name: w.detach().to(half).requires_grad_() for name, w in self._full.items()}

    def clear(self) -> None:
        """Before backward."""
        for copy in self.copies.values():
            copy.grad = None

    def hand_over(self) -> None:
        """After backward: the copies' gradients become the weights', in float32; what was not used has none."""
        halves = {name: copy.grad for name, copy in self.copies.items() if copy.grad is not None}
        gradients = [torch.empty_like(self._full[name]) for name in halves]
        torch._foreach_copy_(gradients, list(halves.values()))
        for name, gradient in zip(halves, gradients, strict=True):
            self._full[name].grad = gradient

    def renew(self) -> None:
        """After the update."""
        torch._foreach_copy_(
            [copy.detach() for copy in self.copies.values()], [w.detach() for w in self._full.values()]
        )


class Fed(Protocol):
    """What runs on batches: from a loader on the device, or from memory that batches are copied to."""

    source: OnDevice | None
    input: Batch | None


def next_batches(body: Fed, loader: Batches) -> Iterator[Batch | None]:
    """The rest of an epoch: batches to bring, or, where the data is on the device, as many times nothing."""
    if not isinstance(loader, OnDevice):
        yield from loader
        return
    body.source = loader
    for _ in range(loader.begin()):
        loader.advance()
        yield None


def bring(body: Fed, batch: Batch, last: Tensor | None, device: torch.device) -> Tensor:
    """Copy a batch to where the body reads it, unless it is the one that is there; returns its images."""
    if body.input is None:
        images = batch[0].to(device, memory_format=torch.channels_last, copy=True)
        body.input = images, batch[1].to(device, copy=True)
    elif batch[0] is not last:  # synthetic data is one batch for ever
        body.input[0].copy_(batch[0], non_blocking=True)
        body.input[1].copy_(batch[1], non_blocking=True)
    return batch[0]


class WholeStep:
    """Data, forward, backward, update and measurements as one function without host work; runs on any device."""

    def __init__(
        self,
        work: Work,
        updates: Updates,
        scaler: LossScaler | None,
        compiler: Compiler | None = None,
        average: MovingAverage | None = None,
    ) -> None:
        self._work = work
        self._average = average
        self._updates = updates
        self._scaler = scaler
        half = work.precision.half
        self._halves = HalfWeights(work.model, half) if half is not None and halved_weights(work.model) else None
        self._parameters = [p for group in updates.optimizer.param_groups for p in group["params"]]
        self._plain = self._measured
        self._forward = compiler(self._measured) if compiler is not None else self._measured
        self.source: OnDevice | None = None
        self.input: Batch | None = None
        make_capturable(updates.optimizer, work.precision.device, scaler)

    def __call__(self) -> None:
        """Take a step."""
        for parameter in self._parameters:
            parameter.grad = None
        if self._halves is not None:
            self._halves.clear()
        loss, sums = self._forward()
        if self._average is not None:
            self._average.update()
        (loss if self._scaler is None else self._scaler.scaled(loss)).backward()
        if self._halves is not None:
            self._halves.hand_over()
        if self._scaler is not None:
            self._scaler.unscale([p.grad for p in self._parameters if p.grad is not None])
        self._updates.update()
        if self._scaler is not None:
            self._scaler.update()
        if self._halves is not None:
            self._halves.renew()
        self._work.sums.add_(sums)

    def do_without_compiling(self) -> None:
        """Use the kernels as they are."""
        self._forward = self._plain

    def _measured(self) -> tuple[Tensor, Tensor]:
        if self.source is not None:
            images, labels = self.source.gather()
        else:
            assert self.input is not None
            images, labels = self.input
        return self._work.run(images, labels, self._call)

    def _call(self, images: Tensor) -> Tensor:
        if self._halves is None:
            output: Tensor = self._work.model(images)
        else:
            output = functional_call(self._work.model, self._halves.copies, (images,))
        return output


class CapturedStep:
    """Runs steps as replays of a graph. `compiled`: Inductor makes the kernels."""

    def __init__(
        self,
        work: Work,
        updates: Updates,
        scaler: LossScaler | None,
        *,
        compiled: bool,
        average: MovingAverage | None = None,
    ) -> None:
        self.work = work
        self._updates = updates
        self._compiled = compiled
        self._whole = WholeStep(work, updates, scaler, torch.compile if compiled else None, average)
        self._last: Tensor | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._num_warm = 0
        self._stream = torch.cuda.Stream(work.precision.device)  # type: ignore[no-untyped-call]

    def batches(self, loader: Batches) -> Iterator[Batch | None]:
        """The rest of an epoch: batches to copy in, or, where the data is on the device, as many times nothing."""
        return next_batches(self._whole, loader)

    def step(self, batch: Batch | None) -> None:
        """One step; `batch` is None where the loader is on the device."""
        if batch is not None:
            self._last = bring(self._whole, batch, self._last, self.work.precision.device)
        if self._graph is None:
            self._warm()
        else:
            self._graph.replay()
        self._updates.count(self.work.batch_size)

    def _warm(self) -> None:
        """One of the first steps, done as it is; after the last of them the next one is captured."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            self._first() if not self._num_warm else self._whole()
        current.wait_stream(self._stream)
        self._num_warm += 1
        if self._num_warm == WARM_STEPS:
            torch.cuda.synchronize()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._whole()

    def _first(self) -> None:
        """Compiling happens here; where it fails, training goes on without."""
        if not self._compiled:
            self._whole()
            return
        try:
            self._whole()
        except Exception as error:  # Inductor raises what its parts raise
            log.warning("engine graph instead of compile: %s: %s", type(error).__name__, str(error).splitlines()[0])
            self._whole.do_without_compiling()
            self._whole()


def make_capturable(optimizer: Optimizer, device: torch.device, scaler: LossScaler | None) -> None:
    """Let an optimizer take its rate from the device, keep its counters there, and leave out steps that overflowed."""
    for group in optimizer.param_groups:
        group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32).to(device)
        if isinstance(optimizer, FUSED):
            group["fused"] = True
        if "capturable" in group:
            group["capturable"] = True
        if isinstance(optimizer, SGD) and group["momentum"]:
            # Made by the first step, they would hold what the memory held if that step overflows and is left out.
            for parameter in group["params"]:
                optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))
    if scaler is not None:
        optimizer.found_inf = scaler.found_inf  # type: ignore[attr-defined]
        optimizer.grad_scale = None  # type: ignore[attr-defined]


def why_not_captured(optimizer: Optimizer, half: torch.dtype | None) -> str | None:
    """What about an optimizer keeps a step from being captured, or None."""
    name = type(optimizer).__name__
    if not isinstance(optimizer, FUSED) and "capturable" not in optimizer.param_groups[0]:
        return f"{name} works on the host between kernels"
    if half is torch.float16 and not isinstance(optimizer, FUSED):
        return f"with float16, {name} asks the host whether gradients overflowed"
    return None
