"""Run directories `runs/<name>/`, and the link `runs/latest` to the newest one."""

from __future__ import annotations

import os
import re
import shutil
import time
from pathlib import Path

from echelon.errors import UsageError

ROOT = Path("runs")


def new_run(name: str | None, store: str, root: Path = ROOT) -> Path:
    """Create a run directory, and set the link `latest` to it."""
    if name is None:
        name = f"{time.strftime('%Y%m%d-%H%M%S')}-{store}"
        count = 1
        while (root / name).exists():
            count += 1
            name = f"{name.removesuffix(f'.{count - 1}')}.{count}"
    if not re.fullmatch(r"\w[\w.@+-]*", name) or name == "latest":
        raise UsageError(f"{name!r} is not a valid name of a run; use letters, digits and . _ - + @")
    directory = root / name
    try:
        directory.mkdir(parents=True)
        _link_latest(root, name)
    except FileExistsError:
        raise UsageError(f"the run {directory} already exists; choose another --name") from None
    except OSError as error:
        raise UsageError(
            f"the folder of the run, {directory.absolute()}, cannot be created: {error.strerror}; "
            "run the command in a folder where you may write"
        ) from error
    return directory


def latest_run(root: Path = ROOT) -> str | None:
    """Return the name of the run that `latest` links to, or None."""
    return os.readlink(root / "latest") if (root / "latest").is_symlink() else None


def discard_run(directory: Path, before: str | None) -> None:
    """Delete a run that did not train, restore the link `latest` to `before`, and delete `runs` if it is empty."""
    root = directory.parent
    shutil.rmtree(directory)
    if latest_run(root) != directory.name:
        return  # another run has started since
    if before is not None:
        _link_latest(root, before)
        return
    (root / "latest").unlink()
    if not any(root.iterdir()):
        root.rmdir()


def _link_latest(root: Path, name: str) -> None:
    temporary = root / f".latest.{os.getpid()}"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(name)
    os.replace(temporary, root / "latest")
