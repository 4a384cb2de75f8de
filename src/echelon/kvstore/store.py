"""The KVStore: the calls of a worker, whether servers (`servers/`), collectives (`collective/`) or both execute them.

    kv = echelon.kvstore.create("dist_sync")
    kv.init("w", torch.zeros(3))
    kv.set_optimizer("sgd", lr=0.1)
    kv.push("w", gradient)          # summed over workers; with an optimizer the sum is the gradient, without, the value
    kv.pull("w", out=weights)       # waits as the scheme requires

This module owns the calls and their checks: a mistake raises an error on the worker that makes it, before any data is
sent. Callers give one key or many; stores use a list of keys and a list of tensors, one per device, for each key.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.optim import Optimizer

from echelon.cluster.messages import OptimizerSpec
from echelon.cluster.placement import KeySpec
from echelon.errors import UsageError
from echelon.kvstore.optimizer_spec import spec_by_name, spec_of
from echelon.observe.events import EventLog
from echelon.schemes.stores import store_kind
from echelon.server.optimization import INTEGER_KEY

Key = str | int
Keys = Key | Sequence[Key]
Value = Tensor | Sequence[Tensor]
Values = Value | Sequence[Value]

CLOSED = "this store is closed; close it after the last call"


class KVStore(ABC):
    """The base class of all stores, which `echelon.kvstore.create` returns."""

    def __init__(self, name: str, events: EventLog, *, check_finite: bool) -> None:
        self.type = name.lower()
        self.kind = store_kind(name)
        self.events = events
        self.on_closed: Callable[[], None] = lambda: None
        self.optimizer_spec: OptimizerSpec | None = None
        self._specs_by_key: dict[Key, KeySpec] = {}
        self._halted: str | None = None
        self._closed = False
        self._check_finite = check_finite

    # --- ranks and workers

    @property
    @abstractmethod
    def rank(self) -> int:
        """This worker's rank."""

    @property
    def worker_rank(self) -> int:
        """The worker's rank in the scheme. It differs from `rank` if a worker has servers and several devices."""
        return self.rank

    @property
    @abstractmethod
    def workers(self) -> list[int]:
        """The ranks of the living workers, in order."""

    @property
    def num_workers(self) -> int:
        """The number of living workers."""
        return len(self.workers)

    @property
    def halted(self) -> str | None:
        """The reason why a worker asked all workers to stop training, or None."""
        return self._halted

    # --- the classic calls

    def init(self, key: Keys, value: Values) -> None:
        """Add keys with rank 0's values. All workers call this, and it returns when all have called it."""
        self._check_open()
        names = as_keys(key)
        values = [tensors[0].detach() for tensors in as_values(key, value)]
        self._check_names(names)
        for name in names:
            if name in self._specs_by_key:
                raise UsageError(f"worker {self.rank}: key {name!r} is already initialised")
        specs = [spec_of_value(name, tensor) for name, tensor in zip(names, values, strict=True)]
        self._init(specs, values)
        self._specs_by_key |= dict(zip(names, specs, strict=True))

    @abstractmethod
    def push(self, key: Keys, value: Values, priority: int = 0) -> None:
        """Send values to be summed over all workers."""

    @abstractmethod
    def pull(self, key: Keys, out: Values, priority: int = 0) -> None:
        """Wait until the scheme answers, then copy the weights into `out` (into every tensor of a list)."""

    def pushpull(self, key: Keys, value: Values, out: Values | None = None, priority: int = 0) -> None:
        """Push, then pull. Without `out`, the weights replace the pushed values."""
        target = value if out is None else out
        self._targets(key, target)  # raises before anything is pushed
        self.push(key, value, priority)
        self.pull(key, target, priority)

    def broadcast(self, key: Keys, value: Values, out: Values, priority: int = 0) -> None:
        """Call `init`, then `pull`, so that every worker has rank 0's values."""
        self.init(key, value)
        self.pull(key, out, priority)

    def set_optimizer(self, optimizer: str | Optimizer, **settings: Any) -> None:
        """Update the stored values with an optimizer: a name and torch.optim's settings, or an instance."""
        if isinstance(optimizer, Optimizer):
            if settings:
                raise UsageError("an optimizer instance has its own settings; give settings only with a name")
            if (groups := len(optimizer.param_groups)) > 1:
                raise UsageError(
                    f"the optimizer has {groups} parameter groups, but a store cannot assign keys to them; use Trainer"
                )
            spec = spec_of(optimizer, {})
        else:
            spec = spec_by_name(optimizer, settings)
        self.use_optimizer(spec)

    def use_optimizer(self, spec: OptimizerSpec) -> None:
        """Update the stored values with this optimizer."""
        self._check_open()
        self._use_optimizer(spec)

    def retire(self) -> None:
        """Stop pushing: other workers no longer wait for this one. It may still call `pull` and `barrier`."""
        self._check_open()
        self._retire()

    def barrier(self) -> None:
        """Wait until all living workers have called this."""
        self._check_open()
        self._barrier()

    def halt(self, reason: str) -> None:
        """Ask all workers to stop training. `halted` then gives the reason."""
        self._check_open()
        self._halt(reason)

    @abstractmethod
    def save_optimizer_states(self, path: str | Path) -> None:
        """Write the optimizer state to a safetensors file, completely or not at all."""

    @abstractmethod
    def load_optimizer_states(self, path: str | Path) -> None:
        """Restore the optimizer state that `save_optimizer_states` wrote."""

    @abstractmethod
    def close(self) -> None:
        """Wait for requests in flight and leave the job. A second call does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- implemented by each kind of store

    @abstractmethod
    def _init(self, specs: Sequence[KeySpec], values: Sequence[Tensor]) -> None:
        """Add new keys, and wait for all workers."""

    @abstractmethod
    def _use_optimizer(self, spec: OptimizerSpec) -> None:
        """Update the stored values with this optimizer from now on."""

    @abstractmethod
    def _retire(self) -> None:
        """Stop pushing."""

    @abstractmethod
    def _barrier(self) -> None:
        """Wait for all living workers."""

    @abstractmethod
    def _halt(self, reason: str) -> None:
        """Ask all workers to stop training."""

    # --- checks

    def _checked(self, key: Keys, value: Values) -> list[Tensor]:
        """Check pushed values and return one tensor per key, summed over this worker's devices."""
        if self.optimizer_spec is None and not self.kind.lock_step:
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
            total = sum_over_devices(tensors)
            if self._check_finite and not is_finite(total):
                raise UsageError(f"worker {self.rank}: the value pushed for key {spec.name!r} contains NaN or infinity")
            values.append(total)
        return values

    def _targets(self, key: Keys, out: Values) -> list[list[Tensor]]:
        """Check the tensors that the weights of each key are copied to, and return them."""
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
        spec = self._specs_by_key.get(key)
        if spec is None:
            self._check_names([key])
            raise UsageError(f"worker {self.rank}: key {key!r} is not initialised; call init before push or pull")
        return spec

    def _check_names(self, names: Sequence[Key]) -> None:
        """Check that keys are all ints or all strings, because 3 and '3' would be two keys."""
        kinds: set[type] = {type(name) for name in itertools.islice(self._specs_by_key, 1)}
        for name in names:
            if not isinstance(name, str | int) or isinstance(name, bool):
                raise UsageError(f"a key must be a string or an int, not {name!r}")
            kinds.add(type(name))
        if len(kinds) > 1:
            raise UsageError(
                f"worker {self.rank}: the keys of a store must be all ints or all strings; {names[0]!r} mixes them"
            )
        if len(set(names)) != len(names):
            raise UsageError(f"worker {self.rank}: a key appears twice in {names!r}")

    def _optimizer(self) -> OptimizerSpec:
        self._check_open()
        if self.optimizer_spec is None:
            raise UsageError(f"worker {self.rank}: the store has no optimizer; call set_optimizer first")
        return self.optimizer_spec


def dtype_name(tensor: Tensor) -> str:
    """Return a tensor's dtype as `KeySpec` names it, for example float32."""
    return str(tensor.dtype).removeprefix("torch.")


def spec_of_value(name: Key, value: Tensor) -> KeySpec:
    """Return the key's name with the shape and dtype of a value."""
    return KeySpec(name, tuple(value.shape), dtype_name(value))


def as_keys(keys: Keys) -> list[Key]:
    """Return one key or many as a list."""
    if isinstance(keys, Sequence) and not isinstance(keys, str):
        return list(keys)
    return [keys]  # of any type: the store checks it


def as_values(keys: Keys, values: Values) -> list[list[Tensor]]:
    """Return the tensors of each key, one per device."""
    if not isinstance(keys, Sequence) or isinstance(keys, str):
        return [_per_device(keys, values)]
    if isinstance(values, Tensor) or len(values) != len(keys):
        given = 1 if isinstance(values, Tensor) else len(values)
        raise UsageError(f"{len(keys)} keys but {given} values; a list of keys needs one value (or list) for each")
    return [_per_device(key, value) for key, value in zip(keys, values, strict=True)]


def sum_over_devices(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum over devices, on the device of the first tensor."""
    total = tensors[0].detach()
    if len(tensors) > 1:
        total = total.clone()
        for tensor in tensors[1:]:
            total.add_(tensor.detach().to(total.device))
    return total


def is_finite(value: Tensor) -> bool:
    """Return whether no element is NaN or infinite."""
    return not value.is_floating_point() or bool(torch.isfinite(value).all())


def _per_device(key: Key, value: Values) -> list[Tensor]:
    tensors: list[Tensor] = []
    for tensor in value if isinstance(value, Sequence) else [value]:
        if not isinstance(tensor, Tensor):
            kind = type(tensor).__name__
            raise UsageError(f"key {key!r}: a value must be a torch tensor or a list of them, not {kind}")
        _check_dense(key, tensor)
        tensors.append(tensor)
    if not tensors:
        raise UsageError(f"key {key!r}: the list of values is empty")
    return tensors


def _check_dense(key: Key, tensor: Tensor) -> None:
    """Reject sparse and meta tensors now. Later it would fail in the middle of a call that other workers wait for."""
    if tensor.layout is not torch.strided:
        raise UsageError(
            f"key {key!r}: a value of layout {tensor.layout} cannot be stored or sent; make it dense (to_dense())"
        )
    if tensor.is_meta:
        raise UsageError(f"key {key!r}: a value on device meta has no elements to store or send")
