"""A store without servers: every process has all values, and collectives sum the pushed values.

All workers make the same calls in the same order. A push is a sum over all workers, complete when the call returns.
With the sharded store `nccl`, a rank updates its part of each key only and keeps only that part of the optimizer state.
With the other stores every rank updates everything. `halted` changes in `barrier` and in a Trainer's step, so that it
changes at the same step on all workers.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.optim import Optimizer

from echelon.cluster.messages import OptimizerSpec
from echelon.cluster.placement import ITEM_BYTES, KeySpec
from echelon.errors import JobError, UsageError
from echelon.kvstore import state_files
from echelon.kvstore.collective.process_group import ProcessGroup, wide
from echelon.kvstore.optimizer_spec import make_optimizer, needs_whole_tensors
from echelon.kvstore.store import KVStore, Updater
from echelon.kvstore.values import Key, Keys, Values
from echelon.observe.events import EventLog

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Value:
    """A key's value, padded so that all ranks have equal parts, and the part that this rank updates."""

    spec: KeySpec
    rows: Tensor  # one row per rank
    own: nn.Parameter  # the whole value, or this rank's row
    optimizer: Optimizer | None = None

    @property
    def whole(self) -> Tensor:
        """The value in its original shape."""
        return self.rows.view(-1)[: self.spec.length].view(self.spec.shape)


class CollectiveStore(KVStore):
    """The store of a process group. Created by `echelon.kvstore.create`."""

    def __init__(self, name: str, group: ProcessGroup, events: EventLog, *, check_finite: bool = False) -> None:
        super().__init__(name, events, check_finite=check_finite)
        self.group = group
        self.sharded = self.kind.sharded
        self.some_have_retired = False  # set by a Trainer
        self._values: dict[Key, _Value] = {}
        self._requested_halt: str | None = None
        self._updater: Updater | None = None

    # --- ranks and workers

    @property
    def rank(self) -> int:
        """This process's rank in the process group."""
        return self.group.rank

    @property
    def workers(self) -> list[int]:
        """All ranks. A process group that loses a member is broken, so this list never shrinks."""
        return list(range(self.group.size))

    @property
    def halt_flag(self) -> float:
        """1.0 if this worker asked all workers to stop, else 0.0. The sum over all workers goes to `receive_flags`."""
        return float(self._requested_halt is not None)

    def receive_flags(self, total: float) -> None:
        """Set `halted` if the sum of all workers' `halt_flag` is not 0. All workers call this at the same step."""
        if total and self._halted is None:
            self._halted = self._requested_halt if self.group.size == 1 else self.group.get_text("halt")

    # --- the calls

    def push(self, key: Keys, value: Values, priority: int = 0) -> None:
        """Sum the values over all workers, and update the stored values."""
        values = self._checked(key, value)
        for dtype in dict.fromkeys(tensor.dtype for tensor in values.values()):
            some = {name: tensor for name, tensor in values.items() if tensor.dtype == dtype}
            self._apply([self._values[name] for name in some], list(some.values()))

    def pull(self, key: Keys, out: Values, priority: int = 0) -> None:
        """Copy the values into `out` (into every tensor of a list)."""
        for name, tensors in self._targets(key, out).items():
            for tensor in tensors:
                tensor.detach().copy_(self._values[name].whole)

    def set_updater(self, updater: Updater) -> None:
        """Call `updater(key, pushed, value)` for every pushed key, in place of an optimizer. All devices call it."""
        self._check_open()
        if self.kind.spans_workers:
            super().set_updater(updater)
        if not callable(updater):
            raise UsageError(f"set_updater takes a function of (key, pushed, value), not {updater!r}")
        self._updater, self.optimizer_spec = updater, None
        for value in self._values.values():
            value.optimizer = None

    def _use_optimizer(self, spec: OptimizerSpec) -> None:
        if self.optimizer_spec not in (None, spec):
            raise UsageError(f"worker {self.rank}: the store has {self.optimizer_spec}, but this worker set {spec}")
        if spec.name == "sparse_adam":
            raise UsageError(f"{self.type} makes sparse values dense, which SparseAdam cannot use: use Adagrad or SGD")
        if self.sharded and needs_whole_tensors(spec):
            raise UsageError(f"{spec.name} needs whole values, which nccl shards: use nccl_allreduce")
        self.group.check_same("the optimizer", str(spec))
        self._updater, self.optimizer_spec = None, spec

    def gather_bytes(self, part: bytes) -> dict[int, bytes | memoryview]:
        """Return the parts of all workers that take part, by rank."""
        return self.group.gather_bytes(part)

    def retire(self) -> None:
        """Stop pushing. This worker takes part in the others' steps until all have retired."""
        self._check_open()
        self.group.stop_gathering()
        super().retire()

    def is_beside(self, other: KVStore) -> bool:
        """Return whether another store is open, and its members are the same processes."""
        return isinstance(other, CollectiveStore) and not other.is_closed and self.group.is_beside(other.group)

    def _retire(self) -> None:
        """Stop pushing. Until all workers have retired, the Trainer takes part in their collectives (`on_retire`)."""

    def _barrier(self) -> None:
        if self.some_have_retired:  # and are in the steps of the others
            parts = self.group.gather_bytes(str(self.halt_flag).encode())
            self.receive_flags(sum(float(bytes(part)) for part in parts.values()))
        else:
            self.receive_flags(self.group.barrier(self.halt_flag))

    def _halt(self, reason: str) -> None:
        """Ask all workers to stop training. `halted` is set in the next barrier or step."""
        if self._requested_halt is None:
            self._requested_halt = reason
            self.group.set_text("halt", reason)
        if self.group.size == 1:
            self.receive_flags(1.0)

    def save_optimizer_states(self, path: str | Path) -> None:
        """Write the optimizer state to a safetensors file. All workers call this, and rank 0 writes."""
        found = self.optimizer_states()
        try:
            if self.rank == 0:
                state_files.save(Path(path), found, self._optimizer())
        finally:  # if rank 0 cannot write the file, the others must not wait for it forever
            self.group.barrier()

    def load_optimizer_states(self, path: str | Path) -> None:
        """Restore the optimizer state. All workers call this, and each reads the file."""
        self.put_optimizer_states(state_files.load(Path(path), self._optimizer()), str(path))

    def close(self, *, failed: bool = False) -> None:
        """Leave the process group. A second call does nothing.

        If other workers still have data, take part in their steps first, unless this process has `failed`.
        """
        if not self._closed:
            if not failed and self.group.size > 1:
                self._take_part_to_the_end()
            self._closed = True
            self.group.close(failed=failed)
            self.events.close()
            self.on_closed()

    def _take_part_to_the_end(self) -> None:
        try:
            self.on_retire()
        except JobError as error:
            log.warning("%s; this worker had finished", error)

    # --- optimizer states by name

    def optimizer_states(self) -> dict[str, Tensor]:
        """Return the whole state of every key, named `<key>/<state>`. All workers call this."""
        self._optimizer()
        found: dict[str, Tensor] = {}
        for name, value in self._values.items():
            state = value.optimizer.state.get(value.own, {}) if value.optimizer is not None else {}
            for kind, tensor in state.items():
                found[f"{name}/{kind}"] = self._whole_state(value, kind, tensor)
        return found

    def put_optimizer_states(self, states: dict[str, Tensor], source: str) -> None:
        """Restore the states that `optimizer_states` returned. Each rank keeps its part."""
        spec = self._optimizer()
        by_key = state_files.by_key(states)
        values = {str(name): value for name, value in self._values.items()}
        state_files.check_fit(source, spec, {name: value.spec for name, value in values.items()}, by_key)
        for name, kinds in by_key.items():
            value = values[name]
            state = self._optimizer_of(value, spec).state[value.own]
            state.update({kind: self._own_part(value, kind, tensor) for kind, tensor in kinds.items()})

    # --- internals

    def _init(self, specs: Sequence[KeySpec], values: Sequence[Tensor]) -> None:
        for spec in specs:
            if spec.dtype not in ITEM_BYTES:
                raise UsageError(
                    f"worker {self.rank}: key {spec.name!r}: dtype {spec.dtype} cannot be stored; use one of "
                    f"{', '.join(ITEM_BYTES)}"
                )
        self.group.check_same("keys, their shapes and dtypes", ", ".join(f"{spec.name!r} {spec}" for spec in specs))
        for spec, tensor in zip(specs, values, strict=True):
            rows = self._rows(tensor.to(self.group.device, wide(tensor.dtype), copy=True))
            value = _Value(spec, rows, nn.Parameter(torch.empty(0, device="cpu")))
            own = rows[self.rank] if self.sharded else value.whole
            value.own = nn.Parameter(own, requires_grad=own.is_floating_point())
            self._values[spec.name] = value
        self.group.broadcast([self._values[spec.name].rows for spec in specs])
        self.barrier()

    def _rows(self, tensor: Tensor) -> Tensor:
        """Return a tensor as one row per rank, padded with zeros at the end."""
        flat = tensor.reshape(-1)
        missing = -flat.numel() % self.group.size
        return (pad(flat, (0, missing)) if missing else flat).view(self.group.size, -1)

    def _apply(self, values: Sequence[_Value], pushed: Sequence[Tensor]) -> None:
        """Sum and apply pushed values of one dtype, with one collective."""
        packed = torch.cat([self._rows(tensor.to(self.group.device)) for tensor in pushed], 1)
        widths = [value.rows.shape[1] for value in values]
        spec = self.optimizer_spec
        if spec is not None and self.sharded:
            self._update(values, torch.split(self.group.reduce_scatter(packed.view(-1)).result(), widths), spec)
            return
        total = self.group.all_reduce(packed.view(-1)).result().view(self.group.size, -1)
        sums = torch.split(total, widths, 1)
        if spec is not None:
            pairs = zip(values, sums, strict=True)
            self._update(values, [part.reshape(-1)[: value.spec.length] for value, part in pairs], spec)
            return
        for value, part in zip(values, sums, strict=True):
            if self._updater is None:
                value.rows.copy_(part)
                continue
            pushed_sum = part.reshape(-1)[: value.spec.length].view(value.spec.shape)
            with torch.no_grad():
                self._updater(value.spec.name, pushed_sum, value.whole)

    def _update(self, values: Sequence[_Value], sums: Sequence[Tensor], spec: OptimizerSpec) -> None:
        for value, total in zip(values, sums, strict=True):
            value.own.grad = total.view(value.own.shape)
            self._optimizer_of(value, spec).step()
            value.own.grad = None
        if self.sharded and self.group.size > 1:
            own = torch.cat([value.own.detach() for value in values])
            all_parts = own.new_empty(self.group.size, own.numel())
            widths = [value.rows.shape[1] for value in values]
            gathered = torch.split(self.group.all_gather(own, all_parts).result(), widths, 1)
            for value, rows in zip(values, gathered, strict=True):
                value.rows.copy_(rows)

    def _optimizer_of(self, value: _Value, spec: OptimizerSpec) -> Optimizer:
        if value.optimizer is None:
            value.optimizer = make_optimizer(spec, value.own)
        return value.optimizer

    def _whole_state(self, value: _Value, kind: str, tensor: Tensor) -> Tensor:
        if not self.sharded or kind in state_files.SCALARS:
            return tensor.detach().cpu().clone()
        rows = tensor.new_empty(value.rows.shape)
        whole = self.group.all_gather(tensor, rows).result().view(-1)[: value.spec.length]
        return whole.view(value.spec.shape).cpu()

    def _own_part(self, value: _Value, kind: str, tensor: Tensor) -> Tensor:
        if kind in state_files.SCALARS:
            return tensor.clone()  # on the CPU, as torch.optim keeps it
        if self.sharded:
            tensor = self._rows(tensor)[self.rank]
        if tensor.numel() != value.own.numel():
            return tensor.to(self.group.device, copy=True)  # of a class that keeps states of other shapes
        return tensor.to(self.group.device, value.own.dtype, copy=True).view(value.own.shape)
