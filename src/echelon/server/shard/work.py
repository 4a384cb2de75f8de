"""Which samples this slice has trained: the steps that were applied, by worker.

The pushes of a step say which samples it uses (`PushHeader.work`). A step is applied here when all keys with an
optimizer have applied it. When a worker has left and none of its gradients waits any more, a settlement says which of
its latest steps were applied, and which to some keys only. The scheduler's ledger decides from the settlements of all
slices which samples must be trained again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from echelon.cluster.ledger.intervals import IntervalSet
from echelon.cluster.messages import Settled, SliceWork, Work
from echelon.schemes import Engine
from echelon.server.storage.lanes import Lanes

KEPT_STEPS = 64  # of each worker
KEPT_EPOCHS = 8  # of all ledgers: a rebuilt scheduler asks for those that workers may have open
KEPT_SETTLEMENTS = 256  # which are sent again if they may have been lost


class Settlement(NamedTuple):
    """What became of the latest steps of a worker that left in `view`."""

    worker: int
    view: int
    applied: list[Work]
    touched: list[Work]
    has_keys: bool

    def message(self, store: int, slice_number: int) -> Settled:
        """Return it as a message to the scheduler."""
        return Settled(store, slice_number, self.view, self.worker, *self[2:])


@dataclass(slots=True)
class _Step:
    """A step of a worker: its samples, and the keys that were pushed so far."""

    work: list[Work]
    pushes: set[tuple[int, ...]] = field(default_factory=set)
    applied: bool = False

    @property
    def num_keys(self) -> int:
        return sum(map(len, self.pushes))


_Steps = dict[int, _Step]  # by clock


def _steps_to_plain(steps: _Steps) -> dict[int, Any]:
    return {
        clock: [msgspec.to_builtins(step.work), sorted(map(list, step.pushes)), step.applied]
        for clock, step in steps.items()
    }


def _steps_of_plain(plain: dict[int, Any]) -> _Steps:
    return {
        clock: _Step(msgspec.convert(work, list[Work]), {tuple(keys) for keys in pushes}, applied)
        for clock, (work, pushes, applied) in plain.items()
    }


class AppliedWork:
    """The latest steps of all workers, and the positions that were trained in the latest epochs."""

    def __init__(self, engine: Engine, lanes: Lanes, num_trained_keys: Callable[[], int]) -> None:
        """`num_trained_keys`: how many keys of this slice a step pushes."""
        self._engine = engine
        self._lanes = lanes
        self._num_trained_keys = num_trained_keys
        self._steps: dict[int, _Steps] = {}  # by worker
        self._leaving: list[tuple[int, int, _Steps]] = []  # (worker, view, steps) of workers that are not settled
        self._epochs: dict[tuple[int, int], IntervalSet] = {}  # by ledger and epoch: the positions that were trained
        self._half_applied: deque[Work] = deque(maxlen=KEPT_STEPS)  # of workers that have left
        self._settlements: deque[Settlement] = deque(maxlen=KEPT_SETTLEMENTS)
        self._num_unsent = 0
        self.is_complete = True  # whether this slice knows all steps of the job

    # --- steps

    def record(self, worker: int, clock: int, keys: Sequence[int], work: list[Work]) -> None:
        """Note that a push of a step has arrived, which the engine did not refuse."""
        steps = self._steps.setdefault(worker, {})
        step = steps.get(clock)
        if step is None:
            self._note_applied(worker, steps)
            step = steps[clock] = _Step(work)
            while len(steps) > KEPT_STEPS:
                del steps[min(steps)]
        step.pushes.add(tuple(keys))

    def _note_applied(self, worker: int, steps: _Steps) -> None:
        for clock, step in steps.items():
            if not step.applied and self._is_whole(step) and not self._waits(worker, clock, step):
                step.applied = True
                for work in step.work:
                    self._positions(work).add(work.start, work.stop)

    def _positions(self, work: Work) -> IntervalSet:
        found = self._epochs.setdefault((work.ledger, work.epoch), IntervalSet())
        while len(self._epochs) > KEPT_EPOCHS:
            del self._epochs[min(self._epochs)]
        return found

    def _is_whole(self, step: _Step) -> bool:
        return step.num_keys >= self._num_trained_keys()

    def _waits(self, worker: int, clock: int, step: _Step) -> bool:
        """Return whether a push of a step waits for its round."""
        return any(self._engine.clock(worker, lane) <= clock for lane in self._lanes_of(step))

    def _lanes_of(self, step: _Step) -> Iterable[int]:
        return dict.fromkeys(lane for keys in step.pushes for lane in self._lanes.resolve(keys, pushed=False))

    # --- workers that have left

    def leave(self, worker: int, view: int) -> None:
        """Settle a worker that has left, now or when none of its gradients waits any more."""
        self._leaving.append((worker, view, self._steps.pop(worker, {})))

    @property
    def is_settling(self) -> bool:
        """Whether a worker that has left is not settled."""
        return bool(self._leaving)

    def settle(self) -> list[int]:
        """Settle the workers of which nothing waits any more. Return those whose pushes nobody will complete.

        The caller drops the rounds of these, and calls this again.
        """
        waiting, abandoned = [], []
        for worker, view, steps in self._leaving:
            self._note_applied(worker, steps)
            if not any(not step.applied and self._waits(worker, clock, step) for clock, step in steps.items()):
                self._settle(worker, view, steps)
                continue
            waiting.append((worker, view, steps))
            if not self._engine.group_is_active(worker):
                abandoned.append(worker)
        self._leaving = waiting
        return abandoned

    def abandon(self, worker: int) -> None:
        """Settle a worker whose waiting pushes were dropped."""
        left = [entry for entry in self._leaving if entry[0] == worker]
        self._leaving = [entry for entry in self._leaving if entry[0] != worker]
        for _, view, steps in left:
            self._settle(worker, view, steps)

    def _settle(self, worker: int, view: int, steps: _Steps) -> None:
        applied = [work for step in steps.values() if step.applied for work in step.work]
        half = [step for clock, step in steps.items() if not step.applied and self._is_touched(worker, clock, step)]
        touched = [work for step in half for work in step.work]
        self._half_applied.extend(touched)
        self._settlements.append(Settlement(worker, view, applied, touched, self._num_trained_keys() > 0))
        self._num_unsent += 1

    def _is_touched(self, worker: int, clock: int, step: _Step) -> bool:
        return any(self._engine.clock(worker, lane) > clock for lane in self._lanes_of(step))

    # --- for a new backup

    def to_plain(self) -> dict[str, Any]:
        """Return the state as numbers, lists and dicts."""
        return {
            "steps": {worker: _steps_to_plain(steps) for worker, steps in self._steps.items()},
            "leaving": [[worker, view, _steps_to_plain(steps)] for worker, view, steps in self._leaving],
            "epochs": [[ledger, epoch, list(found)] for (ledger, epoch), found in self._epochs.items()],
            "half_applied": msgspec.to_builtins(list(self._half_applied)),
            "settlements": [msgspec.to_builtins(list(one)) for one in self._settlements],
            "num_unsent": self._num_unsent,
            "is_complete": self.is_complete,
        }

    def load_plain(self, plain: dict[str, Any]) -> None:
        """Take over what `to_plain` returned."""
        self._steps = {worker: _steps_of_plain(steps) for worker, steps in plain["steps"].items()}
        self._leaving = [(worker, view, _steps_of_plain(steps)) for worker, view, steps in plain["leaving"]]
        self._epochs = {}
        for ledger, epoch, found in plain["epochs"]:
            positions = self._epochs[ledger, epoch] = IntervalSet()
            for start, stop in found:
                positions.add(start, stop)
        self._half_applied.extend(msgspec.convert(plain["half_applied"], list[Work]))
        for worker, view, applied, touched, has_keys in plain["settlements"]:
            works = msgspec.convert(applied, list[Work]), msgspec.convert(touched, list[Work])
            self._settlements.append(Settlement(worker, view, *works, has_keys))
        self._num_unsent, self.is_complete = plain["num_unsent"], plain["is_complete"]

    # --- what the scheduler is told

    def take_settlements(self) -> list[Settlement]:
        """Return the settlements that were not returned yet."""
        count, self._num_unsent = self._num_unsent, 0
        return list(self._settlements)[-count:] if count else []

    def send_settlements_again(self) -> None:
        """Return the latest settlements again, because they may have been lost."""
        self._num_unsent = len(self._settlements)

    def report(self, store: int) -> list[SliceWork]:
        """Return which positions of the latest epochs were trained, for a scheduler that was started again."""
        if not self._num_trained_keys():
            return [SliceWork(store, 0, 0, [], has_keys=False)]
        for worker, steps in self._steps.items():
            self._note_applied(worker, steps)
        unsettled = [step for _, _, steps in self._leaving for step in steps.values() if not step.applied]
        waiting = [*(work for step in unsettled for work in step.work), *self._half_applied]
        return [
            SliceWork(
                store,
                ledger,
                epoch,
                list(positions),
                [work for work in waiting if (work.ledger, work.epoch) == (ledger, epoch)],
                self.is_complete,
            )
            for (ledger, epoch), positions in self._epochs.items()
        ]
