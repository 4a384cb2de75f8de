"""`--monitor N`: the size of every tensor in each N-th batch, in MXNet's form.

A tensor's size is its norm over the root of its number of elements, so that tensors of any shape compare. Outputs of
modules are seen by forward hooks that exist only while a monitored batch runs: the other batches cost nothing. The
values are computed on the device and fetched at the end in one piece. The modules must run as written: inside a
compiled or captured step there is no module to hook into.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from echelon.errors import UsageError

Hook = Callable[[nn.Module, object, object], None]


class Monitor:
    """Around a batch: `begin()` before its forward pass, `end()` after its update. Batches count from 1."""

    def __init__(self, model: nn.Module, every: int) -> None:
        if every < 1:
            raise UsageError(f"--monitor {every}: give a number of 1 or more, or 0 for no monitor")
        self._model = model
        self._every = every
        self._batch = 0
        self._hooks: list[RemovableHandle] = []
        self._seen: list[tuple[str, Tensor]] = []

    def begin(self) -> bool:
        """A batch begins. Whether it is one of those that are monitored: the first, and each N-th after it."""
        self._forget()  # what a batch that failed has left
        self._batch += 1
        if (self._batch - 1) % self._every:
            return False
        for name, module in self._model.named_modules():
            self._hooks.append(module.register_forward_hook(self._hook(f"{name}.output" if name else "output")))
        return True

    def end(self) -> list[str]:
        """The lines about this batch, none if it is not monitored: outputs as they came, parameters, buffers.

        Of a monitored batch, this is where the device is waited for.
        """
        if not self._hooks:
            return []
        for name, tensor in (*self._model.named_parameters(), *self._model.named_buffers()):
            self._note(name, tensor)
        values = torch.stack([value for _, value in self._seen]).tolist() if self._seen else []
        lines = [monitor_line(self._batch, name, value) for (name, _), value in zip(self._seen, values, strict=True)]
        self._forget()
        return lines

    def _hook(self, name: str) -> Hook:
        def note(module: nn.Module, inputs: object, output: object) -> None:
            for part, tensor in _tensors(output, name):
                self._note(part, tensor)

        return note

    def _note(self, name: str, tensor: Tensor) -> None:
        self._seen.append((name, size_of(tensor)))

    def _forget(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._seen.clear()


def size_of(tensor: Tensor) -> Tensor:
    """The norm over the root of the number of elements, in float32; 0 for none."""
    size: Tensor = torch.linalg.vector_norm(tensor.detach().float()) / math.sqrt(max(tensor.numel(), 1))
    return size


def monitor_line(batch: int, name: str, value: float) -> str:
    """MXNet's line about one tensor."""
    return f"Batch: {batch:7d} {name:30s} {value:.8g}"


def _tensors(output: object, name: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors a module returned: several are numbered."""
    if isinstance(output, Tensor):
        yield name, output
    elif isinstance(output, tuple | list):
        for index, part in enumerate(output):
            yield from _tensors(part, f"{name}.{index}")
