"""The KVStore: what a worker calls, be it servers (`server_store.py`), collectives (`collective.py`) or both behind it.

    kv = echelon.kvstore.create("dist_sync")
    kv.init("w", torch.zeros(3))
    kv.set_optimizer("sgd", lr=0.1)
    kv.push("w", gradient)          # summed over workers; with an optimizer the sum is the gradient, without, the value
    kv.pull("w", out=weights)       # waits as the scheme says

This module owns the calls and their checks: a mistake is an error on the worker that makes it, before anything moves.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch import Tensor
from torch.optim import Optimizer

from echelon.cluster.messages import OptimizerSpec
from echelon.cluster.placement import KeySpec
from echelon.errors import UsageError
from echelon.kvstore.arguments import (
    Key,
    Keys,
    Values,
    as_keys,
    as_values,
    dtype_name,
    is_finite,
    reduced,
    spec_of_value,
)
from echelon.kvstore.optimizer_spec import spec_by_name, spec_of
from echelon.observe.events import EventLog
from echelon.server.optimization import INTEGER_KEY

CLOSED = "this store is closed, and nothing can be asked of it any more; close it after the last call"


class KVStore(ABC):
    """Made by `echelon.kvstore.create`."""

    def __init__(self, name: str, events: EventLog, *, check_finite: bool, sums_replace: bool) -> None:
        self.type = name
        self.events = events
        self.optimizer_spec: OptimizerSpec | None = None
        self._closed = False
        self._check_finite = check_finite
        self._sums_replace = sums_replace  # a push without an optimizer: its sum is the new value

    # --- who and where

    @property
    @abstractmethod
    def rank(self) -> int:
        """This worker's number."""

    @property
    def worker_rank(self) -> int:
        """The number of the worker in the scheme: `rank`, but for a worker of several devices with servers."""
        return self.rank

    @property
    @abstractmethod
    def workers(self) -> list[int]:
        """The ranks that live, in order."""

    @property
    def num_workers(self) -> int:
        """How many workers live."""
        return len(self.workers)

    @property
    @abstractmethod
    def halted(self) -> str | None:
        """Why a worker asked everybody to stop training, or None."""

    # --- the classic calls

    def init(self, key: Keys, value: Values) -> None:
        """Make keys known, with rank 0's values; all workers call it, and it returns when all have."""
        self._check_open()
        names = as_keys(key)
        values = [tensors[0].detach() for tensors in as_values(key, value)]
        self._check_names(names)
        for name in names:
            if self._find(name) is not None:
                raise UsageError(f"worker {self.rank}: key {name!r} is initialised already")
        specs = [spec_of_value(name, tensor) for name, tensor in zip(names, values, strict=True)]
        self._init(specs, values)

    @abstractmethod
    def push(self, key: Keys, value: Values, priority: int = 0) -> None:
        """Send values on their way."""

    @abstractmethod
    def pull(self, key: Keys, out: Values, priority: int = 0) -> None:
        """Wait until the scheme lets this worker go on, then copy the weights into `out` (every tensor of a list)."""

    @abstractmethod
    def pushpull(self, key: Keys, value: Values, out: Values | None = None, priority: int = 0) -> None:
        """Push and pull in one; without `out`, the weights replace the pushed values."""

    def broadcast(self, key: Keys, value: Values, out: Values, priority: int = 0) -> None:
        """`init`, then `pull`: afterwards every worker has rank 0's values."""
        self.init(key, value)
        self.pull(key, out, priority)

    def set_optimizer(self, optimizer: str | Optimizer, **settings: Any) -> None:
        """Update the stored values by an optimizer: by name with torch.optim's settings, or as an instance has them."""
        if isinstance(optimizer, Optimizer):
            if settings:
                raise UsageError("settings go with an optimizer's name; an instance has its own")
            if (groups := len(optimizer.param_groups)) > 1:
                raise UsageError(f"which keys are in which of {groups} parameter groups? Only the Trainer knows that")
            spec = spec_of(optimizer, {})
        else:
            spec = spec_by_name(optimizer, settings)
        self.use_optimizer(spec)

    def use_optimizer(self, spec: OptimizerSpec) -> None:
        """Update the stored values by this optimizer."""
        self._check_open()
        self._use_optimizer(spec)

    def retire(self) -> None:
        """Push no more: from now on nobody waits for this worker, which may still pull and meet the others."""
        self._check_open()
        self._retire()

    def barrier(self) -> None:
        """Wait until all living workers are here."""
        self._check_open()
        self._barrier()

    def halt(self, reason: str) -> None:
        """Ask every worker to stop training (`halted` tells)."""
        self._check_open()
        self._halt(reason)

    @abstractmethod
    def save_optimizer_states(self, path: str | Path) -> None:
        """Write the optimizer's state to a safetensors file, whole or not at all."""

    @abstractmethod
    def load_optimizer_states(self, path: str | Path) -> None:
        """Take up the state that `save_optimizer_states` wrote."""

    @abstractmethod
    def close(self) -> None:
        """Wait for what is under way, say goodbye, let go. Harmless when done twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- what a kind of store has to say

    @abstractmethod
    def _names(self) -> Iterable[Key]:
        """The keys that there are."""

    @abstractmethod
    def _find(self, key: Key) -> KeySpec | None:
        """What a key is, if it is known."""

    @abstractmethod
    def _init(self, specs: Sequence[KeySpec], values: Sequence[Tensor]) -> None:
        """Take up keys that are new, and wait for all workers."""

    @abstractmethod
    def _use_optimizer(self, spec: OptimizerSpec) -> None:
        """Update by this optimizer from now on."""

    @abstractmethod
    def _retire(self) -> None:
        """Push no more."""

    @abstractmethod
    def _barrier(self) -> None:
        """Wait for all living workers."""

    @abstractmethod
    def _halt(self, reason: str) -> None:
        """Ask every worker to stop training."""

    # --- checks

    def _checked(self, key: Keys, value: Values) -> list[Tensor]:
        """What is pushed for each key: summed over this worker's devices, and of the right kind."""
        if self.optimizer_spec is None and not self._sums_replace:
            raise UsageError(
                f"worker {self.rank}: {self.type} needs an optimizer on the servers: call set_optimizer, on every "
                "worker, before push"
            )
        values = []
        for spec, tensors in zip(self._specs(key), as_values(key, value), strict=True):
            for tensor in tensors:
                self._check_fit(spec, tensor, "pushed")
            if self.optimizer_spec is not None and not tensors[0].is_floating_point():
                raise UsageError(f"worker {self.rank}: key {spec.name!r} is {spec}: {INTEGER_KEY}")
            total = reduced(tensors)
            if self._check_finite and not is_finite(total):
                raise UsageError(
                    f"worker {self.rank}: the value pushed for key {spec.name!r} has NaN or infinity in it"
                )
            values.append(total)
        return values

    def _targets(self, key: Keys, out: Values) -> list[list[Tensor]]:
        """Where each key's weights are to be copied."""
        outs = as_values(key, out)
        for spec, tensors in zip(self._specs(key), outs, strict=True):
            for tensor in tensors:
                self._check_fit(spec, tensor, "given for out")
        return outs

    def _check_fit(self, spec: KeySpec, tensor: Tensor, what: str) -> None:
        if (tuple(tensor.shape), dtype_name(tensor)) != (spec.shape, spec.dtype):
            given = spec_of_value(spec.name, tensor)
            raise UsageError(f"worker {self.rank}: key {spec.name!r} is {spec}, but {given} was {what}")

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError(f"worker {self.rank}: {CLOSED}")

    def _specs(self, key: Keys) -> list[KeySpec]:
        self._check_open()
        names = as_keys(key)
        if not names or len(set(names)) < len(names):
            raise UsageError(f"worker {self.rank}: a call must name keys, each once, not {names!r}")
        return [self._spec_of(name) for name in names]

    def _spec_of(self, key: Key) -> KeySpec:
        spec = self._find(key)
        if spec is None:
            self._check_names([key])
            raise UsageError(f"worker {self.rank}: key {key!r} is not initialised; call init before push or pull")
        return spec

    def _check_names(self, names: Sequence[Key]) -> None:
        """Ints or strings, not both: 3 and '3' would be two keys."""
        kinds: set[type] = {type(name) for name in itertools.islice(self._names(), 1)}
        for name in names:
            if not isinstance(name, str | int) or isinstance(name, bool):
                raise UsageError(f"a key must be a string or an int, not {name!r}")
            kinds.add(type(name))
        if len(kinds) > 1:
            raise UsageError(
                f"worker {self.rank}: keys of one store are all ints or all strings; {names[0]!r} mixes them"
            )
        if len(set(names)) != len(names):
            raise UsageError(f"worker {self.rank}: a key stands twice in {names!r}")

    def _optimizer(self) -> OptimizerSpec:
        self._check_open()
        if self.optimizer_spec is None:
            raise UsageError(f"worker {self.rank}: there is no optimizer on the servers; call set_optimizer first")
        return self.optimizer_spec
