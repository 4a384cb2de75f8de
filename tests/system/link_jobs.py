"""Jobs over a bad link: scheduler and most processes on the first host, far ones on the second, behind the relay."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

from hosts import Host
from link_worker import Work
from relay import ADDRESSES, DEVICE

from echelon.environment import CREDENTIALS
from echelon.transport.admission.credentials import Credentials
from jobs import ByHand, until

FOLDER = Path(__file__).parent
HEARTBEAT_TIMEOUT_S = 6.0  # three heartbeats
STALL_SECONDS = 2.0
ROLES = {"scheduler": ["-m", "echelon.scheduler"], "server": ["-m", "echelon.server"]}


class LinkJob(ByHand):
    """A job whose processes are started one by one on hosts that the relay joins. All connections are TCP with TLS."""

    def __init__(
        self, folder: Path, num_workers: int, num_servers: int = 1, environment: Mapping[str, str] | None = None
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        variables = {
            "DMLC_PS_ROOT_URI": ADDRESSES[0],
            "DMLC_INTERFACE": DEVICE,
            "ECHELON_TRANSPORT": "tcp",
            "ECHELON_STALL_SECONDS": str(STALL_SECONDS),
            "PS_HEARTBEAT_TIMEOUT": str(HEARTBEAT_TIMEOUT_S),
            "OMP_NUM_THREADS": "1",
            CREDENTIALS: Credentials.create().to_text(),
        }
        super().__init__(folder, num_workers, num_servers, {**variables, **(environment or {})})
        self.folder = folder

    def start_on(self, host: Host, name: str, program: Sequence[str] = ()) -> None:
        """Start a process, "server 0", on a host. Scheduler and servers need no program."""
        role, rank = name.split()
        command = [*host.prefix(self.folder), sys.executable, *(program or ROLES[role])]
        self.start(name, command, ECHELON_RANK=rank)

    def start_worker(self, host: Host, rank: int, work: Work) -> None:
        """Start a worker of link_worker.py."""
        program = [str(FOLDER / "link_worker.py"), json.dumps(asdict(work)), str(self.folder)]
        self.start_on(host, f"worker {rank}", program)

    def clocks(self, rank: int) -> list[float]:
        """Return when a worker began each of its clocks."""
        path = self.folder / f"clocks-{rank}"
        return [float(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []

    def wait_for_clock(self, rank: int, clock: int) -> float:
        """Wait until a worker has begun a clock; return when. The processes of a job may start slowly."""
        worker = self.processes[f"worker {rank}"]
        until(
            lambda: len(self.clocks(rank)) > clock or worker.poll() is not None, f"worker {rank} at clock {clock}", 90.0
        )
        assert len(self.clocks(rank)) > clock, {name: self.out(name) for name in self.processes}
        return self.clocks(rank)[clock]

    def longest_pause(self, rank: int, after: float = 0.0) -> float:
        """Return the longest time between two clocks of a worker, of which the second is later than `after`."""
        pauses = (later - earlier for earlier, later in pairwise(self.clocks(rank)) if later > after)
        return max(pauses, default=0.0)

    def rate(self, rank: int, last: int) -> float:
        """Return the clocks per second of a worker in its last clocks."""
        clocks = self.clocks(rank)[-last:]
        return (len(clocks) - 1) / (clocks[-1] - clocks[0])

    def pushes_applied(self, rank: int) -> list[list[int]]:
        """Return how often each push of each worker was applied, in the final weights of worker `rank`."""
        table: list[list[float]] = json.loads((self.folder / f"table-{rank}").read_text())
        return [[-int(value) for value in row] for row in table]

    def assert_succeeded(self, timeout_s: float = 60.0) -> None:
        """Wait for all processes, which must end with status 0."""
        statuses = self.statuses(timeout_s)
        assert set(statuses.values()) == {0}, {name: (status, self.out(name)) for name, status in statuses.items()}
