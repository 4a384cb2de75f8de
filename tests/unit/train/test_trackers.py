"""Curves for experiment trackers: what happens without their packages and with folders that cannot be used."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from echelon.errors import UsageError
from echelon.train.loop.reports.trackers import OfflineRun, Trackers
from echelon.train.recipe.options import TrainOptions


def test_no_tracker_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trackers = Trackers(TrainOptions())
    trackers.write("train/accuracy", 0.5, 1)
    trackers.close()
    assert list(tmp_path.iterdir()) == []


def test_every_tracker_of_the_options_gets_the_points(tmp_path: Path) -> None:
    trackers = Trackers(replace(TrainOptions(), tensorboard=str(tmp_path / "board")))
    trackers.write("train/accuracy", 0.5, 1)
    trackers.close()
    assert len(list((tmp_path / "board").iterdir())) == 1


def test_a_missing_client_is_reported_with_the_pip_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    with pytest.raises(UsageError, match=re.escape("pip install 'echelon[wandb]'")):
        OfflineRun(str(tmp_path), {})
