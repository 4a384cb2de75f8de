"""Folders that cannot be written, and results that cannot be: one line, without a traceback."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from echelon.cli.main import main
from echelon.cli.train import _write_result
from echelon.errors import UsageError
from echelon.report.runs import new_run


def test_a_run_below_a_file_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(UsageError, match=r"runs/a, cannot be created: Not a directory; run the command in a folder"):
        new_run("a", "local", root=tmp_path / "runs")


def test_a_folder_in_the_place_of_the_link_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "latest").mkdir()
    with pytest.raises(UsageError, match="cannot be created: Is a directory"):
        new_run("a", "local", root=tmp_path)


def test_an_unwritable_run_folder_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").write_text("a file")
    assert main(["train"]) == 2
    assert capsys.readouterr().err.startswith("echelon: the folder of the run, ")


def test_a_result_that_a_full_disk_cannot_hold_is_named(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))  # every write fails, as on a full disk
    try:
        error = _write_result(tmp_path, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert error == f"the summary and the curves of the run cannot be written to {tmp_path}: File too large"
