"""Writes past the page cache: the file has the same bytes, whatever its length and whatever the file system allows."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from echelon.train.checkpoint.direct import aligned_memory, write_direct

BLOCK = 4096
CHUNK = 4 << 20


def written(path: Path, size: int) -> bytes:
    data = aligned_memory(size)
    data[:] = os.urandom(size)
    with open(path, "xb") as stream:
        write_direct(stream.fileno(), data, lambda: None)
    assert path.read_bytes() == data
    return bytes(data)


@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, CHUNK - 8, CHUNK, CHUNK + BLOCK, 2 * CHUNK + 100])
def test_files_of_any_length_have_the_bytes_of_the_memory(tmp_path: Path, size: int) -> None:
    written(tmp_path / "x", size)


@pytest.mark.parametrize("size", [BLOCK - 1, 2 * CHUNK + 100])
def test_without_direct_writes_the_page_cache_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    real = fcntl.fcntl

    def without_direct(number: int, command: int, flags: int = 0) -> int:
        if command == fcntl.F_SETFL and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(number, command, flags)

    monkeypatch.setattr(fcntl, "fcntl", without_direct)
    written(tmp_path / "x", size)


def test_a_disk_that_refuses_a_direct_write_gets_the_rest_through_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, refused = os.write, []

    def write(number: int, data: memoryview) -> int:
        if fcntl.fcntl(number, fcntl.F_GETFL) & os.O_DIRECT and os.fstat(number).st_size:
            refused.append(len(data))
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(number, data[: 3 * BLOCK])  # a short write, as a signal causes it

    monkeypatch.setattr(os, "write", write)
    written(tmp_path / "x", CHUNK + 100)
    assert len(refused) <= 1, "the second write was tried as a direct one again"


def test_other_errors_are_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(number: int, data: memoryview) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        written(tmp_path / "x", 2 * BLOCK)
