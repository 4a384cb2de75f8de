"""The part of a captured step that Inductor can compile: batch, forward pass, loss and metrics.

`WholeForward` is one function, for steps that are captured whole. `ForwardInRegions` consists of several, for steps
whose gradients are sent while backward is still running (`trainer.regions`). `use` changes the compiler between two
steps. `compile_child` compiles the same classes in another process, so that this process finds the kernels in the
cache.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.func import functional_call

from echelon.data.loading.device import DeviceMemoryLoader
from echelon.data.loading.loader import Batches
from echelon.errors import EchelonError
from echelon.train.step.eager import Batch, ForwardPass
from echelon.train.step.precision import HalfWeights, weights_to_halve
from echelon.train.trainer.regions import in_regions

log = logging.getLogger(__name__)

Compiler: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]
T = TypeVar("T")


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


def no_compiler(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function itself: its kernels are those of torch."""
    return function


class Forward:
    """The base class of both forms."""

    def __init__(self, forward_pass: ForwardPass) -> None:
        self.forward_pass = forward_pass
        self.input = BatchInput(forward_pass.precision.device)
        self.compiled = False

    def use(self, compiler: Compiler | None) -> None:
        """Compile with `compiler` from the next call on, or not at all."""
        self.compiled = compiler is not None
        self._compile(compiler or no_compiler)

    def gather(self) -> None:
        """Get the next batch, if that is a function of its own."""

    def __call__(self) -> tuple[Tensor, Tensor]:
        """Return the loss and the metric sums of the batch."""
        raise NotImplementedError

    def _compile(self, compiler: Compiler) -> None:
        raise NotImplementedError

    def changed_state(self) -> list[Tensor]:
        """Return the tensors that a forward pass changes: the model's buffers, and the position in the data."""
        position = [self.input.loader.cursor] if self.input.loader is not None else []
        return [*self.forward_pass.model.buffers(), *position]

    def run_first(self, part: Callable[[], T]) -> T:
        """Run a part of the first compiled step. If compiling fails, undo what it did and run it uncompiled."""
        state = self.changed_state()
        before = [tensor.clone() for tensor in state]
        try:
            return part()
        except (torch.OutOfMemoryError, EchelonError):
            raise
        except Exception as error:  # Inductor raises any exception of its parts
            reason = (str(error).splitlines() or [""])[0]
            log.warning("engine graph instead of compile: %s: %s", type(error).__name__, reason)
            for tensor, kept in zip(state, before, strict=True):
                tensor.copy_(kept)
            self.use(None)
            return part()


class WholeForward(Forward):
    """Batch, network, loss and metrics as one function."""

    def __init__(self, forward_pass: ForwardPass) -> None:
        super().__init__(forward_pass)
        model, half = forward_pass.model, forward_pass.precision.half
        self.half_weights = HalfWeights(model, half) if half is not None and weights_to_halve(model) else None
        self._run: Callable[[], tuple[Tensor, Tensor]] = self._forward

    def __call__(self) -> tuple[Tensor, Tensor]:
        """Return the loss and the metric sums of the next batch."""
        return self._run()

    def _compile(self, compiler: Compiler) -> None:
        self._run = compiler(self._forward)

    def _forward(self) -> tuple[Tensor, Tensor]:
        images, labels = self.input.read()
        return self.forward_pass.run(images, labels, self._call_model)

    def _call_model(self, images: Tensor) -> Tensor:
        if self.half_weights is None:
            output: Tensor = self.forward_pass.model(images)
        else:
            output = functional_call(self.forward_pass.model, self.half_weights.copies, (images,))
        return output


class ForwardInRegions(Forward):
    """The batch, each region of the network, and loss and metrics: one function each."""

    def __init__(self, forward_pass: ForwardPass) -> None:
        super().__init__(forward_pass)
        model, half = forward_pass.model, forward_pass.precision.half
        self._copies = HalfWeights(model, half).copies if half is not None else {}
        self.leaves: dict[str, Tensor] = dict(model.named_parameters()) | self._copies
        self._batch: Batch | None = None
        self._gather: Callable[[], Batch] | None = None
        self._compile(no_compiler)

    def gather(self) -> None:
        """Get the next batch: the part that needs no weights."""
        if self.input.loader is None:
            self._batch = self.input.buffer
            return
        if self._gather is None:
            self._gather = self._compiler(self.input.loader.gather)
        self._batch = self._gather()

    def __call__(self) -> tuple[Tensor, Tensor]:
        """Return the loss and the metric sums of the batch."""
        assert self._batch is not None
        images, labels = self._batch
        with self.forward_pass.precision.autocast():
            logits = self._network(images)
        loss, sums = self._loss_and_metrics(logits, labels)
        return loss, sums

    def _compile(self, compiler: Compiler) -> None:
        self._compiler = compiler
        self._network = in_regions(self.forward_pass.model, self._copies, compiler)
        self._loss_and_metrics = compiler(self.forward_pass.loss_and_metrics)
        self._gather = None  # the loader is known in the first epoch
