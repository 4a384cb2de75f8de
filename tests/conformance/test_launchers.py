"""The conformance suite of launchers, on those that need neither root nor other programs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from echelon.testing.launcher import CHECKS, Check, LauncherTrial

INTEGRATION = str(Path(__file__).parents[1] / "integration")


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("launcher", ["local", "agents:PipeLauncher"])
def test_launcher(launcher: str, check: Check) -> None:
    path = os.pathsep.join([INTEGRATION, *filter(None, [os.environ.get("PYTHONPATH")])])
    check(LauncherTrial(["--launcher", launcher], environment={"PYTHONPATH": path}))
