"""The table of `echelon bench schemes`: medians over the seeds, per case and scheme."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from echelon.bench.schemes.cases import BASELINE, CASES, WORKERS
from echelon.bench.schemes.measure import Outcome
from echelon.schemes import SCHEMES

COLUMNS = ("case", "store", "median s", "spread", "samples/s", "× BSP")


def table_facts(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Return one row per case and scheme: medians over seeds, and BSP's median divided by this one.

    Runs that did not reach the target count as infinite; JSON has no infinity, so such a figure is None.
    """
    found: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in outcomes:
        found.setdefault((outcome.case, outcome.store), []).append(outcome)
    keys = [(case, store) for case in CASES for store in SCHEMES if (case, store) in found]
    return [_row(found[key], found.get((key[0], BASELINE), [])) for key in keys]


def _row(runs: Sequence[Outcome], baseline: Sequence[Outcome]) -> dict[str, Any]:
    seconds = sorted(run.seconds for run in runs)
    median = statistics.median(seconds)
    speedup = statistics.median(run.seconds for run in baseline) / median if baseline else math.nan
    return {
        "case": runs[0].case,
        "store": runs[0].store,
        "median_s": finite(median),
        "min_s": finite(seconds[0]),
        "max_s": finite(seconds[-1]),
        "reached": sum(math.isfinite(value) for value in seconds),
        "runs": len(seconds),
        "samples_per_s": round(statistics.median(run.samples_per_s for run in runs), 1),
        "speedup_over_bsp": finite(speedup) if math.isfinite(median) else None,
    }


def make_table(rows: Sequence[dict[str, Any]], target: float) -> Table:
    """Return the rows as a table for the terminal."""
    table = Table(title=f"seconds to {target:g} on digits, {WORKERS} paced workers", title_justify="left")
    for heading in COLUMNS:
        table.add_column(heading, justify="left" if heading in ("case", "store") else "right")
    for row in rows:
        spread = f"{shown(row['min_s'])} – {shown(row['max_s'])}"
        speedup = row["speedup_over_bsp"]
        figures = (shown(row["median_s"]), spread, f"{row['samples_per_s']:.0f}", "" if speedup is None else speedup)
        table.add_row(row["case"], row["store"], *map(str, figures))
    return table


def finite(value: float) -> float | None:
    """Return a figure as JSON has it: None if it is infinite or undefined."""
    return round(value, 3) if math.isfinite(value) else None


def shown(seconds: float | None) -> str:
    """Return seconds to the target as text."""
    return "never" if seconds is None else f"{seconds:.2f}"
