"""Tables as Markdown, CSV and JSON. Cells hold values; only Markdown rounds them, or shows them with more words."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Value = str | int | float | None


class Shown(NamedTuple):
    """A value that Markdown shows as another text."""

    value: Value
    text: str


Cell = Value | Shown


@dataclass(frozen=True, slots=True)
class Column:
    """A column: its title, and how its values are written in Markdown."""

    title: str
    written: Callable[[Any], str] = str


@dataclass(frozen=True, slots=True)
class Row:
    """The values of a row. `status` says how a run ended, if not as planned; only CSV and JSON have `more`."""

    cells: tuple[Cell, ...]
    status: str = ""
    more: dict[str, Value] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Section:
    """Rows under a text. `common` are the values that all rows have, which CSV and JSON write in every row."""

    rows: tuple[Row, ...]
    text: str = ""
    common: dict[str, Value] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Table:
    """A table with a title and sections."""

    name: str
    title: str
    columns: tuple[Column, ...]
    sections: tuple[Section, ...]
    note: str = ""

    @property
    def is_empty(self) -> bool:
        """Whether it has no row."""
        return not any(section.rows for section in self.sections)


def as_markdown(tables: Sequence[Table]) -> str:
    """Return all tables with their titles."""
    return "\n\n".join(_markdown(table) for table in tables)


def _markdown(table: Table) -> str:
    parts = [f"### {table.title}"]
    for section in table.sections:
        titles = [column.title for column in table.columns]
        lines = [titles, ["---"] * len(titles), *(_cells(table.columns, row) for row in section.rows)]
        parts += [section.text] if section.text else []
        parts.append("\n".join(f"| {' | '.join(line)} |" for line in lines))
    return "\n\n".join([*parts, table.note] if table.note else parts)


def _cells(columns: Sequence[Column], row: Row) -> list[str]:
    """Return the texts of a row. The last one ends with the status of a run that did not end as planned."""
    texts = [_text(column, cell) for column, cell in zip(columns, row.cells, strict=True)]
    if row.status:
        texts[-1] = f"{texts[-1]} ({row.status})".lstrip()
    return [text.replace("|", "\\|").replace("\n", " ") for text in texts]


def _text(column: Column, cell: Cell) -> str:
    if isinstance(cell, Shown):
        return cell.text
    return "" if cell is None else column.written(cell)


def as_csv(tables: Sequence[Table]) -> str:
    """Return the rows of one table, with all digits."""
    (table,) = tables
    rows = _flat(table)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]) if rows else [column.title for column in table.columns])
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().replace("\r\n", "\n").rstrip("\n")


def as_json(tables: Sequence[Table]) -> str:
    """Return an object with a list of rows per table. JSON has null for a figure that is missing or not finite."""
    return json.dumps({table.name: _flat(table) for table in tables}, indent=2, ensure_ascii=False)


def _flat(table: Table) -> list[dict[str, Value]]:
    titles = [column.title for column in table.columns]
    return [
        {
            **section.common,
            **dict(zip(titles, map(_value, row.cells), strict=True)),
            **row.more,
            "status": row.status or "ok",
        }
        for section in table.sections
        for row in section.rows
    ]


def _value(cell: Cell) -> Value:
    value = cell.value if isinstance(cell, Shown) else cell
    return None if isinstance(value, float) and not math.isfinite(value) else value


FORMATS: dict[str, Callable[[Sequence[Table]], str]] = {"markdown": as_markdown, "csv": as_csv, "json": as_json}
