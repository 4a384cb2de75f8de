"""A store whose values live on servers: what `dist_sync` and the relaxed schemes are to a worker.

A key's weights and gradient have a place in memory that the servers of this machine see (`views`). Pushing and
pulling these very tensors copies nothing; any other tensor is copied in and out.

Who asks all to stop is heard through the scheduler. Under `dist_sync`, where all make the same steps, the word goes
with a push, so that all hear it in the answers of one clock (`stops_with`) and no one makes a step that others do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from echelon.cluster.messages import Configure, Done, OptimizerSpec, Retire, SetOptimizer
from echelon.cluster.placement import KeySpec, Slot
from echelon.errors import UsageError
from echelon.kvstore import state_files
from echelon.kvstore.arguments import Key, Keys, Values, as_keys
from echelon.kvstore.servers import states
from echelon.kvstore.servers.client import Client, Ticket
from echelon.kvstore.servers.session import Session
from echelon.kvstore.servers.wire import Wire
from echelon.kvstore.store import KVStore
from echelon.observe.events import EventLog
from echelon.transport.interface import Transport


class ServerStore(KVStore):
    """Made by `echelon.kvstore.create.join`."""

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
        super().__init__(name, events, check_finite=check_finite, sums_replace=scheme == "dist_sync")
        self._session = session
        self._client = client
        self._wire = Wire(client, num_servers, transport, events)
        self._lock_step = scheme == "dist_sync"
        self._asks_to_halt = False
        self._halted: str | None = None
        self.on_closed: Callable[[], None] = lambda: None
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
    def workers(self) -> list[int]:
        """The ranks that live, in order."""
        return sorted(self._session.workers)

    @property
    def halted(self) -> str | None:
        """Why a worker asked everybody to stop training, or None."""
        return self._halted if self._lock_step else self._session.halted

    @property
    def num_servers(self) -> int:
        """How many servers the values are spread over."""
        return self._wire.layout.num_servers

    @property
    def memory_is_shared(self) -> bool:
        """Whether all servers read and write this worker's memory in place."""
        return self._wire.memory_is_shared

    # --- the classic calls

    def push(self, key: Keys, value: Values, priority: int = 0) -> None:
        """Send values on their way; returns without waiting for other workers."""
        values = self._checked(key, value)
        self._wire.push(self._slots(key), values, pull=False, halt=self._asks_to_halt)

    def pull(self, key: Keys, out: Values, priority: int = 0) -> None:
        """Wait until the scheme lets this worker go on, then copy the weights into `out` (every tensor of a list)."""
        outs = self._targets(key, out)
        slots = self._slots(key)
        pushes = self._wire.pushes(slots)  # one that was refused would never be answered by weights
        self._wait_and_listen([*pushes, *self._wire.pull(slots)])
        self._deliver(slots, outs)

    def pushpull(self, key: Keys, value: Values, out: Values | None = None, priority: int = 0) -> None:
        """Push and pull in one message; without `out`, the weights replace the pushed values."""
        values = self._checked(key, value)
        outs = self._targets(key, value if out is None else out)
        slots = self._slots(key)
        self._wait_and_listen(self._wire.push(slots, values, pull=True, halt=self._asks_to_halt))
        self._deliver(slots, outs)

    def _retire(self) -> None:
        """Push no more: from now on nobody waits for this worker, which may still pull and meet the others."""
        self._wire.settle()
        self._to_all(Retire)

    def _barrier(self) -> None:
        """Wait until all living workers are here."""
        halted = self._session.barrier()
        self._halted = self._halted or halted

    def save_optimizer_states(self, path: str | Path) -> None:
        """Write the servers' optimizer state to a safetensors file, whole or not at all. Call it on one worker."""
        state_files.save(Path(path), self.optimizer_states(), self._optimizer())

    def load_optimizer_states(self, path: str | Path) -> None:
        """Give the servers the state that `save_optimizer_states` wrote. Call it on one worker, then a barrier."""
        self.put_optimizer_states(state_files.load(Path(path), self._optimizer()), str(path))

    def optimizer_states(self) -> dict[str, Tensor]:
        """The servers' state, `<key>/<state>`."""
        spec = self._optimizer()
        self._wire.settle()
        return states.gather(self._client, self._wire.layout, spec)

    def put_optimizer_states(self, given: dict[str, Tensor], source: str) -> None:
        """Give the servers a state. Call it on one worker, then a barrier."""
        states.scatter(source, self._client, self._wire.layout, self._optimizer(), given)

    def close(self, failure: str | None = None) -> None:
        """Wait for requests in flight and leave the job; `failure` says why if it is early. Later calls do nothing."""
        if not self._closed:
            self._closed = True
            try:
                self._wire.settle()
            finally:
                self._session.leave(failure or "it finished", failed=failure is not None)
                self._client.close()
                self.events.close()
                self.on_closed()

    # --- for the Trainer

    def views(self, key: Key) -> tuple[Tensor, Tensor]:
        """A key's weights and gradient where the servers see them: using these copies nothing."""
        slot = self._slot(key)
        return self._wire.arena.weight(slot), self._wire.arena.gradient(slot)

    def memory(self) -> list[Tensor]:
        """All memory that gradients leave from and weights arrive in."""
        return [block for mirror in self._wire.arena.mirrors for block in (mirror.gradients, mirror.weights)]

    def span(self, keys: Sequence[Key]) -> tuple[Tensor, Tensor]:
        """The memory of keys that lie next to each other, flat, with the gaps between them: gradients and weights."""
        slots = [self._slot(key) for key in keys]
        start, stop = min(slot.start for slot in slots), max(slot.start + slot.padded for slot in slots)
        if {slot.segment for slot in slots} != {slots[0].segment} or stop - start != sum(s.padded for s in slots):
            raise UsageError(f"worker {self.rank}: keys {keys[0]!r} to {keys[-1]!r} do not lie next to each other")
        mirror = self._wire.arena.mirrors[slots[0].segment]
        return mirror.gradients[start:stop], mirror.weights[start:stop]

    def key_number(self, key: Key) -> int:
        """The number a key goes by in `exchange`."""
        return self._slot(key).key

    def _use_optimizer(self, spec: OptimizerSpec) -> None:
        """Run this optimizer on the servers."""
        self._to_all(lambda i: SetOptimizer(i, spec))
        self.optimizer_spec = spec

    def exchange(
        self, keys: Sequence[int], samples: float, lrs: list[float], factor_rank: int = 0, *, more: bool = False
    ) -> list[Ticket]:
        """Push the gradients that lie in `views`, ask for the weights there, and do not wait.

        `factor_rank` above 0: at the beginning of the one key's place there are the factors of its gradient. `more`:
        the next exchange follows within milliseconds, and servers had better be awake.
        """
        slots = [self._wire.layout.slots[key] for key in keys]
        halt = self._asks_to_halt
        return self._wire.push(
            slots, None, pull=True, samples=samples, lrs=lrs, halt=halt, factor_rank=factor_rank, more=more
        )

    def wait(self, tickets: Sequence[Ticket]) -> None:
        """Until an exchange is answered."""
        self._client.wait(tickets)

    def is_answered(self, tickets: Sequence[Ticket]) -> bool:
        """Whether an exchange is answered by now, without waiting."""
        return self._client.ready(tickets)

    def overwrite(self, key: Keys, value: Values) -> None:
        """Put other values in place of the weights, whatever came before. Call it on one worker, then a barrier."""
        values = self._checked(key, value)
        self._wire.settle()
        self._wire.init(self._slots(key), values, overwrite=True)

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

    def _halt(self, reason: str) -> None:
        """Ask every worker to stop training (`halted` tells)."""
        if not self._asks_to_halt:
            self._session.halt(reason)
            self._asks_to_halt = self._lock_step
            if self._lock_step and self.workers == [self.rank]:
                self.stop()

    def stops_with(self, tickets: Sequence[Ticket]) -> bool:
        """Whether the answers of a clock say that somebody asked all to stop."""
        return any(isinstance(ticket.response, Done) and ticket.response.halt for ticket in tickets)

    def stop(self) -> None:
        """Take the word to stop for heard: `halted` says why from now on."""
        self._halted = self._session.hear_halt()

    # --- within

    def _wait_and_listen(self, tickets: Sequence[Ticket]) -> None:
        self._client.wait(tickets)
        if self._halted is None and self.stops_with(tickets):
            self.stop()

    def _deliver(self, slots: Sequence[Slot], outs: Sequence[Sequence[Tensor]]) -> None:
        for slot, tensors in zip(slots, outs, strict=True):
            weight = self._wire.arena.weight(slot)
            for tensor in tensors:
                if tensor.data_ptr() != weight.data_ptr():
                    tensor.detach().copy_(weight)

    def _names(self) -> Iterable[Key]:
        return (slot.spec.name for slot in self._wire.layout.slots.values())

    def _find(self, key: Key) -> KeySpec | None:
        slot = self._wire.layout.find(key)
        return None if slot is None else slot.spec

    def _init(self, specs: Sequence[KeySpec], values: Sequence[Tensor]) -> None:
        slots = self._wire.place(specs)
        if self.rank == min(self._session.workers):
            self._wire.init(slots, values)
        self.barrier()

    def _slots(self, key: Keys) -> list[Slot]:
        return [self._slot(name) for name in as_keys(key)]

    def _slot(self, key: Key) -> Slot:
        self._spec_of(key)
        slot = self._wire.layout.find(key)
        assert slot is not None
        return slot

    def _to_all(self, make: Any) -> None:
        """What all servers must agree on, server 0 decides: what it refuses reaches no other."""
        self._client.call(0, make(self._client.next_id()))
        others = range(1, self._wire.layout.num_servers)
        self._client.wait([self._client.send(server, make(self._client.next_id())) for server in others])
