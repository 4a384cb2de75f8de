"""What `echelon train` prints at the end of a run: one accuracy, the speed, and how stale the weights were."""

from __future__ import annotations

import textwrap
from typing import Any

from echelon.report.state.worker import sum_histograms
from echelon.report.terminal.lines import printable

LABEL = 14  # columns of the names at the left
BAR = 36
MAX_BARS = 12  # larger histograms have several values per bar


def result_lines(result: dict[str, Any], directory: str, width: int, block: str = "█") -> list[str]:
    """Return the result of a run, from its summary, for a terminal of `width` columns; the directory is not cut."""
    lines = []
    if result["accuracy"] is not None:
        lines += _entry("accuracy", f"{result['accuracy']:.4f}  {_which_accuracy(result)}", width)
    for name, value in result["metrics"].items():
        lines += _entry(f"{name} ", "not defined" if value is None else f"{value:.4f}", width)
    speed = f"{result['samples_per_s']:.0f}  ({result['samples']} samples in {result['seconds']:.1f} s)"
    lines += _entry("samples/s", speed, width)
    lines += _staleness(result, width, block)
    if result.get("not_whole"):
        lines += _entry("not whole", result["not_whole"], width)
    for warning in result["warnings"]:
        lines += _entry("warning", warning, width)
    written, also = f"{'written to':{LABEL}}{directory}/", "(also runs/latest)"
    fits = len(f"{written}  {also}") <= width
    return [*lines, f"{written}  {also}"] if fits else [*lines, written, f"{'':{LABEL}}{also}"]


def _which_accuracy(result: dict[str, Any]) -> str:
    epoch = result["accuracy_at_epoch"]
    when = "" if epoch is None else f", after epoch {epoch:g}"
    return f"{'validation of the final weights' if result['accuracy_is_final'] else 'last validation'}{when}"


def _staleness(result: dict[str, Any], width: int, block: str) -> list[str]:
    """Return the histograms of staleness in rounds, the unit of its bound, and in updates."""
    updates = sum_histograms(worker["staleness"] for worker in result["workers"])
    rounds = sum_histograms(worker["rounds_ahead"] for worker in result["workers"])
    if not updates:
        return []
    if set(updates) == {0}:
        return _entry("staleness", "none: no worker missed an update", width)
    bars = max(1, min(BAR, width - 24))
    lines: list[str] = []
    if (bound := result["staleness_bound"]) is not None:
        lines += _entry("staleness", f"steps by rounds ahead of the slowest worker (bound {bound})", width)
        lines += histogram_lines(rounds, bars, block)
    lines += _entry("staleness", "steps by updates of others between a read and its push", width)
    return lines + histogram_lines(updates, bars, block)


def _entry(label: str, text: str, width: int) -> list[str]:
    """Return a label and its text, which continues below itself if the line is too long."""
    return textwrap.wrap(
        printable(text),
        max(width, 2 * LABEL),
        initial_indent=f"{label:{LABEL}}",
        subsequent_indent=" " * LABEL,
        break_long_words=False,
    )


def histogram_lines(histogram: dict[int, int], bar: int = BAR, block: str = "█") -> list[str]:
    """Return a histogram as bars of text; many values share bars."""
    rows = _grouped(histogram)
    total, widest = sum(histogram.values()), max((count for _, count in rows), default=1)
    label = max((len(name) for name, _ in rows), default=0)
    return [
        f"  {name:>{max(3, label)}} {block * max(1, round(bar * count / widest))} {count} ({count / total:.0%})"
        for name, count in rows
    ]


def _grouped(histogram: dict[int, int]) -> list[tuple[str, int]]:
    """Return the bars of a histogram as (name, count), with as many values per bar as there must be."""
    per_bar = 1
    while len({value // per_bar for value in histogram}) > MAX_BARS:
        per_bar += 1
    counts: dict[int, int] = {}
    for value, count in sorted(histogram.items()):
        counts[value // per_bar] = counts.get(value // per_bar, 0) + count
    return [(_range(index * per_bar, per_bar), count) for index, count in counts.items()]


def _range(first: int, length: int) -> str:
    return str(first) if length == 1 else f"{first}-{first + length - 1}"
