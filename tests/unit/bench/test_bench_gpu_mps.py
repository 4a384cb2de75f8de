"""CUDA's MPS for a benchmark: programs in its place show when it is used, and that it is ended."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import mps

CONTROL = """#!{python}
import os, sys
with open({log!r}, "a") as log:
    print("-d" if sys.argv[1:] == ["-d"] else sys.stdin.read().strip(), os.environ["CUDA_MPS_PIPE_DIRECTORY"], file=log)
sys.exit({status})
"""


@pytest.fixture
def control(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a program in the place of the service, which logs what it is asked; return that log."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(mps, "PLACES", ())
    return tmp_path / "asked"


def install(log: Path, status: int = 0) -> None:
    program = log.parent / mps.CONTROL
    program.write_text(CONTROL.format(python=sys.executable, log=str(log), status=status))
    program.chmod(0o755)


def test_a_machine_without_mps_shares_in_time_slices(control: Path, tmp_path: Path) -> None:
    with mps.started(tmp_path / "mps") as sharing:
        assert sharing == "time slices: nvidia-cuda-mps-control is not on this machine"


def test_mps_is_tried_used_and_ended(control: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mps, "_TRY", "import os; assert os.environ['CUDA_MPS_PIPE_DIRECTORY']")
    install(control)
    pipe = str(tmp_path / "mps" / "pipe")
    with mps.started(tmp_path / "mps") as sharing:
        assert sharing == "MPS"
        assert os.environ["CUDA_MPS_PIPE_DIRECTORY"] == pipe
    assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ
    assert control.read_text().splitlines() == [f"-d {pipe}", f"quit {pipe}"]


@pytest.mark.parametrize(
    ("status", "child", "reason"),
    [
        (1, "pass", "nvidia-cuda-mps-control -d: exit status 1"),
        (0, "import sys; sys.exit('no context')", "a child: exit status 1; no context"),
    ],
)
def test_mps_that_does_not_work_is_not_used(
    control: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, child: str, reason: str
) -> None:
    monkeypatch.setattr(mps, "_TRY", child)
    install(control, status)
    with mps.started(tmp_path / "mps") as sharing:
        assert sharing == f"time slices: {reason}"
        assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ
    assert control.read_text().splitlines()[-1].startswith("quit ")
