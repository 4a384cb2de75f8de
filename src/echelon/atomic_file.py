"""Files and folders that appear whole or not at all: made under a temporary name beside the final one, then renamed.

Owns the temporary name, the order of flush, sync and rename, and that nothing temporary stays: what a process did not
finish goes with it, and what a killed one left goes when the same name is written again. Knows nothing of contents.

A temporary name has its process's number, and the file is locked while it is written: numbers repeat in containers, and
mean nothing in another one that shares the folder.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from echelon.errors import UsageError

PARTIAL_SUFFIX = ".partial"
_OWNER = r"([1-9]\d{0,8})-[0-9a-f]{8}"


def temporary_name(path: Path) -> Path:
    """Return a fresh hidden name in the folder of `path`, so that a rename never crosses file systems."""
    return path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}{PARTIAL_SUFFIX}")


def remove_abandoned(path: Path) -> None:
    """Remove what processes left that were killed while they made `path`; what is being made stays."""
    pattern = re.compile(re.escape(f".{path.name}.") + _OWNER + re.escape(PARTIAL_SUFFIX))
    with suppress(OSError):  # a folder that one may not read is no reason not to write
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
    except OSError:  # somebody else's
        return True
    return True


def _lock(number: int) -> bool:
    """Lock a file until it is closed; False where somebody has, or where file systems know no locks."""
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _remove(partial: Path, owner: int) -> None:
    if os.getpid() != owner:  # a fork inherits finalizers, but not the file
        return
    if partial.is_dir() and not partial.is_symlink():
        shutil.rmtree(partial, ignore_errors=True)
    else:
        partial.unlink(missing_ok=True)


@contextmanager
def partial_folder(path: Path) -> Iterator[Path]:
    """Make a hidden folder beside `path` to work in; unless it was renamed, it goes at the end, whatever happens."""
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
    """Raise UsageError where a file of this name cannot be made, before any work is spent on its contents."""
    if path.is_dir():
        raise UsageError(f"cannot write {path}: it is a folder; give a file name")
    if not path.parent.is_dir():
        raise UsageError(
            f"cannot write {path}: there is no folder {path.parent}; make it first: mkdir -p {path.parent}"
        )


class AtomicFile:
    """A binary file being written; `commit` gives it its name, `discard` leaves no trace.

    As a context manager it commits on a normal exit and discards on any exception, Ctrl-C too.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        check_writable(self.path)
        remove_abandoned(self.path)
        self._temporary = temporary_name(self.path)
        # A signal's exception can come between any two lines, here and in who uses this; then this is what is left.
        self._remove = weakref.finalize(self, _remove, self._temporary, os.getpid())
        try:
            self.stream: BinaryIO = open(self._temporary, "xb")  # noqa: SIM115  (closed by commit or discard)
            _lock(self.stream.fileno())
        except PermissionError as error:
            raise UsageError(f"cannot write {self.path}: no permission in folder {self.path.parent}") from error

    def sync(self) -> None:
        """Have all that was written on the disk, which may be full."""
        self.stream.flush()
        os.fsync(self.stream.fileno())

    def commit(self) -> None:
        """Give the file its final name, replacing an older one; a second call does nothing."""
        if self.stream.closed:
            return
        try:
            self.sync()
            self.stream.close()
            os.replace(self._temporary, self.path)
            self._remove.detach()
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        """Remove what was written; after a commit this does nothing."""
        try:
            self.stream.close()
        finally:  # close flushes, and a full disk fails there too
            self._remove()

    def __enter__(self) -> AtomicFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.commit()
        else:
            self.discard()
