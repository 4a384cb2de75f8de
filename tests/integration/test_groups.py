"""Groups of workers given as lists, as text or as a file, and closing a store twice, in jobs of threads."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.errors import UsageError
from echelon.kvstore import KVStore
from echelon.launch.threads.in_process import run


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ([[0], [0, 1]], "worker 0 is already in line 1"),
        ([[0]], "no group contains worker 1"),
        ([[0], [1, 2]], "worker 2 does not exist"),
    ],
)
def test_groups_that_do_not_match_the_workers(groups: list[list[int]], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        run(lambda kv: None, "dist_gsync", num_workers=2, groups=groups)


def test_a_missing_groups_file_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "nowhere"
    with pytest.raises(UsageError, match=f"no groups file {missing}"):
        run(lambda kv: None, "dist_gsync", num_workers=1, groups=missing)


def test_groups_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "groups"
    file.write_text("1\n0 2\n")

    def program(kv: KVStore) -> int:
        kv.barrier()
        return kv.rank

    assert run(program, "dist_gsync", num_workers=3, groups=file) == [0, 1, 2]


def test_groups_may_be_written_with_commas() -> None:
    commas = "0,2/1"
    assert run(lambda kv: kv.rank, "dist_gsync", num_workers=3, groups=commas) == [0, 1, 2]


def test_a_second_close_does_nothing() -> None:
    def program(kv: KVStore) -> None:
        kv.close()
        kv.close()

    run(program, "dist_sync", num_workers=2)
