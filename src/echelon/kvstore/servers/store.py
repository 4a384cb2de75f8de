"""A store that keeps its values on servers: `dist_sync` and the schemes that wait less.

The weights and the gradient of a key have a place in memory that the servers on this machine map (`views`). Pushing and
pulling these tensors copies nothing; any other tensor is copied in and out.

The scheduler sends a request to stop training to all workers. Under `dist_sync`, where all workers make the same steps,
the request is also part of a push. All workers then find it in the answers of the same clock (`requests_halt`), and
none of them makes a step that the others do not make.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from msgspec.structs import replace
from torch import Tensor

from echelon.cluster.messages import (
    Configure,
    Configured,
    Done,
    Gather,
    Gathered,
    GiveValues,
    Member,
    OpenLedger,
    OptimizerSpec,
    PushHeader,
    SetOptimizer,
    TakeValues,
    Work,
)
from echelon.cluster.placement import KeySpec, Slot
from echelon.errors import UsageError, WorkerRemoved
from echelon.kvstore import state_files
from echelon.kvstore.servers import states
from echelon.kvstore.servers.client import Client, Ticket
from echelon.kvstore.servers.clipping import ClippedRounds
from echelon.kvstore.servers.leases import ServerLeases
from echelon.kvstore.servers.rows import Rows, RowWire, rows_of
from echelon.kvstore.servers.store_session import StoreSession
from echelon.kvstore.servers.waiting import Waiting
from echelon.kvstore.servers.wire import PLAIN, Wire
from echelon.kvstore.store import KVStore
from echelon.kvstore.values import Key, Keys, Values, as_keys
from echelon.observe.events import EventLog
from echelon.schemes import has_settings, rules_for
from echelon.schemes.rules import Sharing
from echelon.server.storage.memory import TORCH_DTYPES
from echelon.transport.interface import Transport

log = logging.getLogger(__name__)

T = TypeVar("T")

GIVE_S = 60.0  # that a worker which joins waits for the values of another one
ASK_AGAIN_S = 2.0
GREET_AGAIN_S = 0.2


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
        self._transport = transport
        self._wire = Wire(client, len(session.slice_addresses), transport, events)
        self.rows = RowWire(client, self._wire)
        self._clipped = ClippedRounds(client, self._wire)
        self.waiting = Waiting(session, client, self._wire, lock_step=self.kind.lock_step)
        self._halt_requested = False
        self.on_ledger: Callable[[], None] = lambda: None  # called when a ledger is opened
        self.work: list[Work] = []  # the samples of the pushes that follow, if a ledger gave them
        self._noticed = False  # whether a notice of the servers was logged; a later one would say the same
        self._settings = staleness, groups, lr_scale
        self._greet()
        session.on_finish = self.close

    def _greet(self) -> None:
        """Tell the servers who this worker is. A late one takes over their settings, and joins at once if nobody began.

        A server that is being rebuilt does not know them yet, so a late worker without settings asks until one does.
        """
        staleness, groups, lr_scale = self._settings
        session, late = self._session, self._session.joined_late
        self.waiting.takes_part = not self.is_late  # a server that is being rebuilt asks during the greeting

        def greeting(slice_number: int) -> Configure:
            request, kind = self._client.next_id(), self.kind.name
            return Configure(
                request, session.rank, kind, staleness, groups, lr_scale, session.number, slice_number, late
            )

        known = _configured(self._client.greet(greeting))
        while known is None and late and not has_settings(self.kind.name, staleness, groups):
            time.sleep(GREET_AGAIN_S)
            known = _configured(self._client.greet(greeting))
        if known is not None:
            groups, staleness = known.groups, known.staleness  # `greeting` sends them to other servers later
        self._rules = rules_for(self.kind.name, staleness, groups)
        self._wire.offer_all()
        self.waiting.takes_part = not late
        if late and not self.is_late:
            self.join()

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
    def is_first(self) -> bool:
        """Whether no other worker has been in the job for longer, or as long and with a lower rank.

        A worker that was told to end and has left is not the first one, whatever its rank.
        """
        return not (self._session.has_elders or self._session.was_told_to_leave)

    @property
    def survives_deaths(self) -> bool:
        return True

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

    @property
    def is_tight(self) -> bool:
        """Whether a worker that is two rounds ahead waits for others here: for its group, or because of the bound."""
        group_of = self._rules.group_of
        has_group = any(group_of(worker) == group_of(self.rank) for worker in self.workers if worker != self.rank)
        return has_group or (self._rules.bound is not None and self._rules.bound < 2)

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
    def may_leave(self) -> bool:
        return self._session.may_leave

    def announce_leaving(self, reason: str) -> None:
        """Say that this worker was told to end. The scheduler answers with `may_leave`, or halts all workers."""
        self._session.announce_leaving(reason)

    def leave_as_told(self) -> None:
        """Close all stores of this worker and leave the job, after `may_leave`. The others do not wait for it.

        Later calls that need the job end the program with status 0 (WorkerLeft).
        """
        self._session.leave_as_told()

    @property
    def has_left(self) -> bool:
        """Whether this worker was told to end, and has left the job."""
        return self._session.was_told_to_leave

    def _check_open(self) -> None:
        if self._session.was_told_to_leave:
            self._session.check_joined()
        super()._check_open()

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
        self.take_part()
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
        self.take_part()
        slots = self.slots(list(values))
        sums = list(values.values())
        self._wait_and_accept_halt(self._wire.push(slots, sums, self._with_halt(PLAIN), pull=True, priority=priority))
        self._copy_weights(slots, outs.values())

    def report_defect(self, reason: str) -> None:
        """Tell the scheduler why the result is not whole: the job ends with another status than 0."""
        self._session.report_defect(reason)

    def gather_bytes(self, part: bytes, about: str = "") -> dict[int, bytes | memoryview]:
        """Return the parts of all workers that take part, by rank. Parts about different things are kept apart."""

        def exchange() -> tuple[dict[int, bytes | memoryview], list[int]]:
            parts = self._exchange(part, about)
            return parts, list(parts)

        def gather() -> dict[int, bytes | memoryview]:
            self.take_part()
            if self.waiting.on_missed_rounds is None or self.waiting.has_retired:
                return self._exchange(part, about)
            return self.waiting.meet(exchange)

        return self.survive(gather)

    def _exchange(self, part: bytes, about: str) -> dict[int, bytes | memoryview]:
        ticket = self._client.send(0, Gather(self._client.next_id(), about), [part])
        self._client.wait([ticket])
        assert isinstance(ticket.response, Gathered)
        return {rank: memoryview(part) for rank, part in zip(ticket.response.ranks, ticket.frames, strict=True)}

    def _retire(self) -> None:
        self.waiting.retire()

    def _barrier(self) -> None:
        def wait() -> None:
            if self.is_late:
                return  # the others set up their stores long ago
            if self.waiting.on_missed_rounds is None:
                self._wait_for_workers()
            else:
                self.waiting.meet(self._wait_for_workers)

        self.survive(wait)

    def survive(self, call: Callable[[], T]) -> T:
        """Call what waits for other processes, again if the scheduler has removed this worker and it joined again."""
        while True:
            try:
                return call()
            except WorkerRemoved as error:
                if self.waiting.on_removed is None:
                    raise
                log.warning("%s", error)
                self.waiting.on_removed()

    def meet(self) -> list[int]:
        """Wait until all living workers have called this, however long one that lives takes. Return who they were."""
        self._check_open()
        self._session.barrier(self._client.stall_seconds)
        return sorted(self._session.workers_at_barrier)

    def _wait_for_workers(self) -> tuple[None, list[int]]:
        """Wait for all workers. Return which have waited."""
        halted = self._session.barrier()
        self._halted = self._halted or halted
        return None, self._session.workers_at_barrier

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

    # --- workers that join a running job

    @property
    def is_late(self) -> bool:
        """Whether this worker has joined a job that was running, and does not take part in the rounds yet.

        It waits for nobody, and nobody waits for it. What it sets up must be what the others have set up.
        """
        return self._session.is_late

    def join(self) -> None:
        """Take part in the rounds from the next one on. Only for a worker that is late or paused."""
        self._session.join()
        self.waiting.join()

    def take_part(self) -> None:
        """Join the others before the first call that concerns them, and fetch the weights of the round."""
        if not self.waiting.takes_part:
            self.join()

    def rejoin(self) -> None:
        """Connect to the servers again as a late worker, after the scheduler removed this one. Pushes are lost.

        Of the others, all continue. `take_part` or the next push joins their rounds.
        """
        self._session.rejoin()
        self._client.restart(self._session.connect(self._transport))
        self._wire.restart()
        self.rows.restart()
        self._clipped.restart()
        self.waiting.restart()
        self._greet()

    @property
    def has_newcomers(self) -> bool:
        """Whether workers have joined since the last `give_values`, and this worker is the one that gives."""
        return self._session.has_newcomers and self.is_first

    def give_values(self, values: Sequence[memoryview]) -> None:
        """Send what workers that have joined need besides the keys. It does not wait."""
        self._session.has_newcomers = False
        self._client.send(0, GiveValues(self._client.next_id(), self._session.view), values)

    def take_values(self) -> Sequence[memoryview] | None:
        """Return what another worker has given after this one joined. None: nobody has, and nobody is left to."""
        view, deadline = self._session.view, time.monotonic() + GIVE_S
        while self._session.has_elders and time.monotonic() < deadline:
            ticket = self._client.send(0, TakeValues(self._client.next_id(), view))
            if self._client.wait_briefly([ticket], ASK_AGAIN_S):
                self._client.wait([ticket])
                return [memoryview(frame) for frame in ticket.frames]
        return None

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
        self._wire.optimizer = spec
        self.optimizer_spec = spec

    def push_bucket(self, slots: Sequence[Slot], header: PushHeader, priority: int = 0) -> list[Ticket]:
        """Push the gradients that are in `views`, ask for the new weights, and do not wait.

        With `header.gated`, the servers hold the update until workers call `clip`.
        """
        return self._wire.push(slots, None, self._of_step(header), pull=True, priority=priority)

    def push_rows(self, gradients: Mapping[int, Rows], header: PushHeader) -> list[Ticket]:
        """Push rows of the gradients of row-sparse keys, ask for the rows that change, and do not wait."""
        return self.rows.push(gradients, self._of_step(header), pull=True)

    def _of_step(self, header: PushHeader) -> PushHeader:
        header = self._with_halt(header)
        return replace(header, work=self.work) if self.work else header

    def _with_halt(self, header: PushHeader) -> PushHeader:
        """Let a push ask all workers to stop at its clock, if this worker or the scheduler does."""
        asks = self._halt_requested or (self.kind.lock_step and self._session.halted is not None)
        return replace(header, halt=True) if asks else header

    def open_leases(self, opened: OpenLedger) -> ServerLeases:
        """Open the next ledger of the store. All workers open the same ones, in the same order."""
        opened = replace(opened, store=self.number, ledger=self._session.num_ledgers, lock_step=self.kind.lock_step)
        self._session.num_ledgers += 1
        self.on_ledger()
        return ServerLeases(
            opened,
            self._session,
            pause=self._pause_all,
            join=self._join_all,
            survive=self.survive,
            stall_seconds=self._client.stall_seconds,
        )

    def _pause_all(self) -> None:
        """Let others make rounds without this worker, also those of its other Trainers."""
        self.waiting.pause()
        for sibling in self._session.siblings:
            sibling.pause()

    def _join_all(self) -> None:
        """Take part again after `_pause_all`."""
        self.waiting.join()
        for sibling in self._session.siblings:
            sibling.resume([])

    @property
    def clock(self) -> int:
        """The clock of the next step's pushes."""
        return self._wire.newest_clock

    @property
    def group(self) -> list[int]:
        """The living workers whose gradients are summed with this worker's before an update, itself included."""
        own = self._rules.group_of(self.rank)
        return [worker for worker in self.workers if self._rules.group_of(worker) == own]

    @property
    def sums_with_others(self) -> bool:
        """Whether the scheme sums this worker's gradients with those of others.

        Workers that have left or may still join count, too: all workers get the same answer, whenever they ask.
        """
        own = self._rules.group_of(self.rank)
        return any(self._rules.group_of(rank) == own for rank in self._session.ranks if rank != self.rank)

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
        pairs = list(zip(slots, values, strict=True))
        dense = [(slot, value) for slot, value in pairs if not slot.spec.row_sparse]
        if dense and (self.is_first or self.is_late):  # servers keep the first values; the others may send theirs later
            self._wire.init([slot for slot, _ in dense], [value for _, value in dense])
        for slot, value in pairs:
            if slot.spec.row_sparse and self.is_late:
                self.rows.wait_until_created(slot)
            elif slot.spec.row_sparse and self.is_first:
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


def _configured(answers: Iterable[object]) -> Configured | None:
    """Return the first answer with the settings of the store. None: all servers are being rebuilt."""
    return next((answer for answer in answers if isinstance(answer, Configured)), None)


def _all_rows(value: Tensor) -> Tensor:
    """Return a dense value as a sparse one with all its rows."""
    numbers = torch.arange(len(value), device=value.device)
    return torch.sparse_coo_tensor(numbers[None], value, value.shape, is_coalesced=True, check_invariants=False)
