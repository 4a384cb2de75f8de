"""The KVStore: the calls of a worker, whether servers (`servers/`), collectives (`collective/`) or both execute them.

    kv = echelon.kvstore.create("dist_sync")
    kv.init("w", torch.zeros(3))
    kv.set_optimizer("sgd", lr=0.1)
    kv.push("w", gradient)          # summed over workers; with an optimizer the sum is the gradient, without, the value
    kv.pull("w", out=weights)       # waits as the scheme requires

This module owns the calls and their checks: a mistake raises an error on the worker that makes it, before any data is
sent. `values` brings the keys and tensors of a call into one form, and casts what is pushed to the dtype of its key.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

from torch import Tensor
from torch.optim import Optimizer

from echelon.cluster.messages import NO_OPTIMIZER, OptimizerSpec
from echelon.cluster.placement import KeySpec
from echelon.errors import UsageError
from echelon.kvstore import exchange
from echelon.kvstore.optimizer_spec import spec_by_name, spec_of
from echelon.kvstore.values import (
    Key,
    Keys,
    Values,
    as_keys,
    as_values,
    check_key,
    check_row_outs,
    copy_rows,
    is_finite,
    row_numbers,
    spec_of_value,
    sum_over_devices,
    tensors_by_key,
)
from echelon.observe.events import EventLog
from echelon.schemes.stores import store_kind
from echelon.server.storage.memory import TORCH_DTYPES
from echelon.server.storage.optimization import INTEGER_KEY

Updater = Callable[[Key, Tensor, Tensor], object]

CLOSED = "this store is closed; close it after the last call"


class KVStore(ABC):
    """The base class of all stores, which `echelon.kvstore.create` returns."""

    _stores_rows: ClassVar[bool] = False  # whether it stores row-sparse keys by rows; otherwise they are dense keys

    def __init__(self, name: str, events: EventLog, *, check_finite: bool) -> None:
        self.type = name.lower()
        self.kind = store_kind(name)
        self.events = events
        self.job_has_events = events.is_open  # the same for all devices of a worker, of which one writes
        self.on_closed: Callable[[], None] = lambda: None
        # Set by Trainers whose workers must take part in the steps of others: until all retire, or until all meet.
        self.on_retire: Callable[[], None] = lambda: None
        self.before_barrier: Callable[[], None] = lambda: None
        self.after_barrier: Callable[[], None] = lambda: None
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
    def is_first(self) -> bool:
        """Whether this is the lowest living rank, which validates, saves and reports. Another's death changes it."""
        return self.workers[:1] == [self.rank]

    @property
    def is_late(self) -> bool:
        """Whether this worker has joined a job that was running, and does not take part in the rounds yet."""
        return False

    @property
    def survives_deaths(self) -> bool:
        """Whether the other workers continue when one dies."""
        return False

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def number(self) -> int:
        """Which store with servers of this worker it is, counted from 0."""
        return 0

    def record(self) -> None:
        """Write to the event log which store this is, for reports of the run."""
        self.events.write("store", store=self.number, name=self.type, **self._described())

    def _described(self) -> dict[str, Any]:
        return {"scheme": "BSP", "groups": None, "staleness": None}

    def traffic(self) -> dict[str, int]:
        """Return the bytes of tensors pushed and pulled so far, and the bytes sent and received over sockets.

        In shared memory only small messages are sent. Stores without servers count nothing.
        """
        return {}

    @property
    def halted(self) -> str | None:
        """The reason why a worker asked all workers to stop training, or None."""
        return self._halted

    @property
    def may_leave(self) -> bool:
        """Whether this worker has announced that it leaves, and the others continue without it."""
        return False

    def announce_leaving(self, reason: str) -> None:
        """Say that this worker was told to end. If the others can continue without it, `may_leave` is set.

        Otherwise, or if all workers were told to end, all of them stop (`halted`).
        """
        self.halt(reason)

    # --- the classic calls

    def init(self, key: Keys, value: Values, *, row_sparse: bool = False) -> None:
        """Add keys with rank 0's values. All workers call this, and it returns when all have called it.

        `row_sparse`, or a sparse value: servers store the keys by rows, and only rows travel that are pushed or pulled.
        """
        self._check_open()
        names = as_keys(key)
        given = [tensors[0].detach() for tensors in as_values(key, value)]
        by_rows = [self._stores_rows and (row_sparse or tensor.is_sparse) for tensor in given]
        values = [tensor.to_dense() if tensor.is_sparse else tensor for tensor in given]
        self._check_names(names)
        for name in names:
            if name in self._specs_by_key:
                raise UsageError(f"worker {self.rank}: key {name!r} is already initialised")
        specs = [
            spec_of_value(name, tensor, row_sparse=rows)
            for name, tensor, rows in zip(names, values, by_rows, strict=True)
        ]
        self._init(specs, values)
        self._specs_by_key |= dict(zip(names, specs, strict=True))

    @abstractmethod
    def push(self, key: Keys, value: Values, priority: int = 0) -> None:
        """Send values to be summed over all workers. They are cast to the key's dtype, as a pull's are to `out`'s.

        Over a slow link to the servers, what has a higher `priority` overtakes what waits with a lower one, on the way
        there and back. Messages about the same key keep their order.
        """

    @abstractmethod
    def pull(self, key: Keys, out: Values, priority: int = 0) -> None:
        """Wait until the scheme answers, then copy the weights into `out` (into every tensor of a list)."""

    def pushpull(self, key: Keys, value: Values, out: Values | None = None, priority: int = 0) -> None:
        """Push, then pull. Without `out`, the weights replace the pushed values."""
        target = value if out is None else out
        self._targets(key, target)  # raises before anything is pushed
        self.push(key, value, priority)
        self.pull(key, target, priority)

    def row_sparse_pull(
        self, key: Keys, out: Values, priority: int = 0, row_ids: Tensor | Sequence[Tensor] | None = None
    ) -> None:
        """Wait until the scheme answers, then copy the rows `row_ids` of the weights into `out`.

        Row numbers may have any shape and order and may repeat. A sparse `out` of the key's shape gets exactly these
        rows. A dense `out` gets one row for each number, as `weights[row_ids]` has.
        """
        outs = self._row_outs(key, out)
        ids = [row_ids] * len(outs) if isinstance(row_ids, Tensor) else list(row_ids or ())
        if len(ids) != len(outs):
            raise UsageError(
                f"worker {self.rank}: row_sparse_pull of {len(outs)} keys needs row_ids: one tensor, or one per key; "
                f"{len(ids)} came"
            )
        wanted = [row_numbers(spec, rows) for (spec, _), rows in zip(outs, ids, strict=True)]
        for (spec, tensors), rows in zip(outs, wanted, strict=True):
            check_row_outs(spec, tensors, rows)
        for (spec, tensors), rows in zip(outs, wanted, strict=True):
            numbers, places = rows.view(-1).unique(return_inverse=True)
            copy_rows(numbers, places.view(rows.shape), self._pull_rows(spec, numbers), tensors)

    def broadcast(self, key: Keys, value: Values, out: Values, priority: int = 0) -> None:
        """Call `init`, then `pull`, so that every worker has rank 0's values."""
        self.init(key, value)
        self.pull(key, out, priority)

    def set_optimizer(self, optimizer: str | Optimizer, *, style: str = "torch", **settings: Any) -> None:
        """Update the stored values with an optimizer: an instance, or a name and settings.

        By `style`, the names and defaults of settings are those of torch.optim, or those of MXNet (learning_rate, wd).
        """
        if isinstance(optimizer, Optimizer):
            if settings:
                raise UsageError("an optimizer instance has its own settings; give settings only with a name")
            if (groups := len(optimizer.param_groups)) > 1:
                raise UsageError(
                    f"the optimizer has {groups} parameter groups, but a store cannot assign keys to them; use Trainer"
                )
            spec = spec_of(optimizer, {})
        else:
            spec = spec_by_name(optimizer, settings, style)
        self.use_optimizer(spec)

    def set_updater(self, updater: Updater) -> None:
        """Call `updater(key, pushed, value)` for every pushed key, which changes the value in place.

        Only the stores of one worker can do this, because a function cannot be sent to servers or compared between
        workers.
        """
        raise UsageError(
            f"worker {self.rank}: {self.type} cannot run an updater, only the stores of one worker can: use "
            "set_optimizer, or push without an optimizer, pull the sum and update in the worker"
        )

    def _set_updater(self, updater: Updater) -> None:
        """The name that MXNet 1.x has for `set_updater`."""
        self.set_updater(updater)

    def use_optimizer(self, spec: OptimizerSpec) -> None:
        """Update the stored values with this optimizer."""
        self._check_open()
        self._use_optimizer(spec)

    def retire(self) -> None:
        """Stop pushing: other workers no longer wait for this one. It may still call `pull` and `barrier`."""
        self._check_open()
        self.on_retire()
        self._retire()

    def is_beside(self, other: KVStore) -> bool:
        """Return whether a worker that waits in this store must take part in the steps of another one meanwhile."""
        return False

    def barrier(self) -> None:
        """Wait until all living workers have called this. With a Trainer, some may still make steps before they do."""
        self._check_open()
        self.before_barrier()
        self._barrier()
        self.after_barrier()

    def meet(self) -> list[int]:
        """Wait until all living workers have called this, however long one that lives takes. Return who they were."""
        self.barrier()
        return self.workers

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all workers, by rank: tensors of any shapes, numbers, or what JSON can hold.

        All living workers call it together; those that have retired or closed the store are not waited for, and have
        no value in the list. Tensors are on the device of this worker's own value, if that is a tensor.
        """
        return list(self._gather(value).values())

    def all_reduce(self, value: Any, op: str = "mean") -> Any:
        """Return the mean, sum, max or min over all workers of a tensor or a number. All call it, as `gather`.

        The mean of integers is a floating-point number. A sum adds in rank order, so that all workers get equal bits.
        """
        exchange.check_operation(op)
        return exchange.reduce(self._gather(value), op)

    def _gather(self, value: Any) -> dict[int, Any]:
        self._check_open()
        device = value.device if isinstance(value, Tensor) else "cpu"
        self.before_barrier()
        parts = self.gather_bytes(exchange.pack(value))
        self.after_barrier()
        return {rank: exchange.unpack(part, device) for rank, part in sorted(parts.items())}

    def halt(self, reason: str) -> None:
        """Ask all workers to stop training. `halted` then gives the reason."""
        self._check_open()
        self._halt(reason)

    def report_defect(self, reason: str) -> None:  # noqa: B027  (most stores have no scheduler)
        """Tell the scheduler, if the job has one, why the result is not whole; the status of the job then says so."""

    @abstractmethod
    def save_optimizer_states(self, path: str | Path) -> None:
        """Write the optimizer state to a safetensors file, completely or not at all."""

    @abstractmethod
    def load_optimizer_states(self, path: str | Path) -> None:
        """Restore the optimizer state that `save_optimizer_states` wrote."""

    @abstractmethod
    def close(self) -> None:
        """Wait for requests in flight; nothing waits for this worker any more. A second call does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- implemented by each kind of store

    @abstractmethod
    def gather_bytes(self, part: bytes) -> dict[int, bytes | memoryview]:
        """Return the parts of all workers that take part, by rank. All of them call it together."""

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

    def _pull_rows(self, spec: KeySpec, rows: Tensor) -> Tensor:
        """Return rows of a key, which are all different and ascend. Stores without rows pull the whole key."""
        whole = rows.new_empty(spec.shape, dtype=TORCH_DTYPES[spec.dtype])
        self.pull(spec.name, whole)
        return whole.index_select(0, rows)

    # --- checks

    def _row_outs(self, key: Keys, out: Values) -> list[tuple[KeySpec, list[Tensor]]]:
        self._check_open()
        found = [(self._spec_of(name), tensors) for name, tensors in tensors_by_key(key, out).items()]
        if not found:
            raise UsageError(f"worker {self.rank}: a call must name at least one key")
        return found

    def _checked(self, key: Keys, value: Values) -> dict[Key, Tensor]:
        """Check pushed values. Return one tensor per key, in the key's dtype, summed over this worker's devices."""
        if self.optimizer_spec is None and not self.kind.lock_step:
            raise UsageError(
                f"worker {self.rank}: {self.type} needs an optimizer on the servers: call set_optimizer, on every "
                "worker, before push"
            )
        values: dict[Key, Tensor] = {}
        for spec, tensors in self._fitting(key, value, "pushed"):
            dtype = TORCH_DTYPES[spec.dtype]
            if self._is_updated(spec) and not dtype.is_floating_point:
                raise UsageError(f"worker {self.rank}: key {spec.name!r} is {spec}: {INTEGER_KEY}")
            total = sum_over_devices(tensors, dtype)
            if total.is_sparse and not self._takes_sparse(spec):
                total = total.to_dense()
            if self._check_finite and not is_finite(total):
                raise UsageError(f"worker {self.rank}: the value pushed for key {spec.name!r} contains NaN or infinity")
            values[spec.name] = total
        return values

    def _is_updated(self, spec: KeySpec) -> bool:
        """Return whether the optimizer updates a key. Raise UsageError if nothing does, where sums mean nothing."""
        if self.optimizer_spec is None:
            return False
        if self.optimizer_spec.group_of(str(spec.name)) != NO_OPTIMIZER:
            return True
        if not self.kind.lock_step:
            raise UsageError(
                f"worker {self.rank}: key {spec.name!r} is not a parameter of the optimizer, and {self.type} cannot "
                "sum values of workers that do not wait for each other; use all_reduce or gather"
            )
        return False

    def _takes_sparse(self, spec: KeySpec) -> bool:
        """Return whether a sparse value of a key is pushed as it is. Otherwise it is made dense first."""
        return spec.row_sparse

    def _targets(self, key: Keys, out: Values) -> dict[Key, list[Tensor]]:
        """Check the tensors that the weights of each key are copied to, and return them."""
        found = {spec.name: tensors for spec, tensors in self._fitting(key, out, "given for out")}
        for name, tensors in found.items():
            if any(tensor.is_sparse for tensor in tensors):
                raise UsageError(
                    f"worker {self.rank}: key {name!r}: out is sparse; use row_sparse_pull, or a dense out"
                )
        return found

    def _fitting(self, key: Keys, value: Values, what: str) -> list[tuple[KeySpec, list[Tensor]]]:
        """Return each key that a call names, and its tensors. Another shape or complex numbers are an error."""
        self._check_open()
        found = [(self._spec_of(name), tensors) for name, tensors in tensors_by_key(key, value).items()]
        if not found:
            raise UsageError(f"worker {self.rank}: a call must name at least one key")
        for spec, tensors in found:
            for tensor in tensors:
                if tuple(tensor.shape) != spec.shape or tensor.is_complex():
                    given = spec_of_value(spec.name, tensor)
                    raise UsageError(f"worker {self.rank}: key {spec.name!r} is {spec}, but {given} was {what}")
        return found

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError(f"worker {self.rank}: {CLOSED}")

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
            check_key(name)
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
