"""MXNet's parse_log and Echelon's print the same bytes for the log of a real training under MXNet 1.9.1.

Needs MXNet's Python: .peers/mxnet, or the one that ECHELON_MXNET_PYTHON names.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from echelon.cli.report.parse_log import main_like_mxnet
from echelon.report.logs.epochs import read_logs
from echelon.train import log_lines
from mxnet_peer import run_mxnet

pytestmark = pytest.mark.peer

ARGUMENTS: tuple[list[str], ...] = (
    [],
    ["--format", "none"],
    ["--metric-names", "accuracy", "top_k_accuracy_2"],
    ["--metric-names", "top_k", "--format", "none"],
)


def compare(folder: Path, capsys: pytest.CaptureFixture[str], num_epochs: int | None = None) -> None:
    log, table = folder / "log", folder / "table"
    request = {"log": str(log), "table": str(table), "arguments": ARGUMENTS}
    run_mxnet("log_mxnet_side.py", request | ({} if num_epochs is None else {"num_epochs": num_epochs}))
    for arguments in ARGUMENTS:
        assert main_like_mxnet([str(log), *arguments]) == 0
    assert capsys.readouterr().out == table.read_text()


def test_the_log_of_a_training_under_mxnet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compare(tmp_path, capsys, num_epochs=3)
    training = read_logs([str(tmp_path / "log")])
    assert sorted(training.epochs) == [0, 1, 2]
    assert training.metrics == ["accuracy", "top_k_accuracy_2"]
    for epoch in training.epochs.values():
        assert [(line.first, line.last) for line in epoch.speeds[""]] == [(0, 4), (4, 8)]
        assert (epoch.speed() or 0) > 0


def test_means_over_workers_have_the_same_digits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Means of values with six decimals are often in the middle of two results, where any rounding error shows."""
    chance = random.Random(7)
    lines = []
    for epoch in range(40):
        for _ in range(chance.randint(1, 5)):
            for name in ("accuracy", "top_k_accuracy_2"):
                lines.append(log_lines.train_line(epoch, name, chance.random()))
                lines.append(log_lines.validation_line(epoch, name, chance.random()))
            lines.append(log_lines.time_line(epoch, 100 * chance.random()))
    (tmp_path / "log").write_text("".join(f"INFO:root:{line}\n" for line in lines))
    compare(tmp_path, capsys)
