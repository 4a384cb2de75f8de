"""Bands of repeated runs, and the colours of stores."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from echelon.report.colours import STORE_COLOURS, run_colours
from echelon.report.plots.bands import band, bands_figure, draw_bands, median_time
from echelon.schemes import SCHEMES

SLOW = [(1.0, 0.2), (5.0, 0.6)]
MIDDLE = [(1.0, 0.3), (3.0, 0.7), (5.0, 0.7)]
FAST = [(2.0, 0.9), (3.0, 1.0)]


def test_a_band_is_the_median_between_the_lowest_and_the_highest_curve() -> None:
    seconds, low, middle, high = band([SLOW, MIDDLE, FAST])
    assert (seconds[0], seconds[-1]) == (2.0, 5.0)  # from the last start to the last end
    np.testing.assert_allclose([low[0], middle[0], high[0]], [0.3, 0.5, 0.9])
    np.testing.assert_allclose([low[-1], middle[-1], high[-1]], [0.6, 0.7, 1.0])  # a curve that ended keeps its value


def test_a_run_that_misses_the_target_counts_as_infinite() -> None:
    assert median_time([SLOW, MIDDLE, FAST], 0.7) == 3.0
    assert median_time([SLOW, SLOW, FAST], 0.8) == math.inf


def test_every_store_has_one_line_in_its_colour(tmp_path: Path) -> None:
    panels = {case: {store: [SLOW, FAST] for store in SCHEMES} for case in ("equal", "slow", "link", "stalls")}
    figure = bands_figure(panels, 0.9)
    first = figure.axes[0]
    assert {line.get_label(): line.get_color() for line in first.lines if line.get_label() in SCHEMES} == STORE_COLOURS
    assert [axes.get_title() for axes in figure.axes] == list(panels)
    draw_bands({"equal": {"dist_sync": []}}, 0.9, tmp_path / "folder" / "bands.png")  # a store without a run
    assert (tmp_path / "folder" / "bands.png").stat().st_size > 0


def test_runs_with_the_same_store_have_different_colours() -> None:
    colours = run_colours(["dist_sync", "dist_gsync", "dist_sync", None, "dist_device_sync"])
    assert colours[:2] == [STORE_COLOURS["dist_sync"], STORE_COLOURS["dist_gsync"]]
    assert len(set(colours)) == 5
