"""The Python that runs MXNet 1.9.1: a virtual environment under `.peers/`, created on first use.

MXNet needs an environment of its own because it needs an old NumPy.
"""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from echelon.environment import variable
from echelon.errors import JobError, UsageError

MXNET_REQUIREMENTS = ("mxnet==1.9.1", "numpy<1.24")
MXNET_PYTHON_VARIABLE = "ECHELON_MXNET_PYTHON"
NEWEST_PYTHON = (3, 11)  # the newest for which NumPy below 1.24 has wheels
INSTALL_TIMEOUT_S = 900.0
MXNET_STORES = ("dist_sync", "dist_async")
MXNET_DEFAULTS = {"PS_HEARTBEAT_TIMEOUT": "0"}  # MXNet's default; the environment of an Echelon job sets the variable


def mxnet_command(script: Path) -> list[str]:
    """Return the command that runs a `worker_mxnet.py` under MXNet's Python.

    With -I the script's own folder is not on the module path, where its modules could shadow the standard library.
    """
    return [str(mxnet_python()), "-I", str(script)]


def mxnet_python() -> Path:
    """Return a Python that can import MXNet 1.9.1; create its environment under `.peers/` if there is none yet."""
    given = variable(MXNET_PYTHON_VARIABLE)
    if given:
        if not Path(given).is_file():
            raise UsageError(
                f"{MXNET_PYTHON_VARIABLE} is {given!r}, which is not a file; set it to a Python that has MXNet"
            )
        return Path(given)
    folder = repository() / ".peers" / "mxnet"
    with _locked(folder.with_name("mxnet.lock")):
        stamp = folder / ".complete"  # written last, because an environment cannot be moved
        if not stamp.is_file() or stamp.read_text(encoding="utf-8").split() != list(MXNET_REQUIREMENTS):
            _make_environment(folder)
            stamp.write_text("\n".join(MXNET_REQUIREMENTS) + "\n", encoding="utf-8")
    return folder / "bin" / "python"


def repository() -> Path:
    """Return the root of the checkout that contains the current folder; outside a checkout, the current folder."""
    here = Path.cwd()
    return next((folder for folder in (here, *here.parents) if (folder / ".git").exists()), here)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _make_environment(folder: Path) -> None:
    if sys.version_info[:2] > NEWEST_PYTHON:
        newest = ".".join(map(str, NEWEST_PYTHON))
        raise UsageError(
            f"MXNet 1.9.1 needs Python {newest} or older and this is {sys.version.split()[0]}; "
            f"set {MXNET_PYTHON_VARIABLE} to a Python that has {' and '.join(MXNET_REQUIREMENTS)}"
        )
    shutil.rmtree(folder, ignore_errors=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    with Console(stderr=True).status(f"creating {folder.parent.name}/{folder.name} (about 300 MB, only once)"):
        _install_step([sys.executable, "-m", "venv", str(folder)])
        _install_step([*pip, *MXNET_REQUIREMENTS])


def _install_step(argv: Sequence[str]) -> None:
    """Run one command of the installation. The error of a failed one contains its last lines."""
    try:
        done = subprocess.run(
            argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=INSTALL_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise JobError(f"{' '.join(argv)} did not finish within {INSTALL_TIMEOUT_S:g} s") from error
    if done.returncode:
        last = "\n".join(done.stdout.splitlines()[-12:])
        raise JobError(f"{' '.join(argv)} ended with status {done.returncode}:\n{last}")
