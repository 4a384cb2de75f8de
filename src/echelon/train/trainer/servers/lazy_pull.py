"""`Trainer(lazy_pull=True)`: `step` does not wait for new weights; the next forward pass does, module by module.

The first layers are needed first, and the others arrive while they compute. In exchange, weights must be read through
the model: each module waits for its own parameters when it is called, and `state_dict()` of the model waits for all.
Anything else (a sub-module's `state_dict()`, a copy, an average, a weight that is read before its module runs) sees old
weights unless `trainer.sync()` was called. `torch.compile` divides its graph at every module that waits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from echelon.train.trainer.model_hook import ModelHook
from echelon.train.trainer.servers.bucket import Bucket

Wait = Callable[[Bucket], None]


class LazyPull:
    """Waits for the weights of each module before it runs. `wait(bucket)` waits if they are on the way."""

    def __init__(self, model: nn.Module, names: Mapping[int, str], bucket_of: Mapping[str, Bucket], wait: Wait) -> None:
        """`names` maps id(parameter) to the parameter's name."""
        self._called: set[str] = set()  # parameters whose module was called since the last step
        self._wait = wait
        self._bucket_of = bucket_of
        self._read_early: dict[int, Bucket] = {}  # buckets with a parameter that is read without a call of its module
        self.hooks: list[Any] = []
        for module in model.modules():
            own = [names[id(p)] for p in module.parameters(recurse=False) if id(p) in names]
            if own:
                hook = self._make_hook(module, own)
                self.hooks.append(module.register_forward_pre_hook(hook, prepend=True))

    def before_forward(self) -> None:
        """Wait for weights that earlier steps read without a call of their module."""
        for bucket in self._read_early.values():
            self._wait(bucket)

    def note_gradient(self, name: str) -> None:
        """Note that weights were read. If their module was not called, wait earlier from now on."""
        if name not in self._called:  # for example nn.MultiheadAttention's out_proj
            bucket = self._bucket_of[name]
            self._read_early[bucket.index] = bucket

    def end_step(self) -> None:
        """Begin a new step."""
        self._called.clear()

    def _make_hook(self, module: nn.Module, names: Sequence[str]) -> ModelHook:
        buckets = list({self._bucket_of[name].index: self._bucket_of[name] for name in names}.values())

        def wait(*_: object) -> None:
            self._called.update(names)
            for bucket in buckets:
                self._wait(bucket)

        return ModelHook(module, wait)
