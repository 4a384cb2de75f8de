"""The block of one learning rate: the accuracy of the training commands under the four schemes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.compare.results import Result
from benchmarks.document import table
from benchmarks.one_rate import SCHEMES


def one_rate_table(results: Sequence[Result]) -> str:
    """Return one line per command and number of workers. A result's title is what was added to its command."""
    found: dict[tuple[str, int], Mapping[str, Any]] = {}
    for result in results:
        for cell in result.body["cells"]:
            label = f"{cell['command']}, {result.row.title}" if result.row.title else cell["command"]
            key = (label, cell["workers"])
            found[key] = {**found.get(key, {}), cell["scheme"]: cell["accuracy"]}
    heads = ("command", "workers", *(f"`{name}`" for name in SCHEMES))
    cells = [(label, str(workers), *_accuracies(found[label, workers])) for label, workers in sorted(found)]
    return table(heads, "lr" + "r" * len(SCHEMES), cells)


def _accuracies(by_scheme: Mapping[str, Any]) -> list[str]:
    """Return a text per scheme; None is a run that failed."""
    values = [by_scheme.get(name, "–") for name in SCHEMES]
    return ["failed" if value is None else value if value == "–" else f"{value:.4f}" for value in values]
