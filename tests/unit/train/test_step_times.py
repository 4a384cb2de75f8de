"""Where the time of a worker goes."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.train.trainer.step_times import MAX_STEPS, Phase, StepTimes


@dataclass
class Clock:
    """A clock that a test moves."""

    now: float = 100.0
    times: StepTimes = field(init=False)

    def __post_init__(self) -> None:
        self.times = StepTimes(lambda: self.now, lambda: self.now + 1e9)

    def spend(self, seconds: float, phase: Phase | None = None) -> None:
        if phase is None:
            self.now += seconds
            return
        with self.times.during(phase):
            self.now += seconds


def test_time_belongs_to_the_innermost_phase() -> None:
    clock = Clock()
    clock.spend(2.0)
    with clock.times.during(Phase.PUSH) as pushed:
        clock.spend(1.0)
        clock.spend(4.0, Phase.WAIT)
        clock.spend(0.5)
    clock.spend(8.0)
    report = clock.times.report()
    assert (report["compute_s"], report["push_s"], report["wait_s"]) == (10.0, 1.5, 4.0)
    assert pushed.seconds == 5.5, "with the phases inside it"


def test_a_phase_ends_when_it_raises() -> None:
    clock = Clock()
    with suppress(ValueError), clock.times.during(Phase.WAIT):
        clock.spend(1.0)
        raise ValueError("inside")
    clock.spend(2.0)
    assert clock.times.report()["compute_s"] == 2.0


def test_steps_are_reported_once_without_the_time_between_them() -> None:
    clock = Clock()
    clock.spend(1.0)
    clock.spend(0.25, Phase.WAIT)
    clock.times.end_step()
    clock.spend(5.0, Phase.OTHER)  # a validation
    clock.spend(2.0)
    clock.times.move(0.125, Phase.WAIT, Phase.PULL)
    clock.times.end_step()
    first, second = clock.times.report()["steps"]
    assert first == [1e9 + 101.25, 1.0, 0.0, 0.25, 0.0]
    assert second == [1e9 + 108.25, 2.0, 0.0, -0.125, 0.125]
    assert clock.times.report()["steps"] == []


def test_a_report_has_the_last_steps_only() -> None:
    clock = Clock()
    for _ in range(3 * MAX_STEPS):
        clock.spend(1.0)
        clock.times.end_step()
    steps = clock.times.report()["steps"]
    assert len(steps) == MAX_STEPS
    assert steps[-1][0] == 1e9 + 100 + 3 * MAX_STEPS


ACTIONS = st.recursive(
    st.tuples(st.sampled_from(Phase), st.integers(0, 1000)),
    lambda inner: st.tuples(st.sampled_from(Phase), st.lists(inner, max_size=4)),
    max_leaves=30,
)


@given(st.lists(ACTIONS))
def test_the_phases_add_up_to_the_time_that_has_passed(actions: list[Any]) -> None:
    clock = Clock()

    def run(action: Any) -> None:
        phase, what = action
        with clock.times.during(phase):
            for inner in what if isinstance(what, list) else ():
                run(inner)
            clock.spend(float(what) if isinstance(what, int) else 1.0)

    for action in actions:
        run(action)
    report = clock.times.report()
    assert sum(report[f"{phase.name.lower()}_s"] for phase in Phase) == pytest.approx(clock.now - 100.0)
