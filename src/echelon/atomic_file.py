"""Files and folders that appear completely or not at all: written under a temporary name and then renamed.

This module owns the temporary name, the order of flush, sync and rename, and the cleanup: a process removes what it did
not finish, and what a killed process left is removed when the same name is written again.

A temporary name contains the number of its process, and the file is locked while it is written. The lock is needed
because process numbers repeat in containers, and mean nothing in another container that shares the folder.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import shutil
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from echelon.errors import UsageError
from echelon.fault_points import fault_point

PARTIAL_SUFFIX = ".partial"
_OWNER = r"([1-9]\d{0,8})-[0-9a-f]{8}"


def temporary_name(path: Path) -> Path:
    """Return a new hidden name in the folder of `path`, so that the rename stays within one file system."""
    return path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}{PARTIAL_SUFFIX}")


def remove_abandoned(path: Path) -> None:
    """Remove what killed processes left of `path`. Files that are still being written stay."""
    pattern = re.compile(re.escape(f".{path.name}.") + _OWNER + re.escape(PARTIAL_SUFFIX))
    with suppress(OSError):  # the folder may be writable but not readable
        for found in list(path.parent.iterdir()):
            match = pattern.fullmatch(found.name)
            if match and _is_abandoned(found, int(match[1])):
                _remove(found, os.getpid())


def _is_abandoned(partial: Path, owner: int) -> bool:
    if owner != os.getpid() and _is_running(owner):
        return False
    try:
        number = os.open(partial, os.O_RDONLY if partial.is_dir() else os.O_RDWR)
    except OSError:
        return False
    try:
        return _lock(number)
    finally:
        os.close(number)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # the process belongs to another user
    return True


def _lock(number: int) -> bool:
    """Lock a file until it is closed. Return False if it is locked, or if the file system has no locks."""
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _remove(partial: Path, owner: int) -> None:
    if os.getpid() != owner:  # a forked child inherits the finalizer, but does not own the file
        return
    if partial.is_dir() and not partial.is_symlink():
        shutil.rmtree(partial, ignore_errors=True)
    else:
        partial.unlink(missing_ok=True)


@contextmanager
def partial_folder(path: Path) -> Iterator[Path]:
    """Create a hidden working folder beside `path`. It is removed at the end of the block, unless it was renamed."""
    remove_abandoned(path)
    folder = temporary_name(path)
    try:
        folder.mkdir()
        number = os.open(folder, os.O_RDONLY)
        try:
            _lock(number)
            yield folder
        finally:
            os.close(number)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def check_writable(path: Path) -> None:
    """Raise UsageError if a file of this name cannot be created, before work is spent on its contents."""
    if path.is_dir():
        raise UsageError(f"cannot write {path}: it is a folder; give a file name")
    if not path.parent.is_dir():
        raise UsageError(
            f"cannot write {path}: the folder {path.parent} does not exist; create it: mkdir -p {path.parent}"
        )


class AtomicFile:
    """A binary file that is being written to `stream`. `commit` gives it its final name, `discard` removes it.

    As a context manager it commits on a normal exit and discards on any exception, including Ctrl-C.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        check_writable(self.path)
        remove_abandoned(self.path)
        self._temporary = temporary_name(self.path)
        # A signal handler may raise between any two lines, here and in the caller; then only this finalizer cleans up.
        self._remove = weakref.finalize(self, _remove, self._temporary, os.getpid())
        try:
            fault_point("file.write", path=self.path)
            self.stream: BinaryIO = open(self._temporary, "xb")  # noqa: SIM115  (closed by commit or discard)
            _lock(self.stream.fileno())
        except PermissionError as error:
            raise UsageError(f"cannot write {self.path}: no permission in folder {self.path.parent}") from error

    def sync(self) -> None:
        """Write everything to the disk, so that an error such as a full disk appears now."""
        fault_point("file.sync", path=self.path)
        self.stream.flush()
        os.fsync(self.stream.fileno())

    def commit(self) -> None:
        """Rename the file to its final name, replacing an older file. A second call does nothing."""
        if self.stream.closed:
            return
        try:
            self.sync()
            self.stream.close()
            os.replace(self._temporary, self.path)
            self._remove.detach()
            fault_point("file.renamed", path=self.path)
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        """Remove the file. After a commit this does nothing."""
        try:
            self.stream.close()
        finally:  # close() flushes, which fails on a full disk
            self._remove()

    def __enter__(self) -> AtomicFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.commit()
        else:
            self.discard()


def write_json(path: Path, body: Any) -> None:
    """Write a value as indented JSON. NaN and infinity, which JSON does not have, raise ValueError."""
    with AtomicFile(path) as file:
        file.stream.write((json.dumps(body, indent=2, allow_nan=False) + "\n").encode())
