"""Runs the programs of this folder: alone, with the library's own DDP over Gloo, or as a job of Echelon."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from jobs import Job

FOLDER = Path(__file__).parent
LIMIT_S = 300  # importing the libraries takes seconds, and minutes on a busy machine
QUIET = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
Results = dict[str, dict[str, Any]]
Popen = subprocess.Popen[str]


class Program:
    """A program, and the cases that it trains. `alone` and `ddp` are the library's own names in place of a store's."""

    def __init__(self, name: str, cases: Sequence[str], *, alone: str = "none", ddp: str | None = None) -> None:
        self.name = name
        self.cases = cases
        self._path = FOLDER / f"{name}_program.py"
        self._alone, self._ddp = alone, ddp

    def alone(self, folder: Path, store: str | None = None) -> Results:
        """Run one process."""
        _expect_success([self._start(store or self._alone, folder)])
        return self._results(folder, 0)

    def ddp(self, folder: Path) -> list[Results]:
        """Run the library's own DDP: two processes with torchrun's variables, unless it starts its processes itself."""
        if self._ddp is not None:
            _expect_success([self._start(self._ddp, folder)])
        else:
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = free.getsockname()[1]
            common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
            ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
            _expect_success([self._start(self._alone, folder, common | rank) for rank in ranks])
        return [self._results(folder, rank) for rank in range(2)]

    def job(self, folder: Path, store: str, *, num_servers: int = 2) -> list[Results]:
        """Run two workers with servers."""
        with self.started_job(folder, store, num_servers=num_servers) as job:
            assert job.wait(LIMIT_S) == 0, f"{job.err}\n{job.out}"
        return [self._results(folder, rank) for rank in range(2)]

    def started_job(self, folder: Path, store: str, *, num_servers: int = 2) -> Job:
        """Start two workers with servers."""
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, str(self._path), store, str(folder), *self.cases]
        return Job(folder / "job", num_workers=2, num_servers=num_servers, command=command, environment=QUIET)

    def _start(self, store: str, folder: Path, variables: Mapping[str, str] = MappingProxyType({})) -> Popen:
        folder.mkdir(parents=True, exist_ok=True)
        return subprocess.Popen(
            [sys.executable, str(self._path), store, str(folder), *self.cases],
            env={**os.environ, **QUIET, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def _results(self, folder: Path, rank: int) -> Results:
        found: Results = torch.load(folder / f"{rank}.pt")
        assert list(found) == list(self.cases)
        return found


def _expect_success(processes: Sequence[Popen]) -> None:
    try:
        for process in processes:
            out, _ = process.communicate(timeout=LIMIT_S)
            assert process.returncode == 0, out
    finally:
        for process in processes:
            process.kill()
            process.wait()


def assert_same_bits(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    assert_close(one, other, 0)


def assert_close(one: Mapping[str, Tensor], other: Mapping[str, Tensor], tolerance: float) -> None:
    """Compare two models' weights. The error names the weight."""
    torch.testing.assert_close(dict(one), dict(other), rtol=0, atol=tolerance)
