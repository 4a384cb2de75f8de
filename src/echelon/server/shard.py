"""A server's state and everything it does with a request; where messages come from and go to is the loop's business.

Here is what workers must agree on and what a server knows of each; `exchange` has the pushes and pulls.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from echelon.cluster.messages import (
    Ask,
    Attach,
    Configure,
    Done,
    Failed,
    GetStates,
    Init,
    Place,
    Placed,
    Pull,
    Push,
    PutStates,
    Request,
    Response,
    Retire,
    SetOptimizer,
    States,
    Status,
)
from echelon.cluster.placement import ITEM_BYTES, Layout, Piece
from echelon.errors import UsageError
from echelon.schemes import Engine, rules_for
from echelon.server.exchange import Exchange
from echelon.server.execute import Part, Store, Task, Update
from echelon.server.factored import Factored, factors_length
from echelon.server.memory import Mapped, Window, as_tensor, empty_frames, frame_pieces, received, received_frames
from echelon.server.optimization import Optimization, Pushed

Answer = Callable[[int, Response, Sequence[memoryview]], None]
AttachMemory = Callable[[str], memoryview | None]


@dataclass(slots=True, eq=False)
class _Worker:
    """What a server knows of a worker."""

    gradients: Mapped = field(default_factory=Mapped)
    weights: Mapped = field(default_factory=Mapped)
    last_push: float = 0.0


class Shard:
    """One server's part of the store. `answer(worker, response, frames)` sends."""

    def __init__(
        self, rank: int, num_servers: int, workers: Sequence[int], answer: Answer, attach: AttachMemory
    ) -> None:
        self.rank = rank
        self._answer = answer
        self._attach = attach
        self._layout = Layout(num_servers)
        self._store = Store(self._layout, rank)
        self._optimization = Optimization(self._layout)
        self._workers = {worker: _Worker() for worker in workers}
        self._config: Configure | None = None
        self._exchange: Exchange | None = None

    def handle(self, worker: int, request: Request, frames: Sequence[memoryview]) -> None:
        """Carry a request out or say why not; a bad one changes nothing."""
        try:
            response = self._respond(worker, request, frames)
        except UsageError as error:
            response = Failed(request.id, f"server {self.rank}: {error}"), ()
        if response is not None:
            self._answer(worker, *response)

    def leave(self, worker: int) -> str:
        """A worker is out of the view. Returns the reason of what that released."""
        self._workers.pop(worker, None)
        return self._exchange.forget(worker) if self._exchange is not None else ""

    def _respond(
        self, worker: int, request: Request, frames: Sequence[memoryview]
    ) -> tuple[Response, Sequence[memoryview]] | None:
        """The answer; None if it comes later, from the exchange."""
        match request:
            case Push():
                self._push(worker, request, frames)
                return None
            case Pull():
                self._pull(worker, request)
                return None
            case Ask():
                return self._status(worker, request), ()
            case Place():
                return Placed(request.id, self._layout.segments, self._layout.place(request.specs)), ()
            case GetStates():
                return self._get_states(request)
            case Configure():
                self._configure(request)
            case Attach():
                self._attach_segment(worker, request)
            case Init():
                self._init(worker, request, frames)
            case SetOptimizer():
                self._optimization.agree(request.spec)
            case PutStates():
                self._put_states(request, frames)
            case Retire():
                self._running().retire(worker)
        return Done(request.id), ()

    # --- what workers agree on

    def _configure(self, request: Configure) -> None:
        known = self._config
        if known is None:
            engine = Engine(rules_for(request.store, request.staleness, request.groups), self._workers)
            self._exchange = Exchange(engine, self._store, self._optimization, self._answer)
            self._config = request
        elif (known.store, known.staleness, known.groups) != (request.store, request.staleness, request.groups):
            raise UsageError(
                f"worker {known.rank} created {_described(known)} but worker {request.rank} {_described(request)}; "
                "all workers must create the same store"
            )

    def _attach_segment(self, worker: int, request: Attach) -> None:
        gradients, weights = self._attach(request.gradients), self._attach(request.weights)
        if gradients is None or weights is None:
            raise UsageError("this worker's memory is out of reach")
        self._layout.adopt([request.segment], [])
        known = self._workers[worker]
        known.gradients.segments[request.segment.index] = as_tensor(gradients, request.segment.dtype)
        known.weights.segments[request.segment.index] = as_tensor(weights, request.segment.dtype)

    def _init(self, worker: int, request: Init, frames: Sequence[memoryview]) -> None:
        lanes = self._running().lanes
        self._layout.adopt(request.segments, request.slots)
        known = self._workers[worker]
        window = self._incoming(known.weights, [slot.key for slot in request.slots], frames, request.framed)
        fresh = tuple(slot.key for slot in request.slots if slot.key not in lanes)
        for key in fresh:
            lanes.add(key)
            self._optimization.add(key)
        keys = tuple(slot.key for slot in request.slots) if request.overwrite else fresh
        self._store.run([Task(keys, Update((Part(window, 1.0),), None, 0, 0.0, 1), ())])

    # --- push and pull

    def _push(self, worker: int, request: Push, frames: Sequence[memoryview]) -> None:
        exchange = self._running()
        self._check_keys(request.keys)
        if not exchange.engine.lives(worker):
            raise UsageError("this worker has retired: it can pull, but not push")
        rules = exchange.engine.rules
        if not rules.sums_over_everybody and not self._optimization.chosen:
            raise UsageError(f"{rules.name} needs an optimizer on the servers: call set_optimizer before push")
        self._optimization.check_keys(request.keys)
        self._optimization.check_rates(request.lrs)
        known = self._workers[worker]
        window = self._pushed_window(known.gradients, request, frames)
        pushed = Pushed(window, request.samples, request.lrs)
        known.last_push = time.monotonic()
        output = self._outgoing(known.weights, request.keys, request.framed) if request.pull else None
        if request.halt:
            exchange.ask_to_halt(request.clock)
        exchange.push(worker, request.id, request.keys, request.clock, pushed, output)

    def _pull(self, worker: int, request: Pull) -> None:
        exchange = self._running()
        self._check_keys(request.keys)
        output = self._outgoing(self._workers[worker].weights, request.keys, request.framed)
        exchange.pull(worker, request.id, request.keys, request.clock, output)

    def _pushed_window(self, mapped: Mapped, request: Push, frames: Sequence[memoryview]) -> Window:
        if not request.factor_rank:
            return self._incoming(mapped, request.keys, frames, request.framed)
        if len(request.keys) > 1:
            raise UsageError(f"factors are of one key's gradient; this push names {len(request.keys)}")
        slot = self._layout.slots[request.keys[0]]
        length = factors_length(slot, request.factor_rank)
        if not request.framed:
            self._check_attached(mapped, request.keys)
            return Factored(slot, request.factor_rank, mapped.view(slot.segment, slot.start, slot.start + length))
        self._check_lengths([length * ITEM_BYTES[slot.spec.dtype]], frames)
        return Factored(slot, request.factor_rank, received(frames[0], slot.spec.dtype))

    def _incoming(self, mapped: Mapped, keys: Sequence[int], frames: Sequence[memoryview], framed: bool) -> Window:
        """Where a request's tensors are; frames are checked against the layout before anything is touched."""
        if not framed:
            self._check_attached(mapped, keys)
            return mapped
        pieces, dtypes = self._frame_pieces(keys), self._dtypes()
        wanted = [(piece.stop - piece.start) * ITEM_BYTES[dtypes[piece.segment]] for piece in pieces]
        self._check_lengths(wanted, frames)
        return received_frames(pieces, frames, dtypes)

    def _check_lengths(self, wanted: Sequence[int], frames: Sequence[memoryview]) -> None:
        given = [len(frame) for frame in frames]
        if list(wanted) != given:
            raise UsageError(f"tensors came in {len(given)} frames of {sum(given)} bytes; {sum(wanted)} bytes were due")

    def _check_attached(self, mapped: Mapped, keys: Sequence[int]) -> None:
        if len(mapped.segments) == len(self._layout.segments):
            return
        for slot in (self._layout.slots[key] for key in keys):
            if slot.segment not in mapped.segments:
                raise UsageError(f"this worker's memory for key {slot.spec.name!r} is not attached; send frames")

    def _outgoing(self, mapped: Mapped, keys: Sequence[int], framed: bool) -> Window:
        if framed:
            return empty_frames(self._frame_pieces(keys), self._dtypes())
        self._check_attached(mapped, keys)
        return mapped

    def _frame_pieces(self, keys: Sequence[int]) -> list[Piece]:
        slots = self._layout.slots
        return frame_pieces([piece for key in keys for piece in self._layout.pieces(slots[key], self.rank)])

    def _dtypes(self) -> list[str]:
        return [segment.dtype for segment in self._layout.segments]

    def _check_keys(self, keys: Sequence[int]) -> None:
        lanes = self._running().lanes
        if lanes.has_seen(keys):
            return
        if not keys or len(set(keys)) < len(keys):
            raise UsageError(
                f"a request must name keys, each once; it names {len(keys)}, {len(set(keys))} different ones"
            )
        for key in keys:
            if key not in lanes:
                slot = self._layout.slots.get(key)
                name = repr(slot.spec.name) if slot else f"number {key}"
                raise UsageError(f"key {name} is not initialised; call init before push or pull")

    # --- questions

    def _status(self, worker: int, request: Ask) -> Status:
        exchange = self._running()
        opened = exchange.opened(worker, request.about)
        if opened is None:
            return Status(request.id, request.about, False, "")
        lane = next(iter(opened.waiting))
        missing = exchange.engine.missing(worker, lane, opened.clock)
        who = ", ".join(self._late(other, clock) for other, clock in missing.items())
        keys = exchange.lanes.keys(lane)
        more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
        name = f"{self._layout.slots[keys[0]].spec.name!r}{more}"
        text = f"server {self.rank} holds key {name} at clock {opened.clock} for {who or 'nobody'}"
        return Status(request.id, request.about, True, text)

    def _late(self, worker: int, clock: int) -> str:
        last = self._workers[worker].last_push
        ago = f"last push {time.monotonic() - last:.1f} s ago" if last else "no push yet"
        return f"worker {worker} to push clock {clock} ({ago})"

    def _get_states(self, request: GetStates) -> tuple[States, list[memoryview]]:
        lanes, steps = self._running().lanes, self._optimization.steps
        keys = sorted(key for lane in steps for key in lanes.keys(lane) if self._optimization.kernel(key))
        entries: list[tuple[int, int]] = []
        frames: list[memoryview] = []
        for key in keys:
            for index, state in self._states(key):
                entries.append((key, index))
                frames.append(state.clone().numpy().data)
        return States(request.id, {key: steps[lanes.lane_of(key)] for key in keys}, entries), frames

    def _put_states(self, request: PutStates, frames: Sequence[memoryview]) -> None:
        if not self._optimization.chosen:
            raise UsageError("set the optimizer before its states are loaded")
        if request.steps:
            self._check_keys(list(request.steps))
        keys = dict.fromkeys(key for key, _ in request.entries)
        places = [state for key in keys for _, state in self._states(key)]
        if [state.nbytes for state in places] != [len(frame) for frame in frames]:
            raise UsageError("the optimizer states do not fit the keys and the optimizer of this job")
        for state, frame in zip(places, frames, strict=True):
            state.copy_(as_tensor(bytearray(frame), str(state.dtype).removeprefix("torch.")))
        lanes = self._running().lanes
        for key, step in request.steps.items():
            self._optimization.steps[lanes.lane_of(key)] = step

    def _states(self, key: int) -> list[tuple[int, Tensor]]:
        """A key's states here, piece by piece, each with its index."""
        kernel = self._optimization.kernel(key)
        if kernel is None:
            return []
        pieces = self._layout.pieces(self._layout.slots[key], self.rank)
        return [entry for piece in pieces for entry in enumerate(self._store.states(piece, kernel))]

    def _running(self) -> Exchange:
        if self._exchange is None:
            raise UsageError("no store has been created yet")
        return self._exchange


def _described(config: Configure) -> str:
    dials = [f"staleness={config.staleness}"] if config.staleness is not None else []
    dials += [f"groups={config.groups}"] if config.groups else []
    return f"{config.store}({', '.join(dials)})"
