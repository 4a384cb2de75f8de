"""Files that appear whole or not at all: written under a temporary name beside the final one, then renamed.

Owns the temporary name and the order of flush, sync and rename. Knows nothing of what is in the file.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import BinaryIO

from echelon.errors import UsageError

PARTIAL_SUFFIX = ".partial"


def temporary_name(path: Path) -> Path:
    """Return a fresh hidden name in the folder of `path`, so that a rename never crosses file systems."""
    return path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}{PARTIAL_SUFFIX}")


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
        self._temporary = temporary_name(self.path)
        try:
            self.stream: BinaryIO = open(self._temporary, "xb")  # noqa: SIM115  (closed by commit or discard)
        except PermissionError as error:
            raise UsageError(f"cannot write {self.path}: no permission in folder {self.path.parent}") from error

    def commit(self) -> None:
        """Give the file its final name, replacing an older one; a second call does nothing."""
        if self.stream.closed:
            return
        try:
            self.stream.flush()
            os.fsync(self.stream.fileno())
            self.stream.close()
            os.replace(self._temporary, self.path)
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        """Remove what was written; after a commit this does nothing."""
        try:
            self.stream.close()
        finally:  # close flushes, and a full disk fails there too
            self._temporary.unlink(missing_ok=True)

    def __enter__(self) -> AtomicFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.commit()
        else:
            self.discard()
