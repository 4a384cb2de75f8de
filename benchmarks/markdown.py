"""Markdown tables, and what the tables of `python -m benchmarks.gpu` have in common."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from benchmarks.gpu.results import Record
from benchmarks.gpu.rows import Row

Records = Mapping[str, Record]
Cells = Sequence[str]


def has_figures(row: Row, records: Records) -> bool:
    """Return whether a row ran without an error."""
    return row.name in records and not records[row.name].error


def yes(met: bool) -> str:
    """Return whether a target is met."""
    return "yes" if met else "**no**"


def table(heads: Cells, sides: str, cells: Iterable[Cells]) -> str:
    """Return a Markdown table. `sides` is l or r for each column. Without cells, return an empty string."""
    rules = [{"l": "---", "r": "---:"}[side] for side in sides]
    lines = [f"| {' | '.join(line)} |" for line in (heads, rules, *cells)]
    return "\n".join(lines) if len(lines) > 2 else ""
