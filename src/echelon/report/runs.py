"""Run directories: `runs/<name>/`, and the link `runs/latest`."""

from __future__ import annotations

import os
import re
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
    temporary = root / f".latest.{os.getpid()}"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(name)
    os.replace(temporary, root / "latest")
    return directory
