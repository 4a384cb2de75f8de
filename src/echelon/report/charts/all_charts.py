"""All charts of recorded runs: those that compare the runs, and those of each run."""

from __future__ import annotations

from collections.abc import Sequence

from echelon.report.charts.chart import Chart
from echelon.report.charts.learning import learning_charts
from echelon.report.charts.recorded import RecordedRun
from echelon.report.charts.staleness import staleness_charts, staleness_overlay
from echelon.report.charts.steps import step_chart
from echelon.report.charts.work import fleet_rates, phase_chart, rate_chart, timeline


def all_charts(runs: Sequence[RecordedRun], colours: Sequence[str]) -> list[tuple[str, Chart]]:
    """Return the charts, each with the name of its run; "" for those of all runs, and if there is one run only."""
    found: list[tuple[str, Chart | None]] = [("", chart) for chart in learning_charts(runs, colours)]
    if len(runs) > 1:
        found += [("", fleet_rates(runs, colours)), ("", staleness_overlay(runs, colours))]
    for run, colour in zip(runs, colours, strict=True):
        name = run.name if len(runs) > 1 else ""
        own = [rate_chart(run), phase_chart(run), timeline(run), step_chart(run), *staleness_charts(run, colour)]
        found += [(name, chart) for chart in own]
    return [(name, chart) for name, chart in found if chart is not None]
