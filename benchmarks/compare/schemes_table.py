"""The block of the schemes: the time to an accuracy per case, and where lock-step wins and loses."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.compare.results import Result
from benchmarks.document import table, yes
from echelon.bench.schemes.cases import BASELINE, CASES, STALENESS
from echelon.bench.schemes.table import finite

HEADS = ("case", "store", "median s", "lowest – highest", "reached", "samples/s", f"× `{BASELINE}`", "target")
TARGETS = {("one slow", "dist_gsync"): 1.8, ("stalls", "dist_ssync"): 1.2}  # by case and store, × lock-step
EQUAL = ("equal", "high rate")  # the same workers at two learning rates
Facts = Mapping[str, Any]


def schemes_table(results: Sequence[Result]) -> str:
    """Return the table of every result, followed by what it says about lock-step."""
    return "\n\n".join(_one(result.body) for result in results)


def _one(body: Mapping[str, Any]) -> str:
    cases = dict.fromkeys(row["case"] for row in body["table"])
    by_case = {case: [row for row in body["table"] if row["case"] == case] for case in cases}
    cells = [line for case, rows in by_case.items() for line in _cells(case, rows)]
    conclusions = [f"- {title(case)}: {verdict(rows)}." for case, rows in by_case.items()]
    if all(case in by_case for case in EQUAL):
        both = [by_case[case] for case in EQUAL]
        conclusions.append(f"- equal workers, each scheme at the better of the two learning rates: {best_of(both)}.")
    missing = [f"- **{title(case)}: not run, because {why}**." for case, why in body.get("not_run", {}).items()]
    return "\n\n".join([table(HEADS, "llrrrrrl", cells), "\n".join([*conclusions, *missing])])


def title(case: str) -> str:
    """Return what a case is, in words."""
    return CASES[case].title if case in CASES else case


def _cells(case: str, rows: Sequence[Facts]) -> list[tuple[str, ...]]:
    best = min((row["median_s"] for row in rows if row["median_s"] is not None), default=None)
    lines: list[tuple[str, ...]] = []
    for index, row in enumerate(rows):
        median = _seconds(row["median_s"])
        speedup = row["speedup_over_bsp"]
        lines.append(
            (
                title(case) if index == 0 else "",
                f"`{row['store']}`" + (f" ({STALENESS})" if row["store"] == "dist_ssync" else ""),
                f"**{median}**" if row["median_s"] is not None and row["median_s"] == best else median,
                f"{_seconds(row['min_s'])} – {_seconds(row['max_s'])}",
                f"{row['reached']} of {row['runs']}" if "reached" in row else "",
                f"{row['samples_per_s']:,.0f}",
                "" if speedup is None else f"{speedup:.2f}",
                _target(case, row),
            )
        )
    return lines


def _target(case: str, row: Facts) -> str:
    if (target := TARGETS.get((case, row["store"]))) is None:
        return ""
    return f"{target:g} ×: {yes((row['speedup_over_bsp'] or 0) >= target)}"


def best_of(cases: Sequence[Sequence[Facts]]) -> str:
    """Return the lowest median of each store over several cases, the fastest store first."""
    best: dict[str, float] = {}
    for row in (row for rows in cases for row in rows):
        best[row["store"]] = min(best.get(row["store"], math.inf), _median(row))
    ordered = sorted(best.items(), key=lambda item: item[1])
    return ", ".join(f"`{store}` {_seconds(finite(median))} s" for store, median in ordered)


def verdict(rows: Sequence[Facts]) -> str:
    """Return whether lock-step reaches the target first. Ranges over the seeds that overlap decide nothing."""
    lock_step = next(row for row in rows if row["store"] == BASELINE)
    others = [row for row in rows if row["store"] != BASELINE]
    ahead = [row for row in others if _high(row) < _low(lock_step)]
    behind = [row for row in others if _low(row) > _high(lock_step)]
    if others and len(behind) == len(others):
        return f"**lock-step wins**; {_times(behind, lock_step)}"
    if ahead:
        return f"**lock-step loses**; {_times(ahead, lock_step)}"
    return f"no clear winner, because the ranges of `{BASELINE}` and the fastest overlap"


def _times(rows: Sequence[Facts], lock_step: Facts) -> str:
    return ", ".join(_against(row, lock_step) for row in rows)


def _against(row: Facts, lock_step: Facts) -> str:
    if row["median_s"] is None:
        return f"`{row['store']}` never reaches the target in most runs"
    if lock_step["median_s"] is None:
        return f"`{row['store']}` needs {row['median_s']:.2f} s, and `{BASELINE}` never reaches the target in most runs"
    quotient = lock_step["median_s"] / row["median_s"]
    if quotient >= 1:
        return f"`{row['store']}` needs {100 / quotient:.0f} % of its time"
    return f"`{row['store']}` takes {1 / quotient:.1f} times as long"


def _median(row: Facts) -> float:
    return math.inf if row["median_s"] is None else float(row["median_s"])


def _low(row: Facts) -> float:
    return math.inf if row["min_s"] is None else float(row["min_s"])


def _high(row: Facts) -> float:
    return math.inf if row["max_s"] is None else float(row["max_s"])


def _seconds(value: float | None) -> str:
    return "never" if value is None else f"{value:.2f}"
