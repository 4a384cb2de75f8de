"""When each step of a process ended, for `echelon bench run`. Without ECHELON_BATCH_TIMES nothing is recorded.

All processes start their clocks after the same barrier, so that times of different machines can be compared to within
the delay of a barrier, whatever their clocks say. On a GPU the step is waited for; otherwise the host would only have
queued it. At the end all processes exchange their times, and every worker writes those of all.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Self

import msgspec
import torch

from echelon.environment import BATCH_TIMES, variable
from echelon.kvstore.store import KVStore


class BatchTimes:
    """The ends of the steps of one process, in seconds since `start`. Without a folder it does nothing."""

    def __init__(self, folder: Path | None, device: torch.device, device_index: int) -> None:
        self._folder = folder
        self._device = device
        self._device_index = device_index
        self._start_s = 0.0
        self._ends: list[float] = []

    @classmethod
    def from_environment(cls, device: torch.device, device_index: int) -> Self:
        """Return a recorder for the folder that the environment names."""
        folder = variable(BATCH_TIMES)
        return cls(Path(folder) if folder else None, device, device_index)

    def start(self) -> None:
        """Start the clock, when all processes have passed a barrier."""
        self._start_s = time.perf_counter()

    def end_step(self) -> None:
        """Record the end of a step."""
        if self._folder is None:
            return
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._ends.append(time.perf_counter() - self._start_s)

    def write(self, kvstore: KVStore, batch_size: int) -> None:
        """Write the times of all processes to `batch_times_RANK.json`. All processes call it together."""
        if self._folder is None:
            return
        own = {"rank": kvstore.worker_rank, "device": self._device_index, "batch_size": batch_size, "ends": self._ends}
        everything = kvstore.gather(own)
        if self._device_index == 0:
            path = self._folder / f"batch_times_{kvstore.worker_rank}.json"
            path.write_bytes(msgspec.json.encode(everything))
