"""Jobs for test_late_workers.py, whose processes are forks: workers train until the file `stop` exists.

A worker writes a line per step to `steps-RANK-PID`. Every process has values of its own at first, so that a worker that
joins later must get those of the others.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

import echelon
from echelon.environment import Job
from echelon.scheduler import serve as serve_scheduler
from echelon.server.serve import serve as serve_server
from echelon.transport.choose import transport_of
from forked import Fork
from jobs import rows, until
from ports import free_port

SETTINGS: dict[str, dict[str, Any]] = {
    "dist_sync": {},
    "dist_async": {},
    "dist_ssync": {"staleness": 2},
    "dist_gsync": {"groups": [[0, 1], [2]]},
}
NUM_SERVERS = 2
HEARTBEAT_TIMEOUT_S = 2.0
BATCH = 16


class Result(NamedTuple):
    """What a worker has at the end."""

    steps: int
    weights: list[list[float]]
    frozen: list[float]
    statistics: list[float]


class Network(nn.Module):
    """A small network with a frozen layer and statistics of BatchNorm; the table may have sparse gradients."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 8, sparse=sparse)
        self.norm = nn.BatchNorm1d(8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.head = nn.Linear(8, 1)

    def forward(self, numbers: Tensor) -> Tensor:
        hidden: Tensor = self.frozen(self.norm(self.table(numbers)))
        output: Tensor = self.head(torch.tanh(hidden))
        return output


def train(rank: int, store: str, sparse: bool, settings: dict[str, Any]) -> Result:
    """Train until the test has seen enough."""
    torch.manual_seed(os.getpid())
    model = Network(sparse=sparse)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.0 if sparse else 0.9)
    own = {} if Job.from_environment().joins else SETTINGS[store]  # one that joins takes them over from the job
    trainer = echelon.Trainer(model, optimizer, store, average_buffers=True, **{**own, **settings})
    with open(f"steps-{rank}-{os.getpid()}", "a", buffering=1) as log:
        while not trainer.kvstore.halted:
            numbers = torch.randint(0, 50, (BATCH,))
            (model(numbers) - (numbers.float() / 50).unsqueeze(1)).square().mean().backward()
            trainer.step(BATCH)
            log.write(json.dumps({"at": time.time(), "workers": trainer.kvstore.workers}) + "\n")
            if Path("stop").exists():
                trainer.kvstore.halt("the test has seen enough")
            time.sleep(0.005)  # the others need the cores, too
    trainer.average_buffers()
    trainer.close()
    assert model.norm.running_mean is not None
    weights = [parameter.detach().flatten().tolist() for parameter in model.parameters()]
    return Result(trainer.clock, weights, model.frozen.weight.flatten().tolist(), model.norm.running_mean.tolist())


def _join(*arguments: Any) -> Result:
    """Train as a worker that `echelon join` has started."""
    os.environ["ECHELON_JOINS"] = "True"
    return train(*arguments)


def _run_process(port: int, num_workers: int, role: str, rank: int, program: Callable[..., Any], arguments: Any) -> Any:
    os.environ |= {
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": str(port),
        "DMLC_NUM_WORKER": str(num_workers),
        "DMLC_NUM_SERVER": str(NUM_SERVERS),
        "DMLC_ROLE": role,
        "ECHELON_RANK": str(rank),
        "ECHELON_MAX_WORKERS": "8",
        "PS_HEARTBEAT_TIMEOUT": str(HEARTBEAT_TIMEOUT_S),
    }
    return program(*arguments)


def _serve(role: str) -> int:
    job = Job.from_environment()
    return serve_scheduler(job) if role == "scheduler" else serve_server(job, transport_of(job))


class Training:
    """A job with two servers. As a context manager it ends all processes."""

    def __init__(
        self,
        folder: Path,
        store: str,
        num_workers: int,
        *,
        sparse: bool = False,
        settings: dict[str, Any] | None = None,
    ) -> None:
        self._port = free_port()
        self._folder = folder
        self._num_workers = num_workers
        self._store = store
        self._sparse = sparse
        self._settings = settings or {}
        self._forks = {"scheduler": self._fork("scheduler", 0, _serve, "scheduler")}
        for rank in range(NUM_SERVERS):
            self._forks[f"server {rank}"] = self._fork("server", rank, _serve, "server")
        self.pids: dict[str, int] = {}
        for rank in range(num_workers):
            self.start(rank)
        for rank in range(num_workers):
            self.until_steps(f"worker {rank}", 5)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self.pids.values():
            self._signal(pid, signal.SIGKILL)
        for fork in self._forks.values():
            fork.result()

    def _fork(self, role: str, rank: int, program: Callable[..., Any], *arguments: Any) -> Fork:
        return Fork(_run_process, self._port, self._num_workers, role, rank, program, arguments)

    def start(self, rank: int, again: str = "", *, waits: bool = True) -> str:
        """Start a worker, and return its name. `waits`: until a worker that is started again begins to train."""
        name = f"worker {rank}{again}"
        known = set(self._folder.glob(f"steps-{rank}-*"))
        self._forks[name] = self._fork("worker", rank, train, rank, self._store, self._sparse, self._settings)
        if again and waits:
            (found,) = until(lambda: set(self._folder.glob(f"steps-{rank}-*")) - known, f"{name} at its first step")
            self.pids[name] = int(found.name.rsplit("-")[-1])
        return name

    def join(self, rank: int, settings: dict[str, Any] | None = None) -> str:
        """Start a worker as `echelon join` does, without the settings of the job's scheme, and return its name."""
        name, own = f"worker {rank}", {**self._settings, **(settings or {})}
        self._forks[name] = self._fork("worker", rank, _join, rank, self._store, self._sparse, own)
        return name

    def pid(self, name: str) -> int:
        if name not in self.pids:
            rank = name.split()[1]
            (found,) = until(lambda: list(self._folder.glob(f"steps-{rank}-*")), f"the steps of {name}")
            self.pids[name] = int(found.name.rsplit("-")[-1])
        return self.pids[name]

    def steps(self, name: str) -> list[Any]:
        return rows(self._folder / f"steps-{name.split()[1]}-{self.pid(name)}")

    def until_steps(self, name: str, count: int) -> None:
        """Wait until a worker has made `count` more steps."""
        before = len(self.steps(name))
        until(lambda: len(self.steps(name)) >= before + count, f"{count} more steps of {name}")

    def until_workers(self, name: str, *workers: int) -> None:
        """Wait until a worker trains with these workers."""
        until(lambda: self.steps(name)[-1]["workers"] == list(workers), f"{name} with workers {workers}")

    def longest_pause(self, name: str, since: float) -> float:
        """Return the longest time between two steps of a worker since then, in seconds."""
        times: list[float] = [since, *(row["at"] for row in self.steps(name) if row["at"] > since)]
        return max(after - before for before, after in itertools.pairwise(times))

    def kill(self, name: str) -> float:
        """Kill a worker, and return when."""
        self._signal(self.pid(name), signal.SIGKILL)
        killed = time.time()
        self.result(name)
        return killed

    def result(self, name: str) -> Any:
        """Wait until a process ends, and return its result or its exception."""
        return self._forks.pop(name).result()

    def stop(self, name: str) -> None:
        self._signal(self.pid(name), signal.SIGSTOP)

    def go_on(self, name: str) -> None:
        self._signal(self.pid(name), signal.SIGCONT)

    def _signal(self, pid: int, number: int) -> None:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            assert number == signal.SIGKILL

    def finish(self) -> dict[str, Any]:
        """Let all workers stop, and return what every process returned, by its name."""
        (self._folder / "stop").touch()
        forks, self._forks = self._forks, {}
        return {name: fork.result() for name, fork in forks.items()}
