"""`--monitor N`: the size of every tensor in each N-th batch, in MXNet's format.

The size of a tensor is its norm divided by the root of its number of elements, so that tensors of any shape can be
compared. Forward hooks record the outputs of modules; they exist only while a monitored batch runs, so other batches
have no overhead. The values are computed on the device and copied to the host together at the end. Hooks need eager
execution: a compiled or captured step does not call them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

Hook = Callable[[nn.Module, object, object], None]


class Monitor:
    """Call `begin()` before the forward pass of every batch and `end()` after its update. Batches count from 1."""

    def __init__(self, model: nn.Module, every: int) -> None:
        self._model = model
        self._every = every
        self._batch = 0
        self._hooks: list[RemovableHandle] = []
        self._seen: list[tuple[str, Tensor]] = []

    def begin(self) -> bool:
        """Start a batch; returns whether it is monitored: the first one, and each N-th after it."""
        self._clear()  # left over if the previous batch failed
        self._batch += 1
        if (self._batch - 1) % self._every:
            return False
        for name, module in self._model.named_modules():
            self._hooks.append(module.register_forward_hook(self._hook(f"{name}.output" if name else "output")))
        return True

    def end(self) -> list[str]:
        """Return the lines about this batch: outputs in order of execution, parameters, buffers.

        Returns no lines if the batch is not monitored; otherwise it waits for the device.
        """
        if not self._hooks:
            return []
        for name, tensor in (*self._model.named_parameters(), *self._model.named_buffers()):
            self._record(name, tensor)
        values = torch.stack([value for _, value in self._seen]).tolist() if self._seen else []
        lines = [monitor_line(self._batch, name, value) for (name, _), value in zip(self._seen, values, strict=True)]
        self._clear()
        return lines

    def _hook(self, name: str) -> Hook:
        def record(module: nn.Module, inputs: object, output: object) -> None:
            for part, tensor in _tensors(output, name):
                self._record(part, tensor)

        return record

    def _record(self, name: str, tensor: Tensor) -> None:
        self._seen.append((name, size_of(tensor)))

    def _clear(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._seen.clear()


def size_of(tensor: Tensor) -> Tensor:
    """Return the norm divided by the root of the number of elements, in float32; 0 for an empty tensor."""
    size: Tensor = torch.linalg.vector_norm(tensor.detach().float()) / math.sqrt(max(tensor.numel(), 1))
    return size


def monitor_line(batch: int, name: str, value: float) -> str:
    """Return MXNet's line about one tensor."""
    return f"Batch: {batch:7d} {name:30s} {value:.8g}"


def _tensors(output: object, name: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that a module returned; several are numbered."""
    if isinstance(output, Tensor):
        yield name, output
    elif isinstance(output, tuple | list):
        for index, part in enumerate(output):
            yield from _tensors(part, f"{name}.{index}")
