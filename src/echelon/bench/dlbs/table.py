"""The table at the end of a sweep: one row per experiment, with what varied, its batch time and its throughput."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import shorten

from rich.table import Table
from rich.text import Text

from echelon.bench.dlbs.execute import Outcome
from echelon.bench.dlbs.parameters import shown
from echelon.bench.dlbs.rerun import OK

_STATUS_WIDTH = 80  # the whole cause is in the line of the experiment and in its log
_HEADINGS = ("batch ms", "± std", "p90", "samples/s", "status")


def make_table(outcomes: Sequence[Outcome]) -> Table:
    """Return the results of a sweep. Experiments without a result have the cause as their status."""
    varied = list(dict.fromkeys(key for outcome in outcomes for key in outcome.experiment.varied)) or ["exp.model"]
    table = Table(title="results", title_justify="left")
    for key in varied:
        table.add_column(key, overflow="fold")
    for heading in _HEADINGS:
        is_text = heading == "status"
        table.add_column(heading, justify="left" if is_text else "right", no_wrap=not is_text)
    for outcome in outcomes:
        parameters = outcome.experiment.parameters
        values = [parameters.get(key) for key in varied]
        names = [value if isinstance(value, str) else "" if value is None else shown(value) for value in values]
        table.add_row(*map(Text, names), *map(Text, cells(outcome)))
    return table


def cells(outcome: Outcome) -> list[str]:
    """Return the figures and the status of an experiment."""
    records = outcome.records
    if "results.throughput" not in records or outcome.status != OK:
        return ["", "", "", "", shorten(_cause(outcome), _STATUS_WIDTH, placeholder=" …")]
    numbers = [f"{records[f'results.{name}']:.2f}" for name in ("time", "time_std", "time_p90")]
    return [*numbers, f"{records['results.throughput']:.1f}", OK]


def result_line(outcome: Outcome) -> str:
    """Return the result of an experiment in a few words."""
    records = outcome.records
    if outcome.status == OK and "results.throughput" in records:
        time, rate = records["results.time"], records["results.throughput"]
        return f"{time:.2f} ms per batch, {rate:.1f} samples/s"
    return _cause(outcome)


def _cause(outcome: Outcome) -> str:
    return f"{outcome.status}: {outcome.message}" if outcome.message else outcome.status
