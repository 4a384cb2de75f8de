"""TensorBoard curves: written to the event file; without a directory nothing is imported."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from echelon.errors import UsageError
from echelon.train.loop.reports.trackers import ScalarWriter


def scalars(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """Return every curve, as TensorBoard reads it."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory))
    events.Reload()
    return {name: [(e.step, e.value) for e in events.Scalars(name)] for name in events.Tags()["scalars"]}


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    directory = tmp_path / "runs" / "one"  # does not exist yet
    board = ScalarWriter(str(directory))
    for step in range(3):
        board.write("train/accuracy", 0.25 * step, step)
    board.write("lr", 0.5, 7)
    board.close()
    assert scalars(directory) == {"train/accuracy": [(0, 0.0), (1, 0.25), (2, 0.5)], "lr": [(7, 0.5)]}


def test_closing_twice_and_writing_afterwards_are_ignored(tmp_path: Path) -> None:
    board = ScalarWriter(str(tmp_path))
    board.write("lr", 0.5, 0)
    board.close()
    board.close()
    board.write("lr", 0.25, 1)
    assert scalars(tmp_path) == {"lr": [(0, 0.5)]}


CODE = """
import sys
from echelon.train.loop.reports.trackers import ScalarWriter
board = ScalarWriter(None)
board.write("lr", 0.1, 0)
board.close()
assert not any(name.startswith(("tensorboard", "torch", "wandb")) for name in sys.modules), sorted(sys.modules)
"""


def test_without_a_directory_nothing_is_imported_or_written(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", CODE], cwd=tmp_path, check=True)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_package_is_reported_with_the_pip_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)  # as if it were not installed
    with pytest.raises(UsageError, match=re.escape("pip install 'echelon[tensorboard]'")):
        ScalarWriter(str(tmp_path))


def test_an_unusable_directory_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        UsageError, match=re.escape(f"--tensorboard {tmp_path / 'file'}: File exists; give a writable directory")
    ):
        ScalarWriter(str(tmp_path / "file"))
