"""`curves.png`: which panels a run has, and that everything measured is visible."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes

from echelon.report.plots.curves import draw_curves, figure_of

ACCURACY, LOSS, WORKERS = "accuracy over time", "loss over time", "time of each worker"
ROUNDS, UPDATES = "staleness in rounds", "staleness in updates"


def points(count: int, *, loss: float | None = 0.5) -> list[dict[str, Any]]:
    return [{"seconds": 10.0 * (i + 1) / count, "epoch": i + 1, "accuracy": 0.9, "loss": loss} for i in range(count)]


def worker(rank: int, **changed: Any) -> dict[str, Any]:
    usual = {"rank": rank, "clock": 40, "samples": 1280, "wait_s": 1.0, "phase": "finished", "seconds": 10.0}
    return usual | {"staleness": {"0": 30, "4": 10}, "rounds_ahead": {"0": 10, "3": 30}} | changed


ALONE = worker(0, wait_s=0.0, staleness={}, rounds_ahead={})


def run(num_workers: int = 4, **changed: Any) -> dict[str, Any]:
    usual = {"store": "dist_ssync", "accuracy": 0.97, "accuracy_is_final": True, "samples_per_s": 512.0}
    usual |= {"seconds": 10.0, "exit_status": 0, "validations": points(4), "training": points(40)}
    usual |= {"staleness_bound": 3, "workers": [worker(rank) for rank in range(num_workers)]}
    return usual | {"settings": {"network": "digits-cnn", "data": "digits"}} | changed


def panels(summary: dict[str, Any]) -> dict[str, Axes]:
    return {axes.get_title(): axes for axes in figure_of(summary).get_axes()}


def labels(axes: Axes) -> list[str]:
    return [text.get_text() for text in axes.get_legend().get_texts()]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        pytest.param({}, [ACCURACY, LOSS, WORKERS, ROUNDS, UPDATES], id="bounded"),
        pytest.param({"staleness_bound": None}, [ACCURACY, LOSS, WORKERS, UPDATES], id="no bound"),
        pytest.param(
            {"workers": [worker(rank, staleness={"0": 40}) for rank in range(2)], "staleness_bound": None},
            [ACCURACY, LOSS, WORKERS],
            id="lock-step",
        ),
        pytest.param({"workers": [ALONE]}, [ACCURACY, LOSS], id="one worker without servers"),
        pytest.param({"workers": [ALONE], "validations": [], "training": []}, [WORKERS], id="stopped at once"),
    ],
)
def test_a_run_has_only_panels_with_data(changed: dict[str, Any], expected: list[str]) -> None:
    drawn = panels(run(**changed))
    assert list(drawn) == expected
    for title, axes in drawn.items():
        assert axes.lines or axes.patches, title
        assert axes.get_xlabel(), title
        assert axes.get_ylabel(), title


def test_training_and_validation_are_drawn() -> None:
    drawn = panels(run())
    assert labels(drawn[ACCURACY]) == ["training", "validation", "validation, final weights"]
    assert labels(drawn[LOSS]) == ["training", "validation"]
    assert labels(panels(run(validations=[], accuracy=None, accuracy_is_final=False))[LOSS]) == ["training"]


def test_a_single_point_has_a_marker_inside_the_axes() -> None:
    for axes in list(panels(run(validations=points(1), training=points(1))).values())[:2]:
        for line in axes.get_lines():
            assert line.get_marker() == "o"
            assert line.get_markersize() >= 4
            low, high = axes.get_xlim()
            assert low < np.asarray(line.get_xdata(), dtype=float).item() < high


@pytest.mark.parametrize(("seconds", "unit"), [(12.0, "s"), (1200.0, "min"), (40_000.0, "h")])
def test_the_axis_of_time_has_a_unit(seconds: float, unit: str) -> None:
    drawn = panels(run(seconds=seconds))
    assert {drawn[title].get_xlabel() for title in (ACCURACY, LOSS, WORKERS)} == {f"time ({unit})"}


def test_a_loss_that_diverges_is_drawn_until_it_is_not_a_number() -> None:
    axes = panels(run(training=[*points(3, loss=1e5), *points(3, loss=None)]))[LOSS]
    assert axes.get_yscale() == "log"
    assert panels(run())[LOSS].get_yscale() == "linear"


def test_labels_of_workers_stay_inside_the_panel() -> None:
    unfinished = [worker(rank, phase="stopped") for rank in range(4)]
    figure = figure_of(run(workers=unfinished, exit_status=130))
    figure.canvas.draw()
    axes = next(axes for axes in figure.get_axes() if axes.get_title() == WORKERS)
    edge = axes.get_window_extent().x1
    assert [text.get_text().strip() for text in axes.texts] == ["40 steps, stopped"] * 4
    assert all(text.get_window_extent().x1 <= edge for text in axes.texts)


def test_the_title_says_which_accuracy_it_is_and_the_status_of_a_failure() -> None:
    assert figure_of(run()).get_suptitle() == "digits-cnn on digits, dist_ssync: 512 samples/s, final accuracy 0.9700"
    made = {"network": "lenet", "data": "digits", "benchmark": True}
    assert figure_of(run(settings=made)).get_suptitle().startswith("lenet on synthetic data, ")
    stopped = figure_of(run(accuracy_is_final=False, exit_status=130)).get_suptitle().replace("\n", " ")
    assert stopped.endswith("last accuracy 0.9700 (exit status 130)")


def test_a_run_without_workers_says_so() -> None:
    [(_, axes)] = panels(run(workers=[], validations=[], training=[])).items()
    assert [text.get_text() for text in axes.texts] == ["no worker reported anything"]


@pytest.mark.parametrize("num_workers", [1, 8, 32])
def test_a_picture_is_written(tmp_path: Path, num_workers: int) -> None:
    draw_curves(run(num_workers), tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
