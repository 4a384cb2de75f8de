"""Writes the table of loops into the documentation: `make loops-table`."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from loops.cases import THEMES
from loops.loop import ALONE, RELAXED, SAME, Case, Way, all_cases

DOCUMENT = Path(__file__).parents[2] / "docs" / "how-to" / "use-your-own-loop.md"
BEGIN, END = "<!-- loops: begin -->", "<!-- loops: end -->"
COMMAND = "make loops-table"

_COLUMNS = {  # what a column is called, which way stands for it, and how success is written
    "one worker": (Way.ONE, "same bits"),
    "`dist_sync`": (Way.SYNC, "as DDP"),
    "no servers": (Way.COLLECTIVE, "as DDP"),
    "relaxed": (Way.ASYNC, "learns"),
}


def table() -> str:
    """Return the table as Markdown, one part per theme."""
    cases = list(all_cases().values())
    parts = [f"{len(cases)} loops:"]
    for theme, group in groupby(cases, key=lambda case: case.theme):
        parts.append("\n".join([_row([THEMES[theme], *_COLUMNS]), _row(["---"] * 5), *map(_line, group)]))
    return "\n\n".join(parts)


def _line(case: Case) -> str:
    return _row([case.name, *(_cell(case, way, success) for way, success in _COLUMNS.values())])


def _cell(case: Case, way: Way, success: str) -> str:
    outcome = case.outcomes[way]
    if outcome != SAME:
        return f"refused: “{outcome.refused}”"
    if way in case.differs:
        return case.differs[way]
    if way not in RELAXED and not case.exact:
        return "same within bfloat16"
    if way in (Way.SYNC, Way.COLLECTIVE) and case.reference == ALONE:
        return "as one process"
    return success if case.is_compared(way) or (way in RELAXED and case.learns) else "ends"


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def with_table(text: str) -> str:
    """Return the text of the document with the newest table between its markers."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{DOCUMENT} has no {BEGIN} … {END}")
    return f"{before}{begin}\n{table()}\n{end}{after}"


if __name__ == "__main__":
    DOCUMENT.write_text(with_table(DOCUMENT.read_text()))
