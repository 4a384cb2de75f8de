"""One server's part of the store: what it does with each request. Sending and receiving is the job of `serve`.

This module checks what all workers must agree on and dispatches requests. `pending_requests` handles pushes and pulls,
`optimization` the optimizer, `execute` the arithmetic.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from echelon.cluster.messages import (
    ApplyScaled,
    Ask,
    Attach,
    Configure,
    Done,
    Failed,
    Gather,
    GetStates,
    Init,
    MeasureNorm,
    Pause,
    Place,
    Placed,
    Pull,
    PullChanges,
    PullRows,
    Push,
    PutRows,
    PutStates,
    Request,
    Response,
    Resume,
    Resumed,
    Retire,
    SetOptimizer,
    States,
    Status,
)
from echelon.cluster.placement import ITEM_BYTES, Layout, Segment, Slot
from echelon.errors import UsageError
from echelon.schemes import Engine, Rules, rules_for
from echelon.server.execute import Storage, Task, Update, WeightedGradient
from echelon.server.frame_limits import frame_limits
from echelon.server.gathering import Gathering
from echelon.server.memory import Mapped, RequestTensors, Window, attached_tensor
from echelon.server.optimizer.kernel import NO_STEP
from echelon.server.optimizer.optimization import Optimization, PushedGradient
from echelon.server.optimizer.settings import check_header
from echelon.server.optimizer.states import ServerStates
from echelon.server.pending_requests import Answer, PendingRequests
from echelon.server.rows import PushedRows, RowMap, pushed_rows, row_numbers, row_values
from echelon.server.tables import ChangedRows, ChosenRows
from echelon.system import machine_memory

AttachMemory = Callable[[str], memoryview | None]
MAX_REASON = 4000  # characters of the answer to a rejected request


@dataclass(slots=True, eq=False)
class _Worker:
    """A worker's attached memory, and when it last pushed."""

    gradients: Mapped = field(default_factory=Mapped)
    weights: Mapped = field(default_factory=Mapped)
    last_push: float = 0.0


class Shard:
    """The keys of one server. `answer(worker, response, frames)` sends; `attach(descriptor)` maps shared memory."""

    def __init__(
        self,
        rank: int,
        num_servers: int,
        workers: Sequence[int],
        answer: Answer,
        attach: AttachMemory,
        allowed_optimizers: Collection[str] = (),
    ) -> None:
        """`allowed_optimizers`: the import paths of users' own optimizer classes that may run here."""
        self.rank = rank
        self._answer = answer
        self._attach = attach
        self._layout = Layout(num_servers, num_servers * machine_memory())
        self._tensors = RequestTensors(self._layout, rank)
        self._storage = Storage(self._layout, rank)
        self._optimization = Optimization(self._layout, allowed_optimizers)
        self._states = ServerStates(self._layout, rank, self._storage, self._optimization)
        self._workers = {worker: _Worker() for worker in workers}
        self._config: Configure | None = None
        self._requests: PendingRequests | None = None
        self._gathering = Gathering(lambda: self._configured().engine.present, answer)

    def handle(self, worker: int, request: Request, frames: Sequence[memoryview]) -> None:
        """Carry out a request, or answer why it is rejected. A rejected request changes nothing."""
        try:
            response = self._respond(worker, request, frames)
        except UsageError as error:
            response = Failed(request.id, f"server {self.rank}: {error}"[:MAX_REASON]), ()
        if response is not None:
            self._answer(worker, *response)

    def report(self) -> dict[str, Any]:
        """Return what this shard has done, and how its workers arrive, for the event log."""
        requests = self._requests
        if requests is None:
            return {"pushes": 0}
        return {
            "pushes": requests.num_pushes,
            "updates": requests.num_updates,
            "held": requests.num_held,
            "workers": requests.arrivals.report(),
            "decision": requests.decision,
        }

    def frame_limits(self, request: Request) -> tuple[int, int]:
        """Return how many frames a request can have at most, and how many bytes."""
        return frame_limits(self._layout, request)

    def leave(self, worker: int) -> str:
        """Remove a worker that is not in the view any more. Return the engine's reason."""
        self._workers.pop(worker, None)
        self._storage.tables.leave(worker)
        self._gathering.remove(worker)
        if self._requests is None:
            return ""
        reason = self._requests.remove(worker)
        self._gathering.complete()
        return reason

    def close(self, worker: int) -> None:
        """Remove a worker that has closed the store. Like one that retired, it still counts in the size of a round."""
        if self._requests is not None:
            self._requests.retire(worker)
        self.leave(worker)

    def _respond(
        self, worker: int, request: Request, frames: Sequence[memoryview]
    ) -> tuple[Response, Sequence[memoryview]] | None:
        """Return the answer, or None if PendingRequests or Gathering answers later."""
        match request:
            case Push():
                self._push(worker, request, frames)
                return None
            case Pull():
                self._pull(worker, request)
                return None
            case PullRows():
                self._pull_rows(worker, request, frames)
                return None
            case PullChanges():
                self._pull_changes(worker, request)
                return None
            case MeasureNorm():
                self._check_keys(request.keys)
                if request.max_norm is not None and not request.max_norm >= 0:
                    raise UsageError(f"gradients cannot be clipped to a norm of {request.max_norm}")
                requests = self._configured()
                requests.measure_norm(worker, request.id, request.keys, request.clock, request.max_norm)
                return None
            case Gather():
                self._configured()
                if len(frames) != 1:
                    raise UsageError(f"a part of exchanged values must be one frame; this request has {len(frames)}")
                self._gathering.add(worker, request.id, frames[0])
                return None
            case Ask():
                return self._status(worker, request), ()
            case Place():
                if self.rank:
                    raise UsageError("keys are placed by server 0")
                slots = self._layout.place(request.specs, self._optimization.needs_whole)
                return Placed(request.id, self._layout.segments, slots), ()
            case GetStates():
                entries, found = self._states.get(self._configured().lanes)
                return States(request.id, entries), found
            case Configure():
                self._configure(request)
            case Attach():
                self._attach_segment(worker, request)
            case Init():
                self._init(worker, request, frames)
            case SetOptimizer():
                has_pushes = self._requests is not None and self._requests.holds_gradients
                self._optimization.set_optimizer(request.spec, has_pushes=has_pushes)
            case PutRows():
                self._put_rows(request, frames)
            case PutStates():
                if not self._optimization.has_optimizer:
                    raise UsageError("set the optimizer before its states are loaded")
                self._states.put(self._configured().lanes, request.entries, frames)
            case ApplyScaled():
                self._check_keys(request.keys)
                if not (math.isnan(request.scale) or 0 <= request.scale <= 1):
                    raise UsageError(f"gradients cannot be clipped by a factor of {request.scale}")
                self._configured().apply_scaled(worker, request.keys, request.clock, request.scale)
            case Retire():
                self._configured().retire(worker)
                self._gathering.complete()
            case Pause():
                self._configured().pause(worker)
                self._gathering.complete()
            case Resume():
                clocks = self._configured().resume(worker)
                return Resumed(request.id, list(clocks.keys()), list(clocks.values())), ()
        return Done(request.id), ()

    # --- what all workers agree on

    def _configure(self, request: Configure) -> None:
        known = self._config
        listed = [worker for group in request.groups or () for worker in group]
        if len(set(listed)) < len(listed):
            raise UsageError(f"a worker is in two groups: {request.groups}")
        if known is None:
            engine = Engine(_rules(request), self._workers)
            self._requests = PendingRequests(engine, self._storage, self._optimization, self._answer)
            self._config = request
        elif _rules(known) != _rules(request) or known.store != request.store:
            raise UsageError(
                f"worker {known.rank} created {_described(known)}, but worker {request.rank} created "
                f"{_described(request)}; all workers must create the same store{_in_order(request.number)}"
            )

    def _attach_segment(self, worker: int, request: Attach) -> None:
        gradients, weights = self._attach(request.gradients), self._attach(request.weights)
        if gradients is None or weights is None:
            raise UsageError("the server cannot attach this worker's memory")
        self._check_placed([request.segment], [])
        with self._layout.adopting([request.segment], []):
            tensors = attached_tensor(gradients, request.segment), attached_tensor(weights, request.segment)
        memory, index = self._workers[worker], request.segment.index
        memory.gradients.segments[index], memory.weights.segments[index] = tensors

    def _init(self, worker: int, request: Init, frames: Sequence[memoryview]) -> None:
        lanes = self._configured().lanes
        self._check_placed(request.segments, request.slots)
        keys = tuple(slot.key for slot in request.slots if not slot.spec.row_sparse)
        fresh = [slot for slot in request.slots if slot.key not in lanes]
        num_segments = len(self._layout.segments)
        try:
            with self._layout.adopting(request.segments, request.slots):
                values = self._tensors.incoming(self._workers[worker].weights, keys, frames, request.framed)
                self._storage.reserve(keys)
                tables = {slot.key: self._storage.tables.make(slot.key) for slot in fresh if slot.spec.row_sparse}
        except UsageError:
            self._storage.forget(num_segments)
            self._tensors.forget()
            raise
        for slot in fresh:
            lanes.add(slot.key)
            self._optimization.add(slot.key)
        for key, table in tables.items():  # their values follow as PutRows
            self._storage.tables.add(key, table)
        written = keys if request.overwrite else tuple(slot.key for slot in fresh if not slot.spec.row_sparse)
        self._storage.run([Task(written, Update((WeightedGradient(values, 1.0),), None, NO_STEP), ())])

    def _check_placed(self, segments: Sequence[Segment], slots: Sequence[Slot]) -> None:
        """Raise UsageError for keys that occur twice, and on server 0, which places keys, for those that it did not."""
        if len({slot.key for slot in slots}) < len(slots):
            raise UsageError("a request to create keys names a key twice")
        if self.rank:
            return
        known = self._layout.segments
        for segment in segments:
            if not (segment.index < len(known) and known[segment.index] == segment):
                raise UsageError(f"{segment} is not a segment of server 0; ask it to place keys first")
        for slot in slots:
            if self._layout.slots.get(slot.key) != slot:
                raise UsageError(f"{slot} is not a slot of server 0; ask it to place key {slot.spec.name!r} first")

    # --- push and pull

    def _push(self, worker: int, request: Push, frames: Sequence[memoryview]) -> None:
        requests = self._configured()
        self._check_keys(request.keys)
        if not requests.engine.is_active(worker):
            raise UsageError("this worker has retired: it can pull, but not push")
        rules = requests.engine.rules
        if not rules.sums_over_everybody and not self._optimization.has_optimizer:
            raise UsageError(f"{rules.name} needs an optimizer on the servers: call set_optimizer before push")
        check_header(request.header)
        self._optimization.check_keys(request.keys, request.header)
        self._optimization.check_settings(request.header.lrs, request.header.settings)
        memory = self._workers[worker]
        output: Window | ChangedRows | None = None
        if request.rows:
            self._check_tables(request.keys)
            self._optimization.check_tables(request.keys, request.header.settings)
            window: Window | PushedRows = pushed_rows(self._layout, self.rank, request.keys, request.rows, frames)
            output = self._changed_rows(worker, request.keys, request.since) if request.pull else None
        else:
            self._check_dense(request.keys)
            self._optimization.check_dense(request.keys)
            window = self._tensors.pushed(memory.gradients, request, frames)
            output = self._tensors.outgoing(memory.weights, request.keys, request.framed) if request.pull else None
        pushed = PushedGradient(window, request.header)
        requests.push(worker, request.id, request.keys, request.clock, pushed, output, request.priority)
        memory.last_push = time.monotonic()

    def _pull(self, worker: int, request: Pull) -> None:
        requests = self._configured()
        self._check_keys(request.keys)
        self._check_dense(request.keys)
        output = self._tensors.outgoing(self._workers[worker].weights, request.keys, request.framed)
        requests.pull(worker, request.id, request.keys, request.clock, output, request.priority)

    # --- tables: keys that travel by rows

    def _pull_rows(self, worker: int, request: PullRows, frames: Sequence[memoryview]) -> None:
        requests = self._configured()
        self._check_tables([request.key])
        if len(frames) != 1:
            raise UsageError(f"a request for rows must have one frame with their numbers; this one has {len(frames)}")
        rows = row_numbers(self._layout.slots[request.key], self._num_rows(request.key), frames[0])
        output = ChosenRows(self._storage.tables, request.key, rows)
        requests.pull(worker, request.id, [request.key], request.clock, output)

    def _pull_changes(self, worker: int, request: PullChanges) -> None:
        requests = self._configured()
        self._check_tables(request.keys)
        output = self._changed_rows(worker, request.keys, request.since)
        requests.pull(worker, request.id, request.keys, request.clock, output)

    def _put_rows(self, request: PutRows, frames: Sequence[memoryview]) -> None:
        self._check_tables([request.key])
        slot = self._layout.slots[request.key]
        row = self._layout.segments[slot.segment].row * ITEM_BYTES[slot.spec.dtype]
        count = sum(map(len, frames)) // row
        if len(frames) != 1 or request.start < 0 or request.start + count > self._num_rows(request.key):
            raise UsageError(
                f"key {slot.spec.name!r}: {len(frames)} frames for rows {request.start} to "
                f"{request.start + count - 1}, but this server stores rows 0 to {self._num_rows(request.key) - 1}"
            )
        self._storage.tables.put(request.key, request.start, row_values(slot, count, frames[0]))

    def _changed_rows(self, worker: int, keys: Sequence[int], since: Sequence[int]) -> ChangedRows:
        if len(since) != len(keys):
            raise UsageError(f"a request for the changed rows of {len(keys)} keys names {len(since)} versions")
        return ChangedRows(self._storage.tables, worker, dict(zip(keys, since, strict=True)))

    def _num_rows(self, key: int) -> int:
        return RowMap.of(self._layout.slots[key], self._layout).count(self.rank)

    def _check_tables(self, keys: Sequence[int]) -> None:
        self._check_keys(keys)
        for key in keys:
            if key not in self._storage.tables:
                raise UsageError(f"key {self._layout.slots[key].spec.name!r} is not row-sparse: push and pull it whole")

    def _check_dense(self, keys: Sequence[int]) -> None:
        for key in self._storage.tables.among(keys):
            raise UsageError(f"key {self._layout.slots[key].spec.name!r} is row-sparse: push and pull its rows")

    def _check_keys(self, keys: Sequence[int]) -> None:
        lanes = self._configured().lanes
        if lanes.has_seen(keys):
            return
        if not keys or len(set(keys)) < len(keys):
            raise UsageError(
                f"a request must name at least one key, and each key once; this one names {len(keys)} keys, of which "
                f"{len(set(keys))} are different"
            )
        for key in keys:
            if key not in lanes:
                slot = self._layout.slots.get(key)
                name = repr(slot.spec.name) if slot else f"number {key}"
                raise UsageError(f"key {name} is not initialised; call init before push or pull")

    def _configured(self) -> PendingRequests:
        if self._requests is None:
            raise UsageError("no store has been created yet")
        if self._requests.damage:
            raise UsageError(f"this store cannot continue, because an update failed: {self._requests.damage}")
        return self._requests

    # --- status

    def _status(self, worker: int, request: Ask) -> Status:
        requests = self._configured()
        if self._gathering.holds(worker, request.about):
            who = ", ".join(f"worker {other}" for other in self._gathering.missing())
            return Status(request.id, request.about, True, f"server {self.rank} gathers values, and waits for {who}")
        if pending := requests.find(worker, request.about):
            lane, clock = next(iter(pending.waiting)), pending.clock
        elif norm := requests.waiting_norm(worker, request.about):
            lane, clock = norm
        else:
            return Status(request.id, request.about, False, "")
        missing = requests.engine.missing(worker, lane, clock)
        who = ", ".join(self._late(other, clock) for other, clock in missing.items())
        keys = requests.lanes.keys(lane)
        more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
        name = f"{self._layout.slots[keys[0]].spec.name!r}{more}"
        if not who:
            who = "the norm of all gradients" if requests.engine.waits_for_release(worker, lane) else "nobody"
        text = f"server {self.rank} holds key {name} at clock {clock} for {who}"
        return Status(request.id, request.about, True, text)

    def _late(self, worker: int, clock: int) -> str:
        last = self._workers[worker].last_push
        ago = f"last push {time.monotonic() - last:.1f} s ago" if last else "no push yet"
        return f"worker {worker} to push clock {clock} ({ago})"


def _rules(config: Configure) -> Rules:
    return rules_for(config.store, config.staleness, config.groups, config.lr_scale)


def _in_order(number: int) -> str:
    return f"s in the same order: this is store {number} of each, counted from 0" if number else ""


def _described(config: Configure) -> str:
    dials = [f"staleness={config.staleness}"] if config.staleness is not None else []
    dials += [f"groups={config.groups}"] if config.groups else []
    dials += [f"lr_scale={config.lr_scale!r}"] if config.lr_scale != "share" else []
    return f"{config.store}({', '.join(dials)})"
