"""The KVStore: what a worker calls. The same class serves `local` (a shard in this process) and `dist_*` (servers).

    kv = echelon.kvstore.create("dist_sync")
    kv.init("w", torch.zeros(3))
    kv.set_optimizer("sgd", lr=0.1)
    kv.push("w", gradient)          # summed over workers; with an optimizer the sum is the gradient, without, the value
    kv.pull("w", out=weights)       # waits as the scheme says

A key's weights and gradient have a place in memory that the servers of this machine see (`views`). Pushing and
pulling these very tensors copies nothing; any other tensor is copied in and out.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor
from torch.optim import Optimizer

from echelon.cluster.messages import (
    Configure,
    OptimizerSpec,
    Retire,
    SetOptimizer,
)
from echelon.cluster.placement import Slot
from echelon.errors import UsageError
from echelon.kvstore import states
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
from echelon.kvstore.client import Client, Ticket
from echelon.kvstore.optimizers import spec_by_name, spec_of
from echelon.kvstore.session import Session
from echelon.kvstore.wire import Wire
from echelon.observe.events import EventLog
from echelon.server.optimization import WHOLE_NUMBERS
from echelon.transport.interface import Transport


class KVStore:
    """Made by `echelon.kvstore.create`."""

    def __init__(
        self,
        name: str,
        session: Session,
        client: Client,
        num_servers: int,
        transport: Transport,
        events: EventLog,
        *,
        scheme: str,
        staleness: int | None = None,
        groups: Sequence[Iterable[int]] | None = None,
        check_finite: bool = False,
    ) -> None:
        self.type = name
        self.events = events
        self._session = session
        self._client = client
        self._scheme = scheme
        self._check_finite = check_finite
        self._wire = Wire(client, session, num_servers, transport, events)
        self._closed = False
        self.on_closed: Callable[[], None] = lambda: None
        self.optimizer_spec: OptimizerSpec | None = None
        listed = [sorted(group) for group in groups] if groups else None
        self._to_all(lambda i: Configure(i, session.rank, scheme, staleness, listed))

    # --- who and where

    @property
    def rank(self) -> int:
        """This worker's number."""
        return self._session.rank

    @property
    def host(self) -> str:
        """The address this worker is known by, as groups files name it."""
        return self._session.hosts[self.rank]

    @property
    def num_workers(self) -> int:
        """How many workers live."""
        return len(self._session.workers)

    @property
    def workers(self) -> list[int]:
        """The ranks that live, in order."""
        return sorted(self._session.workers)

    @property
    def halted(self) -> str | None:
        """Why a worker asked everybody to stop training, or None."""
        return self._session.halted

    @property
    def memory_is_shared(self) -> bool:
        """Whether all servers read and write this worker's memory in place."""
        return self._wire.memory_is_shared

    # --- the classic calls

    def init(self, key: Keys, value: Values) -> None:
        """Make keys known, with rank 0's values; all workers call it, and it returns when all have."""
        names = as_keys(key)
        values = [tensors[0].detach() for tensors in as_values(key, value)]
        self._check_names(names)
        for name in names:
            if self._wire.layout.find(name) is not None:
                raise UsageError(f"worker {self.rank}: key {name!r} is initialised already")
        specs = [spec_of_value(name, tensor) for name, tensor in zip(names, values, strict=True)]
        slots = self._wire.place(specs)
        if self.rank == min(self._session.workers):
            self._wire.init(slots, values)
        self.barrier()

    def push(self, key: Keys, value: Values, priority: int = 0) -> None:
        """Send values on their way; returns without waiting for other workers."""
        slots, values = self._checked(key, value)
        self._wire.push(slots, values, pull=False)

    def pull(self, key: Keys, out: Values, priority: int = 0) -> None:
        """Wait until the scheme lets this worker go on, then copy the weights into `out` (every tensor of a list)."""
        slots, outs = self._targets(key, out)
        pushes = self._wire.pushes(slots)  # one that was refused would never be answered by weights
        self._client.wait([*pushes, *self._wire.pull(slots)])
        self._deliver(slots, outs)

    def pushpull(self, key: Keys, value: Values, out: Values | None = None, priority: int = 0) -> None:
        """Push and pull in one message; without `out`, the weights replace the pushed values."""
        slots, values = self._checked(key, value)
        _, outs = self._targets(key, value if out is None else out)
        self._client.wait(self._wire.push(slots, values, pull=True))
        self._deliver(slots, outs)

    def broadcast(self, key: Keys, value: Values, out: Values, priority: int = 0) -> None:
        """`init`, then `pull`: afterwards every worker has rank 0's values."""
        self.init(key, value)
        self.pull(key, out, priority)

    def set_optimizer(self, optimizer: str | Optimizer, **settings: Any) -> None:
        """Run an optimizer on the servers: by name with torch.optim's settings, or a torch.optim instance's own."""
        if isinstance(optimizer, Optimizer):
            if settings:
                raise UsageError("settings go with an optimizer's name; an instance has its own")
            if (groups := len(optimizer.param_groups)) > 1:
                raise UsageError(f"which keys are in which of {groups} parameter groups? Only the Trainer knows that")
            spec = spec_of(optimizer, {})
        else:
            spec = spec_by_name(optimizer, settings)
        self.use_optimizer(spec)

    def retire(self) -> None:
        """Push no more: from now on nobody waits for this worker, which may still pull and meet the others."""
        self._wire.settle()
        self._to_all(Retire)

    def barrier(self) -> None:
        """Wait until all living workers are here."""
        self._session.barrier()

    def save_optimizer_states(self, path: str | Path) -> None:
        """Write the servers' optimizer state to a safetensors file, whole or not at all. Call it on one worker."""
        self._wire.settle()
        states.save(Path(path), self._client, self._wire.layout, self._spec())

    def load_optimizer_states(self, path: str | Path) -> None:
        """Give the servers the state that `save_optimizer_states` wrote. Call it on one worker, then a barrier."""
        states.load(Path(path), self._client, self._wire.layout, self._spec())

    def close(self) -> None:
        """Wait for what is under way, say goodbye, let go. Harmless when done twice."""
        if not self._closed:
            self._closed = True
            try:
                self._wire.settle()
            finally:
                self._session.leave("it finished")
                self._client.close()
                self.events.close()
                self.on_closed()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- for the Trainer

    def views(self, key: Key) -> tuple[Tensor, Tensor]:
        """A key's weights and gradient where the servers see them: using these copies nothing."""
        slot = self._slot(key)
        return self._wire.arena.weight(slot), self._wire.arena.gradient(slot)

    def key_number(self, key: Key) -> int:
        """The number a key goes by in `exchange`."""
        return self._slot(key).key

    def use_optimizer(self, spec: OptimizerSpec) -> None:
        """Run this optimizer on the servers."""
        self._to_all(lambda i: SetOptimizer(i, spec))
        self.optimizer_spec = spec

    def exchange(self, keys: Sequence[int], samples: float, lrs: list[float]) -> list[Ticket]:
        """Push the gradients that lie in `views`, ask for the weights there, and do not wait."""
        slots = [self._wire.layout.slots[key] for key in keys]
        return self._wire.push(slots, None, pull=True, samples=samples, lrs=lrs)

    def wait(self, tickets: Sequence[Ticket]) -> None:
        """Until an exchange is answered."""
        self._client.wait(tickets)

    def make_vectors(self, name: str, length: int) -> list[str]:
        """Keys for a vector of every worker's own, to be read by all; returns their names (all workers call it)."""
        names = [f"{name}@{rank}" for rank in self.workers]
        self.init(names, [torch.zeros(length)] * len(names))
        return names

    def gather_vectors(self, name: str, vector: Tensor) -> Tensor:
        """Publish this worker's vector and return the living workers' vectors, a row each. All workers call it."""
        tickets: list[Ticket] = []
        for rank in self.workers:
            slot = self._slot(f"{name}@{rank}")
            own = rank == self.rank
            if own:
                self._wire.arena.gradient(slot).copy_(vector)
            tickets += self._wire.push([slot], None, pull=False, samples=float(own))
        self._client.wait(tickets)
        self.barrier()
        rows = torch.empty(len(self.workers), vector.numel())
        self.pull([f"{name}@{rank}" for rank in self.workers], list(rows))
        self.barrier()
        return rows

    def halt(self, reason: str) -> None:
        """Ask every worker to stop training (`halted` tells)."""
        self._session.halt(reason)

    # --- within

    def _deliver(self, slots: Sequence[Slot], outs: Sequence[Sequence[Tensor]]) -> None:
        for slot, tensors in zip(slots, outs, strict=True):
            weight = self._wire.arena.weight(slot)
            for tensor in tensors:
                if tensor.data_ptr() != weight.data_ptr():
                    tensor.detach().copy_(weight)

    def _checked(self, key: Keys, value: Values) -> tuple[list[Slot], list[Tensor]]:
        if self.optimizer_spec is None and self._scheme != "dist_sync":
            raise UsageError(
                f"worker {self.rank}: {self.type} needs an optimizer on the servers: call set_optimizer, on every "
                "worker, before push"
            )
        slots = self._slots(key)
        values = []
        for slot, tensors in zip(slots, as_values(key, value), strict=True):
            for tensor in tensors:
                self._check_fit(slot, tensor, "pushed")
            if self.optimizer_spec is not None and not tensors[0].is_floating_point():
                raise UsageError(f"worker {self.rank}: key {slot.spec.name!r} is {slot.spec}: {WHOLE_NUMBERS}")
            total = reduced(tensors)
            if self._check_finite and not is_finite(total):
                raise UsageError(
                    f"worker {self.rank}: the value pushed for key {slot.spec.name!r} has NaN or infinity in it"
                )
            values.append(total)
        return slots, values

    def _targets(self, key: Keys, out: Values) -> tuple[list[Slot], list[list[Tensor]]]:
        slots = self._slots(key)
        outs = as_values(key, out)
        for slot, tensors in zip(slots, outs, strict=True):
            for tensor in tensors:
                self._check_fit(slot, tensor, "given for out")
        return slots, outs

    def _check_fit(self, slot: Slot, tensor: Tensor, what: str) -> None:
        if (tuple(tensor.shape), dtype_name(tensor)) != (slot.spec.shape, slot.spec.dtype):
            given = spec_of_value(slot.spec.name, tensor)
            raise UsageError(f"worker {self.rank}: key {slot.spec.name!r} is {slot.spec}, but {given} was {what}")

    def _slots(self, key: Keys) -> list[Slot]:
        names = as_keys(key)
        if not names or len(set(names)) < len(names):
            raise UsageError(f"worker {self.rank}: a call must name keys, each once, not {names!r}")
        return [self._slot(name) for name in names]

    def _slot(self, key: Key) -> Slot:
        slot = self._wire.layout.find(key)
        if slot is None:
            self._check_names([key])
            raise UsageError(f"worker {self.rank}: key {key!r} is not initialised; call init before push or pull")
        return slot

    def _check_names(self, names: Sequence[Key]) -> None:
        """Ints or strings, not both: 3 and '3' would be two keys."""
        kinds: set[type] = {type(slot.spec.name) for slot in itertools.islice(self._wire.layout.slots.values(), 1)}
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

    def _spec(self) -> OptimizerSpec:
        if self.optimizer_spec is None:
            raise UsageError(f"worker {self.rank}: there is no optimizer on the servers; call set_optimizer first")
        return self.optimizer_spec

    def _to_all(self, make: Any) -> None:
        """What all servers must agree on, server 0 decides: what it refuses reaches no other."""
        self._client.call(0, make(self._client.next_id()))
        others = range(1, self._wire.layout.num_servers)
        self._client.wait([self._client.send(server, make(self._client.next_id())) for server in others])
