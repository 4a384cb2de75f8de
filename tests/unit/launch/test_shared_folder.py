"""A folder that hosts must share with the launcher: a copy of it, or one of the same name, is recognized."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from echelon.errors import UsageError
from echelon.launch.shared_folder import SharedFolder, check_mark


def test_the_launchers_own_folder_is_recognized(tmp_path: Path) -> None:
    folder = SharedFolder(str(tmp_path))
    mark = folder.mark()
    check_mark(mark)
    folder.unmark()
    folder.unmark()
    assert list(tmp_path.iterdir()) == []


def test_a_copy_made_before_is_another_folder(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    SharedFolder(str(here)).mark()  # of an earlier job, which was killed
    shutil.copytree(here, there)
    mark = SharedFolder(str(here)).mark()
    assert mark is not None
    with pytest.raises(UsageError, match="is not on a disk that this host shares with the launcher"):
        check_mark(mark.replace(str(here), str(there)))


def test_nothing_has_to_be_shared_by_default() -> None:
    assert SharedFolder(None).mark() is None
    check_mark(None)
