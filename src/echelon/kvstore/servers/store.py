"""A store that keeps its values on servers: `dist_sync` and the schemes that wait less.

The weights and the gradient of a key have a place in memory that the servers on this machine map (`views`). Pushing and
pulling these tensors copies nothing; any other tensor is copied in and out.

The scheduler sends a request to stop training to all workers. Under `dist_sync`, where all workers make the same steps,
the request is also part of a push. All workers then find it in the answers of the same clock (`requests_halt`), and
none of them makes a step that the others do not make.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor

from echelon.cluster.messages import (
    Configure,
    Done,
    Gather,
    Gathered,
    Member,
    OptimizerSpec,
    PushHeader,
    SetOptimizer,
)
from echelon.cluster.placement import KeySpec, Slot
from echelon.errors import UsageError
from echelon.kvstore import state_files
from echelon.kvstore.servers import states
from echelon.kvstore.servers.client import Client, Ticket
from echelon.kvstore.servers.clipping import ClippedRounds
from echelon.kvstore.servers.rows import Rows, RowWire, rows_of
from echelon.kvstore.servers.store_session import StoreSession
from echelon.kvstore.servers.waiting import Waiting
from echelon.kvstore.servers.wire import PLAIN, Wire
from echelon.kvstore.store import KVStore
from echelon.kvstore.values import Key, Keys, Values, as_keys
from echelon.observe.events import EventLog
from echelon.schemes import rules_for
from echelon.schemes.rules import Sharing
from echelon.server.memory import TORCH_DTYPES
from echelon.transport.interface import Transport

log = logging.getLogger(__name__)


class ServerStore(KVStore):
    """Created by `echelon.kvstore.create.join`."""

    _stores_rows = True

    def __init__(
        self,
        name: str,
        session: StoreSession,
        client: Client,
        transport: Transport,
        events: EventLog,
        *,
        staleness: int | None,
        groups: list[list[int]] | None,
        lr_scale: str,
        check_finite: bool,
    ) -> None:
        super().__init__(name, events, check_finite=check_finite)
        self._session = session
        self._client = client
        self._wire = Wire(client, len(session.servers), transport, events)
        self.rows = RowWire(client, self._wire)
        self._clipped = ClippedRounds(client, self._wire)
        self.waiting = Waiting(session, client, self._wire)
        self._halt_requested = False
        self._noticed = False  # whether a notice of the servers was logged; a later one would say the same
        self._rules = rules_for(self.kind.name, staleness, groups)
        self._wire.send_to_all(
            lambda i: Configure(i, session.rank, self.kind.name, staleness, groups, lr_scale, session.number)
        )
        session.on_finish = self.close

    # --- who and where

    @property
    def rank(self) -> int:
        return self._session.rank

    @property
    def servers(self) -> Sequence[Member]:
        """The servers of the job, by rank."""
        return self._session.servers

    @property
    def host(self) -> str:
        """The address of this worker, as groups files name it."""
        return self._session.hosts[self.rank]

    @property
    def workers(self) -> list[int]:
        return sorted(self._session.workers)

    @property
    def number(self) -> int:
        return self._session.number

    @property
    def has_siblings(self) -> bool:
        """Whether this worker has other stores open, which may belong to other Trainers."""
        return bool(self._session.siblings)

    @property
    def staleness_bound(self) -> int | None:
        """How many rounds a group may be ahead of the slowest one; None: any number."""
        return self._rules.bound

    def _described(self) -> dict[str, Any]:
        rules = self._rules
        groups = None if isinstance(rules.groups, Sharing) else rules.groups
        return {"scheme": rules.name, "groups": groups, "staleness": rules.bound}

    def traffic(self) -> dict[str, int]:
        sockets = self._client.traffic
        return {
            "pushed": self._wire.pushed_bytes,
            "pulled": self._wire.pulled_bytes,
            "sent": sockets.sent,
            "received": sockets.received,
        }

    @property
    def halted(self) -> str | None:
        return self._halted if self.kind.lock_step else self._session.halted

    @property
    def num_servers(self) -> int:
        """The number of servers that the values are spread over."""
        return self._wire.layout.num_servers

    @property
    def memory_is_shared(self) -> bool:
        """Whether all servers read and write this worker's memory in place."""
        return self._wire.memory_is_shared

    # --- the classic calls

    def push(self, key: Keys, value: Values, priority: int = 0) -> None:
        """Send values, without waiting for other workers."""
        dense, sparse = self._by_kind(self._checked(key, value))
        if dense:
            header = self._with_halt(PLAIN)
            self._wire.push(self.slots(list(dense)), list(dense.values()), header, pull=False, priority=priority)
        for name, gradient in sparse.items():
            rows = {self._slot(name).key: rows_of(gradient, add_repeated=True)}
            self.rows.push(rows, self._with_halt(PLAIN), pull=False, priority=priority)

    def pull(self, key: Keys, out: Values, priority: int = 0) -> None:
        """Wait as long as the scheme requires, then copy the weights into `out` (every tensor of a list)."""
        outs = self._targets(key, out)
        pushes = self._wire.last_pushes(self.slots(list(outs)))  # if one was refused, the pull would never be answered
        slots = [slot for slot in self.slots(list(outs)) if not slot.spec.row_sparse]
        self._wait_and_accept_halt([*pushes, *self._wire.pull(slots, priority)])
        self._copy_weights(slots, [outs[slot.spec.name] for slot in slots])
        for slot in self.slots(list(outs)):
            if slot.spec.row_sparse:
                self.rows.pull(slot, outs[slot.spec.name])

    def pushpull(self, key: Keys, value: Values, out: Values | None = None, priority: int = 0) -> None:
        """Push and pull in one message; without `out`, the weights replace the pushed values."""
        values = self._checked(key, value)
        outs = self._targets(key, value if out is None else out)
        if any(self._spec_of(name).row_sparse for name in values):
            super().pushpull(key, value, out, priority)
            return
        slots = self.slots(list(values))
        sums = list(values.values())
        self._wait_and_accept_halt(self._wire.push(slots, sums, self._with_halt(PLAIN), pull=True, priority=priority))
        self._copy_weights(slots, outs.values())

    def gather_bytes(self, part: bytes) -> dict[int, bytes | memoryview]:
        """Return the parts of all workers that take part, by rank."""
        if self.waiting.on_missed_rounds is None or self.waiting.has_retired:
            return self._exchange(part)
        return self.waiting.meet(lambda: self._exchange(part), lambda: self._exchange(b""))

    def _exchange(self, part: bytes) -> dict[int, bytes | memoryview]:
        ticket = self._client.send(0, Gather(self._client.next_id()), [part])
        self._client.wait([ticket])
        assert isinstance(ticket.response, Gathered)
        return {rank: memoryview(part) for rank, part in zip(ticket.response.ranks, ticket.frames, strict=True)}

    def _retire(self) -> None:
        self.waiting.retire()

    def _barrier(self) -> None:
        if self.waiting.on_missed_rounds is None:
            self._wait_for_workers()
        else:
            self.waiting.meet(self._wait_for_workers, self._wait_for_workers)

    def _wait_for_workers(self) -> None:
        halted = self._session.barrier()
        self._halted = self._halted or halted

    def save_optimizer_states(self, path: str | Path) -> None:
        """Write the servers' optimizer state to a safetensors file, atomically. Call it on one worker."""
        state_files.save(Path(path), self.optimizer_states(), self._optimizer())

    def load_optimizer_states(self, path: str | Path) -> None:
        """Load the state that `save_optimizer_states` wrote. Call it on one worker, then a barrier on all."""
        self.put_optimizer_states(state_files.load(Path(path), self._optimizer()), str(path))

    def optimizer_states(self) -> dict[str, Tensor]:
        """Return the servers' state as `<key>/<state>`."""
        self._optimizer()
        self._wire.wait_for_pushes()
        return states.gather(self._client, self._wire.layout)

    def put_optimizer_states(self, given: dict[str, Tensor], source: str) -> None:
        """Send the servers a state. Call it on one worker, then a barrier on all."""
        states.scatter(source, self._client, self._wire.layout, self._optimizer(), given)

    def close(self, failure: str | None = None) -> None:
        """Wait for requests in flight, then tell the others not to wait for this worker. Later calls do nothing.

        `failure` says why this worker cannot continue; it then leaves the job.
        """
        if not self._closed:
            self._closed = True
            try:
                self._wire.wait_for_pushes()
            finally:
                if failure is not None:
                    self._session.leave_job(failure)
                self._session.close()
                self._client.close()
                self.events.close()
                self.on_closed()

    # --- for the Trainer

    def views(self, key: Key) -> tuple[Tensor, Tensor]:
        """Return a key's weights and gradient in the memory that the servers map: using these copies nothing."""
        slot = self._slot(key)
        return self._wire.weight(slot), self._wire.gradient(slot)

    def memory(self) -> list[Tensor]:
        """Return all memory that gradients are sent from and weights arrive in."""
        return [block for mirror in self._wire.mirrors.values() for block in (mirror.gradients, mirror.weights)]

    def span(self, keys: Sequence[Key]) -> tuple[Tensor, Tensor]:
        """Return the gradients and the weights of adjacent keys as flat memory, with the padding between the keys."""
        slots = self.slots(keys)
        start, stop = min(slot.start for slot in slots), max(slot.start + slot.padded for slot in slots)
        if {slot.segment for slot in slots} != {slots[0].segment} or stop - start != sum(s.padded for s in slots):
            raise UsageError(f"worker {self.rank}: keys {keys[0]!r} to {keys[-1]!r} are not adjacent in memory")
        mirror = self._wire.mirrors[slots[0].segment]
        return mirror.gradients[start:stop], mirror.weights[start:stop]

    def slots(self, keys: Keys) -> list[Slot]:
        """Return where keys are stored."""
        return [self._slot(name) for name in as_keys(keys)]

    def _use_optimizer(self, spec: OptimizerSpec) -> None:
        self._wire.send_to_all(lambda i: SetOptimizer(i, spec))
        self.optimizer_spec = spec

    def push_bucket(self, slots: Sequence[Slot], header: PushHeader, priority: int = 0) -> list[Ticket]:
        """Push the gradients that are in `views`, ask for the new weights, and do not wait.

        With `header.gated`, the servers hold the update until workers call `clip`.
        """
        return self._wire.push(slots, None, self._with_halt(header), pull=True, priority=priority)

    def push_rows(self, gradients: Mapping[int, Rows], header: PushHeader) -> list[Ticket]:
        """Push rows of the gradients of row-sparse keys, ask for the rows that change, and do not wait."""
        return self.rows.push(gradients, self._with_halt(header), pull=True)

    def _with_halt(self, header: PushHeader) -> PushHeader:
        return replace(header, halt=True) if self._halt_requested else header

    @property
    def group(self) -> list[int]:
        """The living workers whose gradients are summed with this worker's before an update, itself included."""
        own = self._rules.group_of(self.rank)
        return [worker for worker in self.workers if self._rules.group_of(worker) == own]

    @property
    def sums_with_others(self) -> bool:
        """Whether the scheme sums this worker's gradients with those of others. Workers that died count, too."""
        own = self._rules.group_of(self.rank)
        return sum(self._rules.group_of(worker) == own for worker in self._session.hosts) > 1

    def clip(self, slots: Sequence[Slot], max_norm: float) -> float:
        """Clip the gated pushes of a step by the global norm of their sum over the group's workers. Return the norm.

        It waits until all workers of the group have pushed. `slots` are all keys of the step.
        """
        return self._clipped.clip(slots, max_norm)

    def wait(self, tickets: Sequence[Ticket]) -> None:
        """Wait until a bucket's push is answered. Log the servers' first notice."""
        self._client.wait(tickets)
        if not self._noticed:
            notices = (ticket.response.notice for ticket in tickets if isinstance(ticket.response, Done))
            if notice := next(filter(None, notices), ""):
                self._noticed = True
                log.warning("%s", notice)

    def is_answered(self, tickets: Sequence[Ticket]) -> bool:
        """Return whether a bucket's push is answered, without waiting."""
        return self._client.ready(tickets)

    def overwrite(self, key: Keys, value: Values) -> None:
        """Replace the weights by other values. Call it on one worker, then a barrier on all."""
        values = self._checked(key, value)
        self._wire.wait_for_pushes()
        dense = [slot for slot in self.slots(list(values)) if not slot.spec.row_sparse]
        if dense:
            self._wire.init(dense, [values[slot.spec.name] for slot in dense], overwrite=True)
        for slot in self.slots(list(values)):
            if slot.spec.row_sparse:
                self.rows.put(slot, values[slot.spec.name])

    def vector_names(self, name: str) -> list[str]:
        """Return the keys of `make_vectors`, which the optimizer must not update."""
        return [f"{name}@{rank}" for rank in self.workers]

    def make_vectors(self, name: str, length: int) -> None:
        """Create one key per worker for vectors that all workers can read. All workers call it."""
        names = self.vector_names(name)
        self.init(names, [torch.zeros(length, device="cpu")] * len(names))

    def gather_vectors(self, name: str, vector: Tensor) -> Tensor:
        """Publish this worker's vector and return those of all living workers, one row per worker. All call it."""
        self.barrier()  # some workers may still be in rounds
        tickets: list[Ticket] = []
        for rank in self.workers:
            slot = self._slot(f"{name}@{rank}")
            own = rank == self.rank
            if own:
                self._wire.gradient(slot).copy_(vector)
            tickets += self._wire.push([slot], None, PushHeader(float(own)), pull=False)
        self._client.wait(tickets)
        self._wait_for_workers()
        rows = torch.empty(len(self.workers), vector.numel(), device="cpu")
        self.pull([f"{name}@{rank}" for rank in self.workers], list(rows))
        self._wait_for_workers()
        return rows

    def _halt(self, reason: str) -> None:
        """Ask all workers to stop training; `halted` is set when they do."""
        if not self._halt_requested:
            self._session.halt(reason)
            self._halt_requested = self.kind.lock_step
            if self.kind.lock_step and self.workers == [self.rank]:
                self.accept_halt()

    def requests_halt(self, tickets: Sequence[Ticket]) -> bool:
        """Return whether the answers of a clock contain a worker's request to stop."""
        return any(isinstance(ticket.response, Done) and ticket.response.halt for ticket in tickets)

    def accept_halt(self) -> None:
        """Set `halted` to the reason for which all workers stop."""
        self._halted = self._session.wait_for_halt_reason()

    # --- internals

    def _wait_and_accept_halt(self, tickets: Sequence[Ticket]) -> None:
        self._client.wait(tickets)
        if self._halted is None and self.requests_halt(tickets):
            self.accept_halt()

    def _copy_weights(self, slots: Sequence[Slot], outs: Iterable[Sequence[Tensor]]) -> None:
        for slot, tensors in zip(slots, outs, strict=True):
            weight = self._wire.weight(slot)
            for tensor in tensors:
                if tensor.data_ptr() != weight.data_ptr():
                    tensor.detach().copy_(weight)

    def _init(self, specs: Sequence[KeySpec], values: Sequence[Tensor]) -> None:
        slots = self._wire.place(specs)
        if self.rank == min(self._session.workers):
            pairs = list(zip(slots, values, strict=True))
            if dense := [(slot, value) for slot, value in pairs if not slot.spec.row_sparse]:
                self._wire.init([slot for slot, _ in dense], [value for _, value in dense])
            for slot, value in pairs:
                if slot.spec.row_sparse:
                    self.rows.init(slot, value)
        self.barrier()

    def _by_kind(self, values: dict[Key, Tensor]) -> tuple[dict[Key, Tensor], dict[Key, Tensor]]:
        """Return the values of dense keys, and those of row-sparse keys as sparse tensors."""
        sparse = {name: value for name, value in values.items() if self._spec_of(name).row_sparse}
        dense = {name: value for name, value in values.items() if name not in sparse}
        return dense, {name: v if v.is_sparse else _all_rows(v) for name, v in sparse.items()}

    def _pull_rows(self, spec: KeySpec, rows: Tensor) -> Tensor:
        if not spec.row_sparse:
            return super()._pull_rows(spec, rows)
        slot = self._slot(spec.name)
        self._client.wait(self._wire.last_pushes([slot]))
        values = torch.empty((len(rows), *spec.shape[1:]), dtype=TORCH_DTYPES[spec.dtype], device="cpu")
        for part in self.rows.fetch(slot, rows):
            values[torch.searchsorted(rows, part.numbers)] = part.values.view(-1, *spec.shape[1:])
        return values

    def _slot(self, key: Key) -> Slot:
        slot = self._wire.layout.find(self._spec_of(key).name)
        assert slot is not None
        return slot


def _all_rows(value: Tensor) -> Tensor:
    """Return a dense value as a sparse one with all its rows."""
    numbers = torch.arange(len(value), device=value.device)
    return torch.sparse_coo_tensor(numbers[None], value, value.shape, is_coalesced=True, check_invariants=False)
