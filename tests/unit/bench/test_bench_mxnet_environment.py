"""Which Python runs MXNet, without installing it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from echelon.bench.harness.mxnet_environment import MXNET_PYTHON_VARIABLE, MXNET_REQUIREMENTS, mxnet_python, repository
from echelon.errors import UsageError


def test_the_variable_has_priority_over_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(MXNET_PYTHON_VARIABLE, sys.executable)
    monkeypatch.chdir(tmp_path)
    assert mxnet_python() == Path(sys.executable)
    assert list(tmp_path.iterdir()) == []


def test_a_variable_that_is_not_a_file_is_rejected(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(MXNET_PYTHON_VARIABLE, str(tmp_path / "python"))
    with pytest.raises(UsageError, match=MXNET_PYTHON_VARIABLE):
        mxnet_python()


def test_a_complete_environment_is_reused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(MXNET_PYTHON_VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / ".peers" / "mxnet"
    folder.mkdir(parents=True)
    (folder / ".complete").write_text("\n".join(MXNET_REQUIREMENTS))
    assert mxnet_python() == folder / "bin" / "python"


def test_the_repository_is_found_from_a_subfolder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)
    monkeypatch.chdir(below)
    assert repository() == tmp_path
