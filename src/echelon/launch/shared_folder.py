"""A folder that all processes of a job must share with their launcher, because it reads what they write there.

The launcher creates a file with a new name in it, and every agent looks for that file: a folder that only has the same
path, or is a copy, does not have it.
"""

from __future__ import annotations

import secrets
from pathlib import Path

from echelon.errors import UsageError


class SharedFolder:
    """A folder of the launcher, or none, with a file that marks it until all processes have started."""

    def __init__(self, path: str | None) -> None:
        self._mark = Path(path) / f".launcher-{secrets.token_hex(8)}" if path is not None else None

    def mark(self) -> str | None:
        """Create the file, and return its path for `check_mark`; None if nothing has to be shared."""
        if self._mark is None:
            return None
        self._mark.touch()
        return str(self._mark)

    def unmark(self) -> None:
        """Remove the file. A second call does nothing."""
        if self._mark is not None:
            self._mark.unlink(missing_ok=True)


def check_mark(mark: str | None) -> None:
    """Raise UsageError if the launcher has marked a folder that this machine does not share with it."""
    if mark is not None and not Path(mark).exists():
        raise UsageError(
            f"the run folder {Path(mark).parent} is not on a disk that this host shares with the launcher, which reads "
            "there what the workers measure and save: start it in a folder of a shared disk, or run a script with "
            "'echelon launch', which needs no shared disk"
        )
