"""A server's state and everything it does with a request; where messages come from and go to is the loop's business.

A request may name many keys, and its keys may be decided at different times; it is answered when the last one is.
Repeating a request is harmless: the engine applies each (worker, key, clock) once, and an answer that was lost is
given again with the weights as they are.
"""

from __future__ import annotations

import itertools
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
from echelon.server.lanes import Lanes
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
        self._lanes: Lanes | None = None
        self._spec: OptimizerSpec | None = None
        self._kernels: list[Kernel] = []
        self._steps: dict[int, int] = {}  # lane -> updates by the optimizer
        self._plans: dict[int, list[tuple[int, tuple[int, ...]]]] = {}  # lane -> its keys by optimizer group
        self._pushed: dict[tuple[int, int, int], _Pushed] = {}  # (worker, lane, clock)
        self._expected: dict[tuple[int, int, int], list[_Open]] = {}  # (worker, lane, clock) of pulls
        self._acknowledge: dict[int, list[_Open]] = {}  # lane -> pushes that only wait to be applied

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
            self._lanes = Lanes(self._engine, self._on_unite, self._on_split)
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
        lanes = self._ready()
        self._layout.adopt(request.segments, request.slots)
        window = self._incoming(worker, [slot.key for slot in request.slots], frames, request.framed, "weights")
        fresh = tuple(slot.key for slot in request.slots if slot.key not in lanes)
        for key in fresh:
            lanes.add(key)
            self._steps[key] = 0
        self._store.run([Task(fresh, Update((Part(window, 1.0),), None, 0, 0.0, 1), ())])
        self._answer(worker, Done(request.id), ())

    def _set_optimizer(self, worker: int, request: SetOptimizer) -> None:
        if self._spec is None:
            self._kernels = [kernel_for(request.spec.name, options) for options in request.spec.groups]
            self._spec = request.spec
            self._plans.clear()
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
        lanes = self._ready().resolve(request.keys, pushed=True)
        self._workers[worker].last_push = time.monotonic()
        pushed = _Pushed(window, request.samples, request.lrs)
        opened = self._open(worker, request, lanes, request.clock + 1, request.framed, request.pull)
        amount = 1.0 if request.samples is None else request.samples
        decisions: list[Decision] = []
        for lane in lanes:
            self._pushed.setdefault((worker, lane, request.clock), pushed)
            decisions.append(engine.push(worker, lane, request.clock, amount))
            if request.pull:
                decisions.append(engine.pull(worker, lane, request.clock + 1))
            else:
                self._acknowledge.setdefault(lane, []).append(opened)
        self._act(*decisions)
        for lane in lanes:
            if engine.clock(worker, lane) > request.clock:  # it had no gradient, or it had been applied before
                self._pushed.pop((worker, lane, request.clock), None)
            self._settle_pushes(lane)

    def _pull(self, worker: int, request: Pull) -> None:
        engine = self._running()
        self._check_keys(request.keys)
        lanes = self._ready().resolve(request.keys, pushed=False)
        self._open(worker, request, lanes, request.clock, request.framed, True)
        self._act(*[engine.pull(worker, lane, request.clock) for lane in lanes])

    def _open(
        self, worker: int, request: Push | Pull, lanes: Sequence[int], clock: int, framed: bool, pull: bool
    ) -> _Open:
        known = self._workers[worker]
        output: Window | None = None
        if pull:
            output = empty_frames(self._frame_pieces(request.keys), self._dtypes()) if framed else known.weights
        opened = _Open(worker, request.id, clock, set(lanes), output)
        known.open[request.id] = opened
        if pull:
            for lane in lanes:
                self._expected.setdefault((worker, lane, clock), []).append(opened)
        return opened

    def _act(self, *decisions: Decision) -> None:
        """Carry decisions out: an update and the answers that follow it in one go."""
        tasks: list[Task] = []
        answers: list[tuple[_Open, int, int]] = []
        last: list[Task] = []  # of the lane `at`: its update, if there was one, and who gets the weights
        at: int | None = None
        for action in itertools.chain.from_iterable(decision.actions for decision in decisions):
            if action.key != at or isinstance(action, Apply):
                tasks += last
                last, at = [], action.key
            last = self._updates(action) if isinstance(action, Apply) else self._answered(action, last, answers)
        tasks += last
        self._store.run(tasks)
        for opened, lane, version in answers:
            opened.version = version
            opened.waiting.discard(lane)
            if not opened.waiting:
                self._finish(opened)

    def _answered(self, reply: Reply, tasks: list[Task], answers: list[tuple[_Open, int, int]]) -> list[Task]:
        """Let a lane's weights go to those who asked, in one go with its update if that is at hand."""
        for opened in self._expected.pop((reply.worker, reply.key, reply.clock), ()):
            assert opened.output is not None
            answers.append((opened, reply.key, reply.version))
            tasks = tasks or [Task(self._ready().keys(reply.key), None, ())]
            if opened.output not in tasks[0].outputs:
                tasks = [Task(keys, update, (*outputs, opened.output)) for keys, update, outputs in tasks]
        return tasks

    def _updates(self, action: Apply) -> list[Task]:
        """An update as tasks, one for each optimizer group among the lane's keys."""
        pushes = [self._pushed.pop((part.worker, action.key, action.clock)) for part in action.contributions]
        for part in action.contributions:
            for opened in self._expected.get((part.worker, action.key, action.clock + 1), ()):
                opened.staleness = max(opened.staleness, part.staleness)
        total = sum(part.samples for part in action.contributions)
        self._steps[action.key] += 1
        tasks = []
        for group, keys in self._plan(action.key):
            kernel = None if group == NO_OPTIMIZER else self._kernels[group]
            lrs = pushes[0].lrs
            lr = 0.0 if kernel is None else lrs[group] if lrs else float(kernel.options["lr"])
            divisor = action.gamma if kernel is not None and kernel.divides_gradient else 1
            shares = [
                (1.0 if pushed.samples is None else part.samples / total) / divisor
                for part, pushed in zip(action.contributions, pushes, strict=True)
            ]
            parts = tuple(Part(pushed.window, share) for pushed, share in zip(pushes, shares, strict=True))
            tasks.append(Task(keys, Update(parts, kernel, self._steps[action.key], lr, action.gamma), ()))
        return tasks

    def _plan(self, lane: int) -> list[tuple[int, tuple[int, ...]]]:
        """A lane's keys, neighbours with the same optimizer group together."""
        plan = self._plans.get(lane)
        if plan is None:
            grouped = itertools.groupby(self._ready().keys(lane), self._group)
            plan = self._plans[lane] = [(group, tuple(keys)) for group, keys in grouped]
        return plan

    def _settle_pushes(self, lane: int) -> None:
        """Answer the pushes without a pull whose gradient has been applied."""
        engine = self._running()
        rest = []
        for opened in self._acknowledge.pop(lane, ()):
            if opened.worker not in self._workers:
                continue
            if engine.clock(opened.worker, lane) >= opened.clock:
                opened.waiting.discard(lane)
                if not opened.waiting:
                    self._finish(opened)
            else:
                rest.append(opened)
        if rest:
            self._acknowledge[lane] = rest

    def _on_unite(self, keys: tuple[int, ...], lane: int) -> bool:
        """Keys become a lane, unless loaded optimizer states left them at different steps."""
        if len({self._steps[key] for key in keys}) > 1:
            return False
        for key in keys:
            self._steps[lane] = self._steps.pop(key)
            self._plans.pop(key, None)
        return True

    def _on_split(self, lane: int, keys: tuple[int, ...]) -> None:
        """A lane parts: what was noted for it holds for each of its keys."""
        self._plans.pop(lane, None)
        step = self._steps.pop(lane)
        self._steps |= dict.fromkeys(keys, step)
        for worker, old, clock in [where for where in self._pushed if where[1] == lane]:
            pushed = self._pushed.pop((worker, old, clock))
            self._pushed |= {(worker, key, clock): pushed for key in keys}
        waiting = [where for where in self._expected if where[1] == lane]
        for worker, old, clock in waiting:
            opens = self._expected.pop((worker, old, clock))
            self._expected |= {(worker, key, clock): list(opens) for key in keys}
        acknowledge = self._acknowledge.pop(lane, [])
        if acknowledge:
            self._acknowledge |= {key: list(acknowledge) for key in keys}
        for known in self._workers.values():
            for opened in known.open.values():
                if lane in opened.waiting:
                    opened.waiting.remove(lane)
                    opened.waiting.update(keys)

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
        lane = next(iter(opened.waiting))
        missing = self._running().missing(worker, lane, opened.clock)
        now = time.monotonic()
        who = []
        for other, clock in missing.items():
            last = self._workers[other].last_push
            ago = f"last push {now - last:.1f} s ago" if last else "no push yet"
            who.append(f"worker {other} to push clock {clock} ({ago})")
        keys = self._ready().keys(lane)
        more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
        name = f"{self._layout.slots[keys[0]].spec.name!r}{more}"
        text = f"server {self.rank} holds key {name} at clock {opened.clock} for {', '.join(who) or 'nobody'}"
        self._answer(worker, Status(request.id, request.about, True, text), ())

    def _get_states(self, worker: int, request: GetStates) -> None:
        entries: list[tuple[int, int]] = []
        frames: list[memoryview] = []
        mine = sorted(key for lane in self._steps for key in self._ready().keys(lane))
        optimized = [key for key in mine if self._group(key) != NO_OPTIMIZER]
        for key in optimized:
            for piece in self._layout.pieces(self._layout.slots[key], self.rank):
                for index, state in enumerate(self._store.states(piece, self._kernels[self._group(key)])):
                    entries.append((key, index))
                    frames.append(state.clone().numpy().data)
        self._answer(
            worker,
            States(request.id, {key: self._steps[self._ready().lane_of(key)] for key in optimized}, entries),
            frames,
        )

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
        for key, step in request.steps.items():
            self._steps[self._ready().lane_of(key)] = step
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
        if self._spec is None:
            return NO_OPTIMIZER
        return self._spec.members.get(str(self._layout.slots[key].spec.name), 0)

    def _check_keys(self, keys: Sequence[int]) -> None:
        lanes = self._ready()
        for key in keys:
            if key not in lanes:
                slot = self._layout.slots.get(key)
                name = repr(slot.spec.name) if slot else f"number {key}"
                raise UsageError(f"key {name} is not initialised; call init before push or pull")

    def _ready(self) -> Lanes:
        self._running()
        assert self._lanes is not None
        return self._lanes

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
