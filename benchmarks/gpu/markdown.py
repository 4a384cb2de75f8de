"""What the tables of `python -m benchmarks.gpu` have in common."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.gpu.results import Record
from benchmarks.gpu.rows import Row

Records = Mapping[str, Record]


def has_figures(row: Row, records: Records) -> bool:
    """Return whether a row ran without an error."""
    return row.name in records and not records[row.name].error
