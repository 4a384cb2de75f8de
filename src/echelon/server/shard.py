"""A server's state and everything it does with a request; where messages come from and go to is the loop's business.

A request may name many keys, and its keys may be decided at different times; it is answered when the last one is.
Repeating a request is harmless: the engine applies each (worker, key, clock) once, and an answer that was lost is
given again with the weights as they are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from echelon.cluster.messages import (
    Ask,
    Attach,
    Configure,
    Done,
    Failed,
    GetStates,
    Init,
    OptimizerSpec,
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
from echelon.schemes import Apply, Decision, Engine, Reply, rules_for
from echelon.server.execute import Part, Store, Task, Update
from echelon.server.kernels import Kernel, kernel_for
from echelon.server.memory import Framed, Mapped, Window, as_tensor, empty_frames, frame_pieces, received_frames

NO_OPTIMIZER = -1  # the group of keys that hold plain values: their sum replaces them
Answer = Callable[[int, Response, Sequence[memoryview]], None]
AttachMemory = Callable[[str], memoryview | None]


@dataclass(slots=True, eq=False)
class _Pushed:
    """A gradient that waits to be applied."""

    window: Window
    samples: float | None
    lrs: list[float]


@dataclass(slots=True, eq=False)
class _Open:
    """A request that is not answered yet."""

    worker: int
    id: int
    clock: int  # of the pull; a push of clock c pulls at c + 1
    waiting: set[int]
    output: Window | None  # None: a push that only wants to know that it was applied
    version: int = 0
    staleness: int = 0


@dataclass(slots=True, eq=False)
class _Worker:
    """What a server knows of a worker."""

    gradients: Mapped = field(default_factory=Mapped)
    weights: Mapped = field(default_factory=Mapped)
    open: dict[int, _Open] = field(default_factory=dict)
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
        self._living = list(workers)
        self._workers = {worker: _Worker() for worker in workers}
        self._config: Configure | None = None
        self._engine: Engine | None = None
        self._spec: OptimizerSpec | None = None
        self._kernels: list[Kernel] = []
        self._steps: dict[int, int] = {}
        self._pushed: dict[tuple[int, int, int], _Pushed] = {}  # (worker, key, clock)
        self._expected: dict[tuple[int, int, int], list[_Open]] = {}  # (worker, key, clock) of pulls
        self._acknowledge: dict[int, list[_Open]] = {}  # key -> pushes that only wait to be applied

    # --- requests

    def handle(self, worker: int, request: Request, frames: Sequence[memoryview]) -> None:
        """Carry a request out or say why not; a bad one changes nothing."""
        try:
            match request:
                case Push():
                    self._push(worker, request, frames)
                case Pull():
                    self._pull(worker, request)
                case Configure():
                    self._configure(worker, request)
                case Place():
                    slots = self._layout.place(request.specs)
                    self._answer(worker, Placed(request.id, self._layout.segments, slots), ())
                case Attach():
                    self._attach_segment(worker, request)
                case Init():
                    self._init(worker, request, frames)
                case SetOptimizer():
                    self._set_optimizer(worker, request)
                case Ask():
                    self._status(worker, request)
                case Retire():
                    self._retire(worker)
                    self._answer(worker, Done(request.id), ())
                case GetStates():
                    self._get_states(worker, request)
                case PutStates():
                    self._put_states(worker, request, frames)
        except UsageError as error:
            self._answer(worker, Failed(request.id, f"server {self.rank}: {error}"), ())

    def leave(self, worker: int) -> str:
        """A worker is out of the view. Returns the reason of what that released."""
        self._workers.pop(worker, None)
        if worker in self._living:
            self._living.remove(worker)
        for expected in [expected for expected in self._expected if expected[0] == worker]:
            del self._expected[expected]
        return self._retire(worker) if self._engine is not None else ""

    def _retire(self, worker: int) -> str:
        """A worker takes no part any more; what waited for it goes on."""
        decision = self._running().leave(worker)
        self._act(decision)
        for key in list(self._acknowledge):
            self._settle_pushes(key)
        return decision.reason

    # --- set-up

    def _configure(self, worker: int, request: Configure) -> None:
        known = self._config
        if known is None:
            self._engine = Engine(rules_for(request.store, request.staleness, request.groups), self._living)
            self._config = request
        elif (known.store, known.staleness, known.groups) != (request.store, request.staleness, request.groups):
            raise UsageError(
                f"worker {known.rank} created {_described(known)} but worker {request.rank} {_described(request)}; "
                "all workers must create the same store"
            )
        self._answer(worker, Done(request.id), ())

    def _attach_segment(self, worker: int, request: Attach) -> None:
        gradients, weights = self._attach(request.gradients), self._attach(request.weights)
        if gradients is None or weights is None:
            raise UsageError("this worker's memory is out of reach")
        self._layout.adopt([request.segment], [])
        known = self._workers[worker]
        known.gradients.segments[request.segment.index] = as_tensor(gradients, request.segment.dtype)
        known.weights.segments[request.segment.index] = as_tensor(weights, request.segment.dtype)
        self._answer(worker, Done(request.id), ())

    def _init(self, worker: int, request: Init, frames: Sequence[memoryview]) -> None:
        engine = self._running()
        self._layout.adopt(request.segments, request.slots)
        fresh = [slot.key for slot in request.slots if slot.key not in self._steps]
        window = self._incoming(worker, [slot.key for slot in request.slots], frames, request.framed, "weights")
        for key in fresh:
            engine.add_key(key)
            self._steps[key] = 0
        first = Update((Part(window, 1.0),), None, 0, 0.0, 1)
        self._store.run([Task(key, first, ()) for key in fresh])
        self._answer(worker, Done(request.id), ())

    def _set_optimizer(self, worker: int, request: SetOptimizer) -> None:
        if self._spec is None:
            self._kernels = [kernel_for(request.spec.name, options) for options in request.spec.groups]
            self._spec = request.spec
        elif self._spec != request.spec:
            raise UsageError(
                f"the servers run {_optimizer(self._spec)}, but this worker set {_optimizer(request.spec)}"
            )
        self._answer(worker, Done(request.id), ())

    # --- push and pull

    def _push(self, worker: int, request: Push, frames: Sequence[memoryview]) -> None:
        engine = self._running()
        self._check_keys(request.keys)
        if engine.rules.name != "BSP" and self._spec is None:
            raise UsageError(f"{engine.rules.name} needs an optimizer on the servers: call set_optimizer before push")
        window = self._incoming(worker, request.keys, frames, request.framed, "gradients")
        known = self._workers[worker]
        known.last_push = time.monotonic()
        pushed = _Pushed(window, request.samples, request.lrs)
        opened = self._open(known, worker, request, request.clock + 1, request.framed, request.pull)
        amount = 1.0 if request.samples is None else request.samples
        decisions: list[Decision] = []
        for key in request.keys:
            self._pushed.setdefault((worker, key, request.clock), pushed)
            decisions.append(engine.push(worker, key, request.clock, amount))
            if request.pull:
                decisions.append(engine.pull(worker, key, request.clock + 1))
            else:
                self._acknowledge.setdefault(key, []).append(opened)
        self._act(*decisions)
        for key in request.keys:
            if engine.clock(worker, key) > request.clock:
                self._pushed.pop((worker, key, request.clock), None)
            self._settle_pushes(key)

    def _pull(self, worker: int, request: Pull) -> None:
        engine = self._running()
        self._check_keys(request.keys)
        known = self._workers[worker]
        self._open(known, worker, request, request.clock, request.framed, True)
        self._act(*[engine.pull(worker, key, request.clock) for key in request.keys])

    def _open(self, known: _Worker, worker: int, request: Push | Pull, clock: int, framed: bool, pull: bool) -> _Open:
        output: Window | None = None
        if pull:
            output = empty_frames(self._frame_pieces(request.keys), self._dtypes()) if framed else known.weights
        opened = _Open(worker, request.id, clock, set(request.keys), output)
        known.open[request.id] = opened
        if pull:
            for key in request.keys:
                self._expected.setdefault((worker, key, clock), []).append(opened)
        return opened

    def _act(self, *decisions: Decision) -> None:
        """Carry decisions out: one task a key for an update and the answers that follow it."""
        tasks: list[Task] = []
        answers: list[tuple[_Open, int, int]] = []
        for decision in decisions:
            for action in decision.actions:
                if isinstance(action, Apply):
                    tasks.append(Task(action.key, self._update(action), ()))
                else:
                    self._answer_to(action, tasks, answers)
        self._store.run(tasks)
        for opened, key, version in answers:
            opened.version = version
            opened.waiting.discard(key)
            if not opened.waiting:
                self._finish(opened)

    def _answer_to(self, reply: Reply, tasks: list[Task], answers: list[tuple[_Open, int, int]]) -> None:
        for opened in self._expected.pop((reply.worker, reply.key, reply.clock), ()):
            assert opened.output is not None
            answers.append((opened, reply.key, reply.version))
            last = tasks[-1] if tasks else None
            if last is None or last.key != reply.key:
                tasks.append(Task(reply.key, None, (opened.output,)))
            elif opened.output not in last.outputs:
                tasks[-1] = Task(last.key, last.update, (*last.outputs, opened.output))

    def _update(self, action: Apply) -> Update:
        kernel = None
        parts = []
        lr = 0.0
        group = NO_OPTIMIZER if self._spec is None else self._group(action.key)
        if group != NO_OPTIMIZER:
            kernel = self._kernels[group]
        pushes = [self._pushed.pop((part.worker, action.key, action.clock)) for part in action.contributions]
        total = sum(part.samples for part in action.contributions)
        divisor = action.gamma if kernel is not None and kernel.divides_gradient else 1
        for part, pushed in zip(action.contributions, pushes, strict=True):
            share = 1.0 if pushed.samples is None else part.samples / total
            parts.append(Part(pushed.window, share / divisor))
            for opened in self._expected.get((part.worker, action.key, action.clock + 1), ()):
                opened.staleness = max(opened.staleness, part.staleness)
        if kernel is not None:
            lrs = pushes[0].lrs
            lr = lrs[group] if lrs else float(kernel.options["lr"])
            self._steps[action.key] += 1
        return Update(tuple(parts), kernel, self._steps[action.key], lr, action.gamma)

    def _settle_pushes(self, key: int) -> None:
        """Answer the pushes without a pull whose gradient has been applied."""
        engine = self._running()
        rest = []
        for opened in self._acknowledge.pop(key, ()):
            if opened.worker not in self._workers:
                continue
            if engine.clock(opened.worker, key) >= opened.clock:
                opened.waiting.discard(key)
                if not opened.waiting:
                    self._finish(opened)
            else:
                rest.append(opened)
        if rest:
            self._acknowledge[key] = rest

    def _finish(self, opened: _Open) -> None:
        known = self._workers[opened.worker]
        if known.open.pop(opened.id, None) is not None:
            frames = opened.output.buffers() if isinstance(opened.output, Framed) else ()
            self._answer(opened.worker, Done(opened.id, opened.version, opened.staleness), frames)

    # --- questions

    def _status(self, worker: int, request: Ask) -> None:
        opened = self._workers[worker].open.get(request.about)
        if opened is None:
            self._answer(worker, Status(request.id, request.about, False, ""), ())
            return
        key = next(iter(opened.waiting))
        missing = self._running().missing(worker, key, opened.clock)
        now = time.monotonic()
        who = []
        for other, clock in missing.items():
            last = self._workers[other].last_push
            ago = f"last push {now - last:.1f} s ago" if last else "no push yet"
            who.append(f"worker {other} to push clock {clock} ({ago})")
        name = self._layout.slots[key].spec.name
        text = f"server {self.rank} holds key {name!r} at clock {opened.clock} for {', '.join(who) or 'nobody'}"
        self._answer(worker, Status(request.id, request.about, True, text), ())

    def _get_states(self, worker: int, request: GetStates) -> None:
        entries: list[tuple[int, int]] = []
        frames: list[memoryview] = []
        optimized = [key for key in sorted(self._steps) if self._spec and self._group(key) != NO_OPTIMIZER]
        for key in optimized:
            for piece in self._layout.pieces(self._layout.slots[key], self.rank):
                for index, state in enumerate(self._store.states(piece, self._kernels[self._group(key)])):
                    entries.append((key, index))
                    frames.append(state.clone().numpy().data)
        self._answer(worker, States(request.id, {key: self._steps[key] for key in optimized}, entries), frames)

    def _put_states(self, worker: int, request: PutStates, frames: Sequence[memoryview]) -> None:
        if self._spec is None:
            raise UsageError("set the optimizer before its states are loaded")
        self._check_keys(list(request.steps))
        places = []
        for key in dict.fromkeys(key for key, _ in request.entries):
            for piece in self._layout.pieces(self._layout.slots[key], self.rank):
                places += [(state, key) for state in self._store.states(piece, self._kernels[self._group(key)])]
        if len(places) != len(frames) or any(
            state.nbytes != len(frame) for (state, _), frame in zip(places, frames, strict=True)
        ):
            raise UsageError("the optimizer states do not fit the keys and the optimizer of this job")
        for (state, key), frame in zip(places, frames, strict=True):
            dtype = self._layout.slots[key].spec.dtype
            state.copy_(as_tensor(bytearray(frame), "float32" if dtype in ("float16", "bfloat16") else dtype))
        self._steps.update(request.steps)
        self._answer(worker, Done(request.id), ())

    # --- help

    def _incoming(
        self, worker: int, keys: Sequence[int], frames: Sequence[memoryview], framed: bool, what: str
    ) -> Window:
        """Where a request's tensors are; frames are checked against the layout before anything is touched."""
        known = self._workers[worker]
        if not framed:
            return known.gradients if what == "gradients" else known.weights
        pieces = self._frame_pieces(keys)
        dtypes = self._dtypes()
        wanted = [(piece.stop - piece.start) * ITEM_BYTES[dtypes[piece.segment]] for piece in pieces]
        given = [len(frame) for frame in frames]
        if wanted != given:
            raise UsageError(f"{what} came in {len(given)} frames of {sum(given)} bytes; {sum(wanted)} bytes were due")
        return received_frames(pieces, frames, dtypes)

    def _frame_pieces(self, keys: Sequence[int]) -> list[Piece]:
        slots = self._layout.slots
        return frame_pieces([piece for key in keys for piece in self._layout.pieces(slots[key], self.rank)])

    def _dtypes(self) -> list[str]:
        return [segment.dtype for segment in self._layout.segments]

    def _group(self, key: int) -> int:
        assert self._spec is not None
        return self._spec.members.get(str(self._layout.slots[key].spec.name), 0)

    def _check_keys(self, keys: Sequence[int]) -> None:
        for key in keys:
            if key not in self._steps:
                slot = self._layout.slots.get(key)
                name = repr(slot.spec.name) if slot else f"number {key}"
                raise UsageError(f"key {name} is not initialised; call init before push or pull")

    def _running(self) -> Engine:
        if self._engine is None:
            raise UsageError("no store has been created yet")
        return self._engine


def _described(config: Configure) -> str:
    dials = [f"staleness={config.staleness}"] if config.staleness is not None else []
    dials += [f"groups={config.groups}"] if config.groups else []
    return f"{config.store}({', '.join(dials)})"


def _optimizer(spec: OptimizerSpec) -> str:
    shown = []
    for options in spec.groups:
        shown.append(", ".join(f"{name}={value}" for name, value in sorted(options.items())))
    return f"{spec.name}({'; '.join(shown)})"
