"""Where the time of a worker goes: computing, pushing, waiting, pulling.

The main thread is in one phase at any time, so the phases add up to the time since the beginning:

    compute   everything that is not another phase: the forward and backward pass, and what else the loop does
    push      copying gradients to the store and sending them
    wait      the servers hold the answer, because the scheme waits for other workers
    pull      the rest until the new weights are in the model: the transfer both ways, the update, the copy
    other     validation and checkpoints, which belong to no step

A wait for an answer is divided by `held_s`, which the answer contains: the time for which the server held it.
"""

from __future__ import annotations

import enum
import time
from collections import deque
from collections.abc import Callable
from typing import Any

MAX_STEPS = 8  # of the last steps, in one report


class Phase(enum.IntEnum):
    """What the main thread does."""

    COMPUTE = 0
    PUSH = 1
    WAIT = 2
    PULL = 3
    OTHER = 4


class StepTimes:
    """The seconds of each phase, in all and for the last steps."""

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, wall_clock: Callable[[], float] = time.time
    ) -> None:
        self._clock = clock
        self._wall_clock = wall_clock
        self._seconds = [0.0] * len(Phase)
        self._at_last_step = list(self._seconds)
        self._phase = Phase.COMPUTE
        self._since = clock()
        self._steps: deque[list[float]] = deque(maxlen=MAX_STEPS)

    def of(self, phase: Phase) -> float:
        """Return the seconds of a phase so far."""
        return self._seconds[phase]

    def during(self, phase: Phase) -> _During:
        """Return a context in which the time belongs to a phase. Afterwards it belongs to the phase before."""
        return _During(self, phase)

    def enter(self, phase: Phase) -> Phase:
        """Begin a phase, and return the one that ends."""
        now = self._clock()
        before = self._phase
        self._seconds[before] += now - self._since
        self._since, self._phase = now, phase
        return before

    def move(self, seconds: float, source: Phase, target: Phase) -> None:
        """Count some of the seconds of a phase in another one."""
        self._seconds[source] -= seconds
        self._seconds[target] += seconds

    def end_step(self) -> None:
        """Record the phases since the end of the last step as one step."""
        self.enter(self._phase)
        step = [now - before for now, before in zip(self._seconds, self._at_last_step, strict=True)]
        self._at_last_step = list(self._seconds)
        self._steps.append([round(self._wall_clock(), 4), *(round(s, 6) for s in step[: Phase.OTHER])])

    def report(self) -> dict[str, Any]:
        """Return the seconds of the phases, and the steps since the last report: their end and their phases."""
        self.enter(self._phase)
        steps = list(self._steps)
        self._steps.clear()
        return {f"{phase.name.lower()}_s": round(self._seconds[phase], 6) for phase in Phase} | {"steps": steps}


class _During:
    """The time inside a `with` statement. `seconds`: how long the last one took, with phases inside it."""

    __slots__ = ("_before", "_began", "_phase", "_times", "seconds")

    def __init__(self, times: StepTimes, phase: Phase) -> None:
        self._times = times
        self._phase = phase
        self.seconds = 0.0

    def __enter__(self) -> _During:
        self._before = self._times.enter(self._phase)
        self._began = self._times._since
        return self

    def __exit__(self, *_: object) -> None:
        self._times.enter(self._before)
        self.seconds = self._times._since - self._began
