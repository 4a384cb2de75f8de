"""Tables of text. A table that is wider than the page scrolls by itself."""

from __future__ import annotations

import re
from collections.abc import Sequence

from echelon.report.page.html import Child, Html, element

LONG_TEXT = 24  # letters; such a cell may wrap, but not into a column of single words
_NUMBER = re.compile(r"[−–-]?[\d.,]*(\s?(%|×|s|ms|min|h|B|kB|MB|GB|TB|e-?\d+)(/s)?)?(\s?\(\d+\))?|NaN|∞")


def table(headings: Sequence[Child], rows: Sequence[Sequence[Child]], caption: str | None = None) -> Html:
    """Return a table. The first cell of a row is its heading; columns of numbers are justified to the right."""
    numeric = [
        bool(rows) and all(_NUMBER.fullmatch(str(row[column] or "")) for row in rows) for column in range(len(headings))
    ]
    head = element("tr", *(_cell("th", h, numeric[i], scope="col") for i, h in enumerate(headings)))
    body = [
        element(
            "tr", *(_cell("td" if i else "th", c, numeric[i], scope=None if i else "row") for i, c in enumerate(row))
        )
        for row in rows
    ]
    content = element(
        "table",
        element("caption", caption) if caption else None,
        element("thead", head),
        element("tbody", *body),
    )
    return element("div", content, class_="scroll", tabindex="0")


def without_unknown(headings: Sequence[str], rows: Sequence[Sequence[Child]]) -> tuple[list[str], list[list[Child]]]:
    """Return a table without the columns in which nothing is known."""
    known = [column for column in range(len(headings)) if any(row[column] != "–" for row in rows)]
    return [headings[column] for column in known], [[row[column] for column in known] for row in rows]


def _cell(name: str, value: Child, numeric: bool, scope: str | None) -> Html:
    is_long = len(str(value or "")) > LONG_TEXT and not isinstance(value, Html)
    return element(name, value, class_="n" if numeric else "long" if is_long else None, scope=scope)
