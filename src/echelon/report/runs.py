"""Run directories: `runs/<name>/`, and the link `runs/latest`."""

from __future__ import annotations

import os
import re
import shutil
import time
from pathlib import Path

from echelon.errors import UsageError

ROOT = Path("runs")


def new_run(name: str | None, store: str, root: Path = ROOT) -> Path:
    """Make a fresh run directory and point `latest` at it."""
    if name is None:
        name = f"{time.strftime('%Y%m%d-%H%M%S')}-{store}"
        count = 1
        while (root / name).exists():
            count += 1
            name = f"{name.removesuffix(f'.{count - 1}')}.{count}"
    if not re.fullmatch(r"\w[\w.@+-]*", name) or name == "latest":
        raise UsageError(f"{name!r} cannot name a run; use letters, digits and . _ - + @")
    directory = root / name
    try:
        directory.mkdir(parents=True)
    except FileExistsError:
        raise UsageError(f"there is a run {directory} already; choose another --name") from None
    _point_latest(root, name)
    return directory


def latest_run(root: Path = ROOT) -> str | None:
    """The name of the run that `latest` points at."""
    return os.readlink(root / "latest") if (root / "latest").is_symlink() else None


def discard_run(directory: Path, before: str | None) -> None:
    """Remove a run in which nothing was done; `latest` is `before` again, and what is empty then goes, too."""
    root = directory.parent
    shutil.rmtree(directory)
    if latest_run(root) != directory.name:
        return  # another one has begun since
    if before is not None:
        _point_latest(root, before)
        return
    (root / "latest").unlink()
    if not any(root.iterdir()):
        root.rmdir()


def _point_latest(root: Path, name: str) -> None:
    temporary = root / f".latest.{os.getpid()}"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(name)
    os.replace(temporary, root / "latest")
