"""Which workers have created a store, as the launcher reads it from their file."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.launch.joining import JoinedFile, Joining


@pytest.fixture
def joining() -> Joining:
    return Joining(num_workers=3)


def join(joining: Joining, rank: int, store: str = "dist_sync") -> None:
    joining.add_lines([f"{rank} {store}"])


def test_a_worker_that_ends_without_joining_is_missed_once_another_joins(joining: Joining) -> None:
    joining.worker_ended(1)
    assert joining.missing() is None, "perhaps no worker has a store"
    join(joining, 2)
    join(joining, 0)
    rank, why = joining.missing() or (None, "")
    assert rank == 1
    assert why.endswith("for which worker 0, worker 2 waited")


def test_workers_that_joined_may_end(joining: Joining) -> None:
    for rank in range(3):
        join(joining, rank)
        joining.worker_ended(rank)
    assert joining.missing() is None
    assert joining.warning() is None


def test_stores_of_one_worker_wait_for_nobody(joining: Joining) -> None:
    join(joining, 0, "local")
    joining.worker_ended(1)
    assert joining.missing() is None
    assert joining.warning() is None, "the store itself warns"


def test_a_job_without_stores_gets_a_warning(joining: Joining) -> None:
    assert "the 3 workers ran independently" in str(joining.warning())
    assert Joining(num_workers=1).warning() is None


def test_each_line_of_the_file_is_read_once(tmp_path: Path) -> None:
    file = JoinedFile(tmp_path / "joined")
    assert file.new_lines() == []
    file.path.write_text("0 dist_sync\n")
    assert file.new_lines() == ["0 dist_sync"]
    file.path.write_text("0 dist_sync\n1 dist_sync\n")
    assert file.new_lines() == ["1 dist_sync"]
