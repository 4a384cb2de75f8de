"""The lines that `echelon train` prints at the end."""

from __future__ import annotations

from typing import Any

import pytest

from echelon.report.terminal.result import MAX_BARS, histogram_lines, result_lines


def result(**changed: Any) -> dict[str, Any]:
    workers = [{"staleness": {"0": 30, "5": 10}, "rounds_ahead": {"0": 10, "3": 30}}]
    usual = {"accuracy": 0.98611, "accuracy_at_epoch": 16.0, "accuracy_is_final": True, "metrics": {}}
    speed = {"samples_per_s": 1957.2, "samples": 22992, "seconds": 11.75}
    return usual | speed | {"staleness_bound": 3, "workers": workers, "warnings": []} | changed


def test_the_lines_at_80_columns() -> None:
    assert result_lines(result(), "runs/name", 80) == [
        "accuracy      0.9861  validation of the final weights, after epoch 16",
        "samples/s     1957  (22992 samples in 11.8 s)",
        "staleness     steps by rounds ahead of the slowest worker (bound 3)",
        "    0 ████████████ 10 (25%)",
        "    3 ████████████████████████████████████ 30 (75%)",
        "staleness     steps by updates of others between a read and its push",
        "    0 ████████████████████████████████████ 30 (75%)",
        "    5 ████████████ 10 (25%)",
        "written to    runs/name/  (also runs/latest)",
    ]


def test_lines_are_folded_in_a_narrow_terminal_and_a_path_is_not() -> None:
    lines = result_lines(result(), "runs/" + "n" * 60, 52, "#")
    assert lines[:2] == ["accuracy      0.9861  validation of the final", "              weights, after epoch 16"]
    assert all(len(line) <= 52 for line in [*lines[:-2], lines[-1]])
    assert lines[-2:] == ["written to    runs/" + "n" * 60 + "/", "              (also runs/latest)"]
    assert any("####" in line for line in lines)


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        pytest.param(
            {"accuracy_is_final": False}, "accuracy      0.9861  last validation, after epoch 16", id="stopped"
        ),
        pytest.param(
            {"accuracy_at_epoch": None}, "accuracy      0.9861  validation of the final weights", id="no epoch"
        ),
    ],
)
def test_the_accuracy_says_which_one_it_is(changed: dict[str, Any], line: str) -> None:
    assert result_lines(result(**changed), "runs/name", 80)[0] == line


def test_added_metrics_follow_the_accuracy() -> None:
    added = {"f1": 0.87, "top_k_accuracy_5": 0.99, "pearsonr": None}
    assert result_lines(result(metrics=added), "runs/name", 80)[1:4] == [
        "f1            0.8700",
        "top_k_accuracy_5 0.9900",
        "pearsonr      not defined",
    ]


def test_without_validation_there_is_no_accuracy_and_without_servers_no_staleness() -> None:
    lines = result_lines(result(accuracy=None, workers=[{"staleness": {}, "rounds_ahead": {}}]), "runs/name", 80)
    assert [line.split()[0] for line in lines] == ["samples/s", "written"]


def test_without_a_bound_staleness_has_one_histogram() -> None:
    lines = result_lines(result(staleness_bound=None), "runs/name", 80)
    assert [line for line in lines if line.startswith("staleness")] == [
        "staleness     steps by updates of others between a read and its push"
    ]


def test_warnings_are_repeated_at_the_end() -> None:
    lines = result_lines(result(warnings=["the loss grows; try a smaller --lr"]), "runs/name", 80)
    assert lines[-2:] == [
        "warning       the loss grows; try a smaller --lr",
        "written to    runs/name/  (also runs/latest)",
    ]


def test_a_warning_cannot_control_the_terminal() -> None:
    lines = result_lines(result(warnings=["a\x1b[2Jb\x07"]), "runs/name", 80)
    assert lines[-2] == "warning       a [2Jb"


def test_lock_step_has_no_histogram() -> None:
    workers = [{"staleness": {"0": 40}, "rounds_ahead": {"0": 40}}]
    lines = result_lines(result(workers=workers, staleness_bound=None), "runs/name", 80)
    assert lines[2] == "staleness     none: no worker missed an update"
    assert len(lines) == 4


def test_many_values_share_bars() -> None:
    lines = histogram_lines(dict.fromkeys(range(100), 1))
    assert len(lines) <= MAX_BARS
    assert lines[0].split()[0] == "0-8"
    assert sum(int(line.split()[2]) for line in lines) == 100
    assert histogram_lines({}) == []
