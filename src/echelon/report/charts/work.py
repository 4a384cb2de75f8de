"""How fast the workers were, and where their time went."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from echelon.report.charts.chart import Axis, Band, Cell, Lane, Lanes, Line, Lines, Part, Stack, Stacks, axis, axis_of
from echelon.report.charts.history import PHASES, Bins, Span
from echelon.report.charts.recorded import FAILED, RecordedRun
from echelon.report.charts.scales import duration, unit_of_time
from echelon.report.colours import GREY, PHASE_COLOURS, worker_colours

MOST_BINS = 120
MOST_CELLS = 2400  # of all lanes together
SLOW_RATE = 0.8  # of the median rate
MOST_WORKER_LINES = 10  # more workers have a band, and lines only for the slowest and those that left

PARTS = tuple(Part(phase, PHASE_COLOURS[phase]) for phase in PHASES)
ABOUT_PARTS = (
    "Compute: forward and backward pass, and the rest of the loop. Push: copying and sending gradients. Wait: servers "
    "hold the answer because the scheme waits for other workers. Pull: transfer, update and copy of weights. Other: "
    "validation and checkpoints."
)
OLD_PARTS = (Part("compute, push and pull", PHASE_COLOURS["compute"]), *PARTS[1:])


def parts_of(run: RecordedRun) -> tuple[Part, ...]:
    """Return the kinds of time that the workers report. Runs of older versions report only their wait."""
    return PARTS if run.history.has_phases else OLD_PARTS


def time_axis(run: RecordedRun) -> tuple[Axis, float]:
    """Return the time axis of a run, and its unit in seconds."""
    scale, unit = unit_of_time(run.seconds)
    return axis(f"time ({unit})", 0.0, max(run.seconds, 1e-3) / scale, count=6), scale


def moments(run: RecordedRun, scale: float) -> tuple[tuple[float, str], ...]:
    """Return when workers failed, left early or joined again, for marks in charts over time."""
    return tuple(
        ((fault.at - run.start) / scale, f"{fault.who} {fault.kind} {fault.text}".rstrip())
        for fault in run.state.faults
        if fault.kind != "stall"
    )


def rate_chart(run: RecordedRun) -> Lines | None:
    """Return the samples per second of each worker over time."""
    bins = _bins(run, MOST_BINS)
    if not bins:
        return None
    x, scale = time_axis(run)
    lines = tuple(_rates(run.worker_label(rank), one, scale) for rank, one in bins.items())
    bands: tuple[Band, ...] = ()
    if len(lines) > MOST_WORKER_LINES:
        bands = (_spread(lines),)
        lines = (_median(lines), *_unusual(run, lines))
    colours = worker_colours(len(lines)) if not bands else ["#2f6db3", *worker_colours(len(lines) - 1, first=1)]
    lines = tuple(Line(line.label, line.points, colour) for line, colour in zip(lines, colours, strict=True))
    y = axis_of("samples/s", [y for line in lines for _, y in line.points])
    title = "Samples per second of each worker"
    return Lines("rates", title, x, y, lines, bands, moments(run, scale))


def fleet_rates(runs: Sequence[RecordedRun], colours: Sequence[str]) -> Lines | None:
    """Return the samples per second of all workers together, one line per run."""
    scale, unit = unit_of_time(max(run.seconds for run in runs))
    lines = []
    for run, colour in zip(runs, colours, strict=True):
        if bins := list(_bins(run, 60).values()):
            width = bins[0].width
            points = tuple(
                ((index + 0.5) * width / scale, sum(one.samples[index] for one in bins) / width)
                for index in range(len(bins[0].samples))
            )
            lines.append(Line(run.name, points, colour))
    if not lines:
        return None
    x = axis(f"time ({unit})", 0.0, max(run.seconds for run in runs) / scale)
    y = axis_of("samples/s", [y for line in lines for _, y in line.points])
    return Lines("fleet-rates", "Samples per second of all workers together", x, y, tuple(lines))


def phase_chart(run: RecordedRun) -> Stacks | None:
    """Return how each worker spent its time, in all."""
    rows = [Stack(run.worker_label(rank), totals) for rank, totals in phase_totals(run).items()]
    if not rows:
        return None
    longest = max(sum(row.values) for row in rows)
    scale, unit = unit_of_time(longest)
    rows = [Stack(row.label, tuple(value / scale for value in row.values)) for row in rows]
    x = axis(f"time ({unit})", 0.0, max(longest, 1e-3) / scale, count=6)
    title = "Where the time of each worker went"
    return Stacks(
        "phases", title, x, parts_of(run), tuple(rows), unit, note=ABOUT_PARTS if run.history.has_phases else ""
    )


def phase_totals(run: RecordedRun) -> dict[int, tuple[float, ...]]:
    """Return the seconds of each phase per worker, over all its lives."""
    totals: dict[int, tuple[float, ...]] = {}
    for rank, worker in sorted(run.history.workers.items()):
        if spans := worker.spans():
            totals[rank] = tuple(map(sum, zip(*(span.phases for span in spans), strict=True)))
    return totals


def timeline(run: RecordedRun) -> Lanes | None:
    """Return what each worker did over the whole run: one lane per worker, of cells with the share of each phase."""
    workers = max(1, len(run.history.workers))
    bins = _bins(run, max(24, min(MOST_BINS, MOST_CELLS // workers)))
    if not bins:
        return None
    x, scale = time_axis(run)
    parts = parts_of(run)
    totals = phase_totals(run)
    lanes = tuple(
        Lane(run.worker_label(rank), _sentence(rank, totals[rank], parts), cells=_cells(one, scale))
        for rank, one in bins.items()
        if rank in totals
    )
    return Lanes("timeline", "What each worker did over the run", x, parts, lanes, moments(run, scale))


def _sentence(rank: int, totals: Sequence[float], parts: Sequence[Part]) -> str:
    whole = sum(totals) or 1.0
    shares = ", ".join(
        f"{part.label} {seconds / whole:.0%} ({duration(seconds)})"
        for part, seconds in zip(parts, totals, strict=True)
        if seconds > 0
    )
    return f"worker {rank}: {shares}"


def _cells(bins: Bins, scale: float) -> tuple[Cell, ...]:
    cells = []
    for index, covered in enumerate(bins.seconds):
        phases = bins.phases[index]
        if covered <= 0.02 * bins.width:
            continue
        whole = max(sum(phases), 1e-12)
        shares = tuple(seconds / whole for seconds in phases)
        cells.append(Cell(index * bins.width / scale, (index + 1) * bins.width / scale, shares))
    return tuple(cells)


def _bins(run: RecordedRun, most: int) -> dict[int, Bins]:
    """Return what each worker did in equal bins of time, no more of them than its reports can fill."""
    spans: dict[int, list[Span]] = {}
    for rank, worker in sorted(run.history.workers.items()):
        if found := worker.spans():
            spans[rank] = found
    if not spans or not run.seconds:
        return {}
    count = max(1, min(most, max(map(len, spans.values()))))
    return {rank: Bins(found, run.start, run.start + run.seconds, count) for rank, found in spans.items()}


def _rates(label: str, bins: Bins, scale: float) -> Line:
    points = tuple(((index + 0.5) * bins.width / scale, bins.rate(index)) for index in range(len(bins.samples)))
    return Line(label, points, "")


def _columns(lines: Sequence[Line]) -> list[tuple[float, list[float]]]:
    """Return per x the finite values of all lines."""
    return [
        (column[0][0], sorted(y for _, y in column if math.isfinite(y)))
        for column in zip(*(line.points for line in lines), strict=True)
    ]


def _spread(lines: Sequence[Line]) -> Band:
    points = tuple((x, values[0], values[-1]) for x, values in _columns(lines) if values)
    return Band("lowest to highest of all workers", points, GREY)


def _median(lines: Sequence[Line]) -> Line:
    points = tuple((x, statistics.median(values) if values else math.nan) for x, values in _columns(lines))
    return Line(f"median of {len(lines)} workers", points, "")


def _unusual(run: RecordedRun, lines: Sequence[Line]) -> list[Line]:
    """Return the lines of the workers that failed, and of those with the lowest rates, at most five."""
    failed = {run.worker_label(worker.rank) for worker in run.state.ranked if worker.phase in FAILED}
    low = SLOW_RATE * statistics.median(map(_mean, lines))
    slow = sorted((line for line in lines if line.label not in failed and _mean(line) < low), key=_mean)
    return [line for line in lines if line.label in failed][:3] + slow[:2]


def _mean(line: Line) -> float:
    values = [y for _, y in line.points if math.isfinite(y)]
    return statistics.fmean(values) if values else math.inf
