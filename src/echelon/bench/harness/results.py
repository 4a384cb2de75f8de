"""The result of a benchmark: a table on the terminal and a JSON file under `benchmarks/results/`.

A result file records the command, the commit and the machine, because figures are not comparable without them. It does
not contain the host name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table

from echelon.atomic_file import write_json
from echelon.bench.harness.turns import Case, ratios
from echelon.observe.machine import command_line, commit, machine


def write_result(path: Path, body: Mapping[str, object], command: str | None = None) -> None:
    """Write a result file atomically: command, commit, machine and date, then `body`."""
    stamped = {
        "command": command or command_line(),
        "commit": commit(),
        "machine": machine(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **body,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, _finite(stamped))


def _finite(value: object) -> object:
    """Return the value with None for every infinite or undefined number, which JSON does not have."""
    if isinstance(value, Mapping):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def figures(cases: Sequence[Case]) -> dict[str, object]:
    """Return cases and ratios in the form of a result file."""
    against_first = ratios(cases)
    return {
        "cases": [asdict(case) for case in cases],
        "ratios": {ratio.name: ratio.value for ratio in against_first},
        "ratio_spread": {
            ratio.name: {"low": ratio.low, "high": ratio.high, "rounds": ratio.rounds} for ratio in against_first
        },
    }


def print_times(title: str, cases: Sequence[Case]) -> None:
    """Print the median and spread of each contender's step times, then the ratios."""

    def cells(case: Case) -> list[str]:
        times = [f"{value:.3f}" for value in (case.median_ms, case.p10_ms, case.p90_ms)]
        return [*times, str(case.samples)]

    print_cases(title, cases, ("median ms", "p10", "p90", "samples"), cells)
    for ratio in ratios(cases):
        print(f"{ratio.name}: {ratio.value:.2f}")


def print_cases(
    title: str, cases: Sequence[Case], headings: Sequence[str], cells: Callable[[Case], Sequence[str]]
) -> None:
    """Print one row per contender: its name, its cells, and the ratio of the first contender to it."""
    table = Table(title=title, title_justify="left")
    table.add_column("case")
    for heading in (*headings, "ratio", "over rounds"):
        table.add_column(heading, justify="right")
    shown = [("", ""), *((f"{ratio.value:.2f} ×", f"{ratio.low:.2f} – {ratio.high:.2f}") for ratio in ratios(cases))]
    for case, compared in zip(cases, shown, strict=True):
        table.add_row(case.name, *cells(case), *compared)
    Console().print(table)
