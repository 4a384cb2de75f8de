"""Putting a contender's job together: one process per role and rank, all on loopback."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence

from echelon.bench.harness.process import ProcessSpec
from echelon.environment import Job


def local_job(num_workers: int, num_servers: int, transport: str) -> Job:
    """A job on loopback, with a port of its own."""
    return Job(
        scheduler_port=_free_port(),
        num_workers=num_workers,
        num_servers=num_servers,
        host="127.0.0.1",
        transport=transport,
    )


def job_specs(job: Job, argv: Sequence[str], env: Mapping[str, str] | None = None) -> list[ProcessSpec]:
    """One process a role and rank, all with the same command line, told apart by their environment."""
    counts = {"scheduler": 1, "server": job.num_servers, "worker": job.num_workers}
    return [
        ProcessSpec(
            f"{role} {rank}",
            argv,
            {**job.as_role(role, rank).to_environment(), **(env or {})},
            driven=role == "worker",
        )
        for role, count in counts.items()
        for rank in range(count)
    ]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
