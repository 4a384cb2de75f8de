"""CUDA's Multi-Process Service: kernels of several processes run on one GPU at the same time, not in time slices.

`started` starts the service for this program and its children, tries it in a child, and ends it. A machine without the
service, or one where it does not work, is no error: the processes then share the GPU in time slices.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CONTROL = "nvidia-cuda-mps-control"
PLACES = ("/usr/local/nvidia/bin", "/usr/bin")
MPS, TIME_SLICES = "MPS", "time slices"
_TRY = "import torch; print(float(torch.ones(8, device='cuda:0').sum()))"
LIMIT_S = 60.0


@contextmanager
def started(folder: Path) -> Iterator[str]:
    """Run the service with its files in `folder`. Yield how processes share the GPU, with the reason if not by MPS."""
    control = find_control()
    if control is None:
        yield f"{TIME_SLICES}: {CONTROL} is not on this machine"
        return
    with _folders_of_service(folder):
        try:
            problem = _start(control)
            if not problem:
                yield MPS
        finally:
            _stop(control)
    if problem:
        yield f"{TIME_SLICES}: {problem}"


def find_control() -> str | None:
    """Return the path of the service's control program."""
    return shutil.which(CONTROL) or shutil.which(CONTROL, path=os.pathsep.join(PLACES))


def _start(control: str) -> str:
    """Start the service and use the GPU in a child. Return what went wrong; empty if nothing."""
    for what, command in ((f"{CONTROL} -d", [control, "-d"]), ("a child", [sys.executable, "-c", _TRY])):
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"{what}: {error}"
        if done.returncode:
            lines = (done.stderr or done.stdout).strip().splitlines()
            return f"{what}: exit status {done.returncode}{'; ' + lines[-1] if lines else ''}"
    return ""


def _stop(control: str) -> None:
    try:
        subprocess.run([control], input="quit\n", capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        print(f"{CONTROL} did not end: {error}", file=sys.stderr)


@contextmanager
def _folders_of_service(folder: Path) -> Iterator[None]:
    """Set the variables by which the service and its clients find each other."""
    before = dict(os.environ)
    for name in ("pipe", "log"):
        (folder / name).mkdir(parents=True, exist_ok=True)
        os.environ[f"CUDA_MPS_{name.upper()}_DIRECTORY"] = str(folder / name)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
