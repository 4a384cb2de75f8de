"""Runs MXNet's side of a comparison: a script under MXNet's Python (.peers/mxnet, or ECHELON_MXNET_PYTHON)."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

PYTHON = Path(os.environ.get("ECHELON_MXNET_PYTHON") or Path(__file__).parents[1] / ".peers/mxnet/bin/python")
SCRIPTS = Path(__file__).parent / "conformance"


def run_mxnet(script: str, request: object = None, *arguments: str | Path, timeout_s: float = 100) -> Any:
    """Run a script of `conformance/` with a request as JSON; return the JSON of the last line it prints, if any.

    Without MXNet's Python the test is skipped.
    """
    if not PYTHON.exists():
        pytest.skip(f"no MXNet interpreter {PYTHON}")
    command = [PYTHON, "-W", "ignore", SCRIPTS / script, *arguments]
    done = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    return json.loads(lines[-1]) if lines else None
