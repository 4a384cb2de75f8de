"""Single steps of all workers in a short stretch of the run: computing, pushing, waiting and pulling."""

from __future__ import annotations

import statistics

from echelon.report.charts.chart import Lane, Lanes, Segment, Step, axis
from echelon.report.charts.history import MAX_STEPS, PHASES, StepTime
from echelon.report.charts.recorded import RecordedRun
from echelon.report.charts.scales import duration
from echelon.report.charts.work import PARTS

MOST_STEPS = 480  # of all workers together
WIDTH = 40  # steps of the usual length that the chart is wide; in a wider one, steps could not be seen
SHORTEST = 0.002  # of the width of the chart; a part below it cannot be seen


def step_chart(run: RecordedRun) -> Lanes | None:
    """Return the steps of a stretch in which as many workers as possible took part, near the middle of the run."""
    window = {rank: steps for rank, steps in sorted(run.history.steps.best().items()) if steps}
    if not window:
        return None
    most = max(8, min(MAX_STEPS, MOST_STEPS // len(window)))
    begin = min(step.begin for steps in window.values() for step in steps)
    end = _end(window, begin, most)
    lanes = tuple(_lane(rank, steps[:most], begin, end) for rank, steps in window.items())
    return Lanes(
        "steps",
        f"Single steps, {duration(max(0.0, begin - run.start))} after the beginning",
        axis("time (ms)", 0.0, max(1e-3, (end - begin) * 1000), count=6),
        PARTS[:4],
        lanes,
        note="Blank: not recorded. A report contains at most the last eight steps of a worker.",
    )


def _end(window: dict[int, list[StepTime]], begin: float, most: int) -> float:
    """Return where the chart ends: where a worker's recorded steps are cut off, and after WIDTH steps at the latest."""
    usual = statistics.median(step.end - step.begin for steps in window.values() for step in steps)
    cut = [steps[most - 1].end for steps in window.values() if len(steps) >= most]
    return min([*(cut or [max(steps[-1].end for steps in window.values())]), begin + WIDTH * usual])


def _lane(rank: int, steps: list[StepTime], begin: float, end: float) -> Lane:
    drawn = [step for step in steps if step.begin < end]
    count = len(drawn)
    mean = [sum(step.phases[phase] for step in drawn) / max(1, count) for phase in range(4)]
    shares = ", ".join(f"{PHASES[phase]} {duration(mean[phase])}" for phase in range(4))
    shown = tuple(_step(rank, step, begin, end) for step in drawn)
    return Lane(f"worker {rank}", f"worker {rank}: {count} steps; on average {shares}", steps=shown)


def _step(rank: int, step: StepTime, begin: float, end: float) -> Step:
    """Return one step in milliseconds. The phases are drawn in their usual order: compute, push, wait, pull."""
    segments = []
    at = step.begin
    for phase, seconds in enumerate(step.phases):
        low, high = max(at, begin), min(at + seconds, end)
        if high - low > SHORTEST * (end - begin):
            segments.append(Segment(phase, (low - begin) * 1000, (high - begin) * 1000))
        at += seconds
    times = ", ".join(f"{PHASES[phase]} {duration(seconds)}" for phase, seconds in enumerate(step.phases))
    return Step(f"worker {rank}: {times}", tuple(segments))
