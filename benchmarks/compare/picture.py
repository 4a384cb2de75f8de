"""docs/comparison.png: how many times faster Echelon is than each peer, with the spread over the rounds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.compare.results import Result
from benchmarks.compare.tables import ratio_of

COLOURS = {"mxnet": "#2f6db3", "gloo": "#3a9a5b", "ddp": "#d9822b", "ddp_tuned": "#b98a5a"}
NAMES = {"mxnet": "MXNet", "gloo": "Gloo", "ddp": "DDP", "ddp_tuned": "DDP, tuned"}
KINDS = {"pushpull": "push-pull", "io": "", "train": "training"}
_GREY = "#6b7480"


class Bar(NamedTuple):
    """One ratio. `low` and `high` are the worst and the best round."""

    label: str
    peer: str
    ratio: float
    low: float
    high: float


def bars_of(results: Sequence[Result]) -> list[Bar]:
    """Return a bar for each peer of each result that is another system."""
    bars = []
    for result in results:
        if result.row.block not in KINDS:
            continue
        label = f"{KINDS[result.row.block]} {result.row.title.replace('`', '')}".strip()
        for case in result.body.get("cases", [])[1:]:
            if case["name"] in NAMES:
                ratio, (low, high) = ratio_of(result, case["name"])
                bars.append(Bar(label, case["name"], ratio, low, high))
    return bars


def comparison_figure(bars: Sequence[Bar]) -> Figure:
    """Return the drawing: bars to the right of 1 are faster, on a logarithmic axis."""
    figure = Figure(figsize=(9.5, 1.0 + 0.33 * len(bars)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for position, bar in enumerate(bars):
        axes.barh(position, bar.ratio - 1, left=1, height=0.72, color=COLOURS[bar.peer])
        error = [[max(0.0, bar.ratio - bar.low)], [max(0.0, bar.high - bar.ratio)]]
        axes.errorbar(bar.ratio, position, xerr=error, color="#333333", linewidth=1.1, capsize=2.5)
        axes.annotate(
            f"{bar.ratio:.2f} × {NAMES[bar.peer]}", (max(bar.high, bar.ratio, 1), position), xytext=(6, 0),
            textcoords="offset points", va="center", fontsize=9,
        )  # fmt: skip
    axes.axvline(1, color=_GREY, linewidth=1)
    axes.set_xscale("log")
    axes.set_xlim(min([0.8, *(bar.low * 0.9 for bar in bars)]), max([2.0, *(bar.high * 1.7 for bar in bars)]))
    ticks = [tick for tick in (0.5, 1, 2, 3, 5, 10, 20) if axes.get_xlim()[0] <= tick <= axes.get_xlim()[1]]
    axes.set_xticks(ticks, [f"{tick:g} ×" for tick in ticks])
    axes.minorticks_off()
    axes.set_yticks(range(len(bars)), [_label(bars, index) for index in range(len(bars))], fontsize=9)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", alpha=0.25)
    axes.set_ylim(len(bars) - 0.4, -0.6)
    figure.suptitle("How many times faster Echelon is than its peers; whiskers: worst and best round", fontsize=10.5)
    return figure


def _label(bars: Sequence[Bar], index: int) -> str:
    """Return the label of a bar: only the first bar of a measurement has one."""
    return "" if index and bars[index - 1].label == bars[index].label else bars[index].label


def draw_comparison(results: Sequence[Result], path: Path) -> bool:
    """Draw the bars of all results. Return False, and draw nothing, if there is none."""
    bars = bars_of(results)
    if bars:
        path.parent.mkdir(parents=True, exist_ok=True)
        comparison_figure(bars).savefig(path, dpi=130)
    return bool(bars)
