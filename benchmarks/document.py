"""Markdown tables, and generated blocks of a document: text between two marks, so that no figure is copied by hand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

from echelon.errors import DataError

Cells: TypeAlias = Sequence[str]


def rewrite_block(text: str, name: str, block: str) -> str:
    """Return the document with `block` between `<!-- NAME:begin -->` and `<!-- NAME:end -->`."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise DataError(f"the document needs one {begin} and after it one {end}; add them where the tables belong")
    before, after = text.partition(begin)[0], text.partition(end)[2]
    return f"{before}{begin}\n{block}\n{end}{after}"


def table(heads: Cells, sides: str, cells: Iterable[Cells]) -> str:
    """Return a Markdown table. `sides` is l or r for each column. Without cells, return an empty string."""
    rules = [{"l": "---", "r": "---:"}[side] for side in sides]
    lines = [f"| {' | '.join(line)} |" for line in (heads, rules, *cells)]
    return "\n".join(lines) if len(lines) > 2 else ""


def yes(met: bool) -> str:
    """Return whether a target is met."""
    return "yes" if met else "**no**"
