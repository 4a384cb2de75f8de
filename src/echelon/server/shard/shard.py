"""One server's part of the store: what it does with each request. Sending and receiving is the job of `serve`.

This module checks what all workers must agree on and dispatches requests. `pending_requests` handles pushes and pulls,
`optimization` the optimizer, `execute` the arithmetic.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from echelon.cluster.messages import (
    ApplyScaled,
    Ask,
    Attach,
    Configure,
    Configured,
    Done,
    Failed,
    Gather,
    GetStates,
    GiveValues,
    Init,
    Join,
    Joined,
    MeasureNorm,
    NotFinite,
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
    Restore,
    Resume,
    Retire,
    SetOptimizer,
    States,
    Status,
    TakeValues,
    shorten,
)
from echelon.cluster.placement import ITEM_BYTES, Layout, Segment, Slot
from echelon.errors import UsageError
from echelon.observe.history import ShardHistory
from echelon.schemes import Engine, Rules, rules_for
from echelon.server.optimizer.kernel import NO_STEP
from echelon.server.optimizer.settings import check_header
from echelon.server.shard.answer import Answer
from echelon.server.shard.frame_limits import frame_limits
from echelon.server.shard.gathering import Gatherings
from echelon.server.shard.newcomers import ValuesForNewcomers
from echelon.server.shard.pending_requests import PendingRequests
from echelon.server.shard.room import Need
from echelon.server.shard.snapshot import restore, with_frames
from echelon.server.shard.work import AppliedWork
from echelon.server.storage.execute import Storage, Task, Update, WeightedGradient
from echelon.server.storage.finite import Finding
from echelon.server.storage.memory import NOWHERE, Mapped, RequestTensors, Window, attached_tensor
from echelon.server.storage.optimization import Optimization, PushedGradient
from echelon.server.storage.rows import PushedRows, RowMap, pushed_rows, row_numbers, row_values
from echelon.server.storage.states import ServerStates
from echelon.server.storage.tables import ChangedRows, ChosenRows
from echelon.server.storage.write_log import attached_log
from echelon.system import machine_memory

AttachMemory = Callable[[str], memoryview | None]
_Answered = tuple[Response, Sequence[memoryview]]
MAX_REASON = 4000  # characters of the answer to a rejected request
_Change = Init | PutRows | PutStates | SetOptimizer | Pause | Retire  # a late copy must not undo later ones
_MAX_REMEMBERED = 1024  # changes per worker whose copies are recognised


@dataclass(slots=True, eq=False)
class _Worker:
    """The token of a worker's process, its attached memory, and when it last pushed."""

    token: str = ""
    offered: dict[int, Attach] = field(default_factory=dict)  # by segment
    gradients: Mapped = field(default_factory=Mapped)
    weights: Mapped = field(default_factory=Mapped)
    last_push: float = 0.0
    changes: dict[int, None] = field(default_factory=dict)  # the requests that were carried out, the oldest first

    def remember(self, change: int) -> None:
        """Record a change, so that a copy of the request that arrives later has no effect."""
        self.changes[change] = None
        if len(self.changes) > _MAX_REMEMBERED:
            del self.changes[next(iter(self.changes))]


class Shard:
    """The keys of one server. `answer(worker, response, frames)` sends; `attach(descriptor)` maps shared memory."""

    def __init__(
        self,
        rank: int,
        num_servers: int,
        workers: Mapping[int, str],
        answer: Answer,
        attach: AttachMemory,
        allowed_optimizers: Collection[str] = (),
    ) -> None:
        """`workers`: their ranks, and the token of each one's process.

        `allowed_optimizers`: the import paths of users' own optimizer classes that may run here.
        """
        self.rank = rank
        self._answer = answer
        self._attach = attach
        self.layout = Layout(num_servers, num_servers * machine_memory())
        self.tensors = RequestTensors(self.layout, rank)
        self.storage = Storage(self.layout, rank)
        self.optimization = Optimization(self.layout, allowed_optimizers)
        self.states = ServerStates(self.layout, rank, self.storage, self.optimization)
        self._workers = {worker: _Worker(token) for worker, token in workers.items()}
        self.is_passive = False  # it is the backup's: it answers nothing and writes no weights to workers
        self.history: ShardHistory | None = None  # set if it is recorded
        self.config: Configure | None = None
        self.requests: PendingRequests | None = None
        self.gathering = Gatherings(lambda: self._configured().engine.present, answer)
        self._values = ValuesForNewcomers(answer)

    def handle(self, worker: int, request: Request, frames: Sequence[memoryview]) -> None:
        """Carry out a request, or answer why it is rejected. A rejected request changes nothing."""
        memory = self._workers.get(worker)
        change = request if isinstance(request, _Change) and memory is not None else None
        response: _Answered | None
        try:
            if memory is not None and change is not None and change.id in memory.changes:
                response = Done(change.id), ()  # its answer was lost, or a copy of it is late
            else:
                response = self._respond(worker, request, frames)
                if memory is not None and change is not None:
                    memory.remember(change.id)
        except UsageError as error:
            response = Failed(request.id, f"server {self.rank}: {error}"[:MAX_REASON]), ()
        if response is not None:
            self._answer(worker, *response)

    def report(self) -> dict[str, Any]:
        """Return what this shard has done, and how its workers arrive, for the event log."""
        requests = self.requests
        if requests is None:
            return {"pushes": 0}
        return requests.activity.report(requests.waiting.count)

    def take_findings(self) -> list[NotFinite]:
        """Return the keys that have got NaN or infinity since the last call, each with the push that brought it."""
        return [self._described(finding) for finding in self.storage.finite.take()]

    def final_defects(self) -> list[NotFinite]:
        """Return the keys with an optimizer whose values have NaN or infinity now, when the store ends."""
        if self.requests is None or not self.optimization.has_optimizer:
            return []
        keys = [key for key in self.requests.lanes.all() if self.optimization.kernel(key) is not None]
        first = self.storage.finite.first
        bad = self.storage.not_finite(keys)
        return [self._described(first.get(key, Finding(key, None, None))) for key in bad]

    def _described(self, finding: Finding) -> NotFinite:
        name = shorten(str(self.layout.slots[finding.key].spec.name))
        return NotFinite(self.config.number if self.config else 0, name, finding.worker, finding.clock)

    @property
    def workers(self) -> dict[int, str]:
        """The workers that use the store, and the token of each one's process."""
        return {worker: one.token for worker, one in self._workers.items()}

    def admit(self, worker: int, token: str = "") -> None:
        """Let a worker that has joined the job use the store."""
        self._workers[worker] = _Worker(token)
        self.gathering.admit(worker)

    def attached(self) -> list[tuple[int, Attach]]:
        """Return the memory that workers have offered, with their ranks."""
        return [(worker, offer) for worker, memory in self._workers.items() for offer in memory.offered.values()]

    def promote(self) -> None:
        """Answer workers from now on. Requests without an answer are forgotten, because their workers repeat them."""
        self.is_passive = False
        if self.requests is not None:
            self.requests.promote()

    def as_frames(self, worker: int, request: Request) -> tuple[Request, list[memoryview]] | None:
        """Return a request with frames in place of this worker's shared memory; None: it needs none."""
        if isinstance(request, Pull) and not request.framed:
            return replace(request, framed=True), []
        if isinstance(request, Push) and not request.framed:
            return replace(request, framed=True), self.tensors.pushed_frames(self._workers[worker].gradients, request)
        if isinstance(request, Init) and not request.framed:
            keys = [slot.key for slot in request.slots if not slot.spec.row_sparse]
            with self.layout.adopting(request.segments, request.slots):
                return replace(request, framed=True), self.tensors.frames(self._workers[worker].weights, keys)
        return None

    @property
    def held_bytes(self) -> int:
        """The bytes that requests without an answer keep in this process."""
        return 0 if self.requests is None else self.requests.waiting.held_bytes

    def need_for(self, worker: int, request: Push) -> Need:
        """Return whether something here goes on with a push of a worker. Invalid ones are refused at once."""
        if self.requests is None or not all(key in self.requests.lanes for key in request.keys):
            return Need.THIS
        need = self.requests.need_for(worker, request.keys, request.clock)
        return Need.LATER if need is Need.NONE and self.gathering.waits_for(worker) else need

    def frame_limits(self, request: Request) -> tuple[int, int]:
        """Return how many frames a request can have at most, and how many bytes."""
        return frame_limits(self.layout, request)

    def leave(self, worker: int, view: int = 0) -> str:
        """Remove a worker that is not in the view any more. Return the engine's reason.

        It may live, and write to its memory when it has joined again, while its last push still waits for its round.
        """
        if self.requests is not None:
            self.requests.copy_gradients(worker, lambda one: self.gradient_of(*with_frames(self, one)))
        self._workers.pop(worker, None)
        self.storage.tables.leave(worker)
        self.gathering.remove(worker)
        self._values.remove(worker)
        if self.requests is None:
            return ""
        reason = self.requests.remove(worker, view)
        self.gathering.complete()
        return reason

    def close(self, worker: int, view: int = 0) -> None:
        """Remove a worker that has closed the store. Like one that retired, it still counts in the size of a round."""
        if self.requests is not None:
            self.requests.retire(worker)
        self.leave(worker, view)

    @property
    def work(self) -> AppliedWork | None:
        """Which samples were trained; None: no worker has configured the store yet."""
        return None if self.requests is None else self.requests.work

    def _respond(self, worker: int, request: Request, frames: Sequence[memoryview]) -> _Answered | None:
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
                self.gathering.add(worker, request.id, frames[0], request.about)
                return None
            case TakeValues():
                self._values.take(worker, request.id, request.view)
                return None
            case Ask():
                return self._status(worker, request), ()
            case Place():
                if self.rank:
                    raise UsageError("keys are placed by server 0")
                slots = self.layout.place(request.specs, self.optimization.needs_whole)
                return Placed(request.id, self.layout.segments, slots), ()
            case GetStates():
                entries, found = self.states.get(self._configured().lanes)
                return States(request.id, entries), found
            case Configure():
                known = self.configure(request)
                if request.late:
                    return Configured(request.id, known.groups, known.staleness), ()
            case Restore():
                restore(self, request, frames)
            case Attach():
                self._attach_segment(worker, request)
            case Init():
                self._init(worker, request, frames)
            case SetOptimizer():
                has_pushes = self.requests is not None and self.requests.holds_gradients
                self.optimization.set_optimizer(request.spec, has_pushes=has_pushes)
            case PutRows():
                self._put_rows(request, frames)
            case PutStates():
                if not self.optimization.has_optimizer:
                    raise UsageError("set the optimizer before its states are loaded")
                self.states.put(self._configured().lanes, request.entries, frames)
            case ApplyScaled():
                self._check_keys(request.keys)
                if not (math.isnan(request.scale) or 0 <= request.scale <= 1):
                    raise UsageError(f"gradients cannot be clipped by a factor of {request.scale}")
                self._configured().apply_scaled(worker, request.keys, request.clock, request.scale)
            case GiveValues():
                self._values.give(request.view, frames)
            case Retire():
                self._configured().retire(worker)
                self.gathering.complete()
            case Pause():
                self._configured().pause(worker)
                self.gathering.complete()
            case Resume():
                self._configured().resuming.add(worker, request.id, request.workers)
                return None
            case Join(_, first, firsts):
                return self._join(worker, request.id, first, firsts), ()
        return Done(request.id), ()

    # --- what all workers agree on

    def configure(self, request: Configure) -> Configure:
        """Compare what a worker creates with what the first one created, which is returned."""
        known = self.config
        listed = [worker for group in request.groups or () for worker in group]
        if len(set(listed)) < len(listed):
            raise UsageError(f"a worker is in two groups: {request.groups}")
        if known is not None and request.late:
            # It cannot know the hosts of workers that have left, and `echelon join` gives it no bound.
            bound = known.staleness if request.staleness is None else request.staleness
            request = replace(request, groups=known.groups, staleness=bound)
        if known is None:
            engine = Engine(_rules(request), self._workers)
            self.requests = PendingRequests(engine, self.storage, self.optimization, self._answer)
            self.requests.is_passive = self.is_passive
            self.requests.history = self.history
            self.config = known = request
            if self.history is not None:
                self.history.begin(engine)
        elif _rules(known) != _rules(request) or known.store != request.store:
            raise UsageError(
                f"worker {known.rank} created {_described(known)}, but worker {request.rank} created "
                f"{_described(request)}; all workers must create the same store{_in_order(request.number)}"
            )
        return known

    def _attach_segment(self, worker: int, request: Attach) -> None:
        gradients, weights = self._attach(request.gradients), self._attach(request.weights)
        log = self._attach(request.log) if request.log else None
        if gradients is None or weights is None or (log is None and request.log):
            raise UsageError("the server cannot attach this worker's memory")
        self._check_placed([request.segment], [])
        with self.layout.adopting([request.segment], []):
            tensors = attached_tensor(gradients, request.segment), attached_tensor(weights, request.segment)
        memory, index = self._workers[worker], request.segment.index
        memory.gradients.segments[index], memory.weights.segments[index] = tensors
        memory.weights.log = attached_log(log) if log is not None else None
        memory.offered[index] = request

    def _init(self, worker: int, request: Init, frames: Sequence[memoryview]) -> None:
        lanes = self._configured().lanes
        self._check_placed(request.segments, request.slots)
        keys = tuple(slot.key for slot in request.slots if not slot.spec.row_sparse)
        fresh = [slot for slot in request.slots if slot.key not in lanes]
        num_segments = len(self.layout.segments)
        try:
            with self.layout.adopting(request.segments, request.slots):
                values = self.tensors.incoming(self._workers[worker].weights, keys, frames, request.framed)
                self.storage.reserve(keys)
                tables = {slot.key: self.storage.tables.make(slot.key) for slot in fresh if slot.spec.row_sparse}
        except UsageError:
            self.storage.forget(num_segments)
            self.tensors.forget()
            raise
        for slot in fresh:
            lanes.add(slot.key)
            self.optimization.add(slot.key)
        for key, table in tables.items():  # their values follow as PutRows
            self.storage.tables.add(key, table)
        self.storage.finite.forget(keys if request.overwrite else ())
        written = keys if request.overwrite else tuple(slot.key for slot in fresh if not slot.spec.row_sparse)
        self.storage.run([Task(written, Update((WeightedGradient(values, 1.0),), None, NO_STEP), ())])

    def _check_placed(self, segments: Sequence[Segment], slots: Sequence[Slot]) -> None:
        """Raise UsageError for keys that occur twice, and on server 0, which places keys, for those that it did not."""
        if len({slot.key for slot in slots}) < len(slots):
            raise UsageError("a request to create keys names a key twice")
        if self.rank:
            return
        known = self.layout.segments
        for segment in segments:
            if not (segment.index < len(known) and known[segment.index] == segment):
                raise UsageError(f"{segment} is not a segment of server 0; ask it to place keys first")
        for slot in slots:
            if self.layout.slots.get(slot.key) != slot:
                raise UsageError(f"{slot} is not a slot of server 0; ask it to place key {slot.spec.name!r} first")

    # --- push and pull

    def _push(self, worker: int, request: Push, frames: Sequence[memoryview]) -> None:
        requests = self._configured()
        self._check_keys(request.keys)
        if not requests.engine.is_active(worker):
            raise UsageError("this worker has retired: it can pull, but not push")
        rules = requests.engine.rules
        if not rules.sums_over_everybody and not self.optimization.has_optimizer:
            raise UsageError(f"{rules.name} needs an optimizer on the servers: call set_optimizer before push")
        check_header(request.header)
        self.optimization.check_keys(request.keys, request.header)
        self.optimization.check_settings(request.header.lrs, request.header.settings)
        memory = self._workers[worker]
        output: Window | ChangedRows | None = None
        if request.rows:
            self._check_tables(request.keys)
            self.optimization.check_tables(request.keys, request.header.settings)
            output = self._changed_rows(worker, request.keys, request.since) if request.pull else None
        else:
            self._check_dense(request.keys)
            self.optimization.check_dense(request.keys)
            output = self._output(memory, request.keys, request.framed) if request.pull else None
        pushed = self.gradient_of(request, frames, memory.gradients)
        requests.push(worker, request.id, request.keys, request.clock, pushed, output, request.priority)
        memory.last_push = time.monotonic()
        if self.gathering.is_new(worker) and len(requests.engine.workers) > 1:
            self.gathering.settle(worker)

    def gradient_of(self, push: Push, frames: Sequence[memoryview], memory: Mapped | None = None) -> PushedGradient:
        """Return the gradient of a push, which is in its frames or in its worker's memory."""
        if push.rows:
            window: Window | PushedRows = pushed_rows(self.layout, self.rank, push.keys, push.rows, frames)
        else:
            window = self.tensors.pushed(memory or Mapped(), push, frames)
        return PushedGradient(window, push.header, push, frames)

    def _pull(self, worker: int, request: Pull) -> None:
        requests = self._configured()
        self._check_keys(request.keys)
        self._check_dense(request.keys)
        output = self._output(self._workers[worker], request.keys, request.framed)
        requests.pull(worker, request.id, request.keys, request.clock, output, request.priority)

    def _output(self, memory: _Worker, keys: Sequence[int], framed: bool) -> Window:
        """Return where the weights of an answer go."""
        return NOWHERE if self.is_passive else self.tensors.outgoing(memory.weights, keys, framed)

    def _join(self, worker: int, request: int, first: int | None, firsts: Mapping[int, int]) -> Joined:
        requests = self._configured()
        if first is None or not requests.join(worker, first, firsts):
            return Joined(request, False, requests.next_clocks(worker))
        if not any(True for _ in requests.lanes.all()):
            self.gathering.settle(worker)
        return Joined(request, True)

    # --- tables: keys that travel by rows

    def _pull_rows(self, worker: int, request: PullRows, frames: Sequence[memoryview]) -> None:
        requests = self._configured()
        self._check_tables([request.key])
        if len(frames) != 1:
            raise UsageError(f"a request for rows must have one frame with their numbers; this one has {len(frames)}")
        rows = row_numbers(self.layout.slots[request.key], self._num_rows(request.key), frames[0])
        output = ChosenRows(self.storage.tables, request.key, rows)
        requests.pull(worker, request.id, [request.key], request.clock, output)

    def _pull_changes(self, worker: int, request: PullChanges) -> None:
        requests = self._configured()
        self._check_tables(request.keys)
        output = self._changed_rows(worker, request.keys, request.since)
        requests.pull(worker, request.id, request.keys, request.clock, output)

    def _put_rows(self, request: PutRows, frames: Sequence[memoryview]) -> None:
        self._check_tables([request.key])
        slot = self.layout.slots[request.key]
        row = self.layout.segments[slot.segment].row * ITEM_BYTES[slot.spec.dtype]
        count = sum(map(len, frames)) // row
        if len(frames) != 1 or request.start < 0 or request.start + count > self._num_rows(request.key):
            raise UsageError(
                f"key {slot.spec.name!r}: {len(frames)} frames for rows {request.start} to "
                f"{request.start + count - 1}, but this server stores rows 0 to {self._num_rows(request.key) - 1}"
            )
        self.storage.tables.put(request.key, request.start, row_values(slot, count, frames[0]))

    def _changed_rows(self, worker: int, keys: Sequence[int], since: Sequence[int]) -> ChangedRows:
        if len(since) != len(keys):
            raise UsageError(f"a request for the changed rows of {len(keys)} keys names {len(since)} versions")
        return ChangedRows(self.storage.tables, worker, dict(zip(keys, since, strict=True)))

    def _num_rows(self, key: int) -> int:
        return RowMap.of(self.layout.slots[key], self.layout).count(self.rank)

    def _check_tables(self, keys: Sequence[int]) -> None:
        self._check_keys(keys)
        for key in keys:
            if key not in self.storage.tables:
                raise UsageError(f"key {self.layout.slots[key].spec.name!r} is not row-sparse: push and pull it whole")

    def _check_dense(self, keys: Sequence[int]) -> None:
        for key in self.storage.tables.among(keys):
            raise UsageError(f"key {self.layout.slots[key].spec.name!r} is row-sparse: push and pull its rows")

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
                slot = self.layout.slots.get(key)
                name = repr(slot.spec.name) if slot else f"number {key}"
                raise UsageError(f"key {name} is not initialised; call init before push or pull")

    def _configured(self) -> PendingRequests:
        if self.requests is None:
            raise UsageError("no store has been created yet")
        if self.requests.damage:
            raise UsageError(f"this store cannot continue, because an update failed: {self.requests.damage}")
        return self.requests

    # --- status

    def _status(self, worker: int, request: Ask) -> Status:
        requests = self._configured()
        if (missing := self.gathering.missing(worker, request.about)) is not None:
            who = ", ".join(f"worker {other}" for other in missing)
            return Status(request.id, request.about, True, f"server {self.rank} gathers values, and waits for {who}")
        if self._values.holds(worker, request.about):
            text = f"server {self.rank} waits for the frozen parameters and buffers of a worker that trains"
            return Status(request.id, request.about, True, text)
        if paused := requests.resuming.missing(worker, request.about):
            who = ", ".join(f"worker {other}" for other in paused)
            return Status(request.id, request.about, True, f"server {self.rank} waits until {who} resumes")
        if pending := requests.waiting.find(worker, request.about):
            lane, clock = next(iter(pending.waiting)), pending.clock
        elif norm := requests.waiting_norm(worker, request.about):
            lane, clock = norm
        else:
            return Status(request.id, request.about, False, "")
        late = requests.engine.missing(worker, lane, clock)
        who = ", ".join(self._late(other, clock) for other, clock in late.items())
        keys = requests.lanes.keys(lane)
        more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
        name = f"{self.layout.slots[keys[0]].spec.name!r}{more}"
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
