"""The Slurm allocation that this process runs in: its hosts, and the `srun` command that starts tasks on them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from echelon.environment import variable
from echelon.errors import UsageError
from echelon.launch.slurm.commands import run_command

_CPUS = re.compile(r"(\d+)(?:\(x(\d+)\))?")  # SLURM_JOB_CPUS_PER_NODE, for example 72(x2),36


@dataclass(frozen=True)
class Allocation:
    """What Slurm has given to a job.

    `cpus` are those of each host. `cpus_per_task` is what the user has requested, if anything.
    `in_step`: this process runs in a step of the job, which already uses its CPUs.
    """

    job_id: str
    hosts: tuple[str, ...]
    cpus: tuple[int, ...]
    cpus_per_task: int | None = None
    in_step: bool = False

    def placement(self, num_tasks: int) -> list[str]:
        """Return the host of each task: hosts get tasks in turn, as long as they have CPUs for them."""
        if self._is_too_small_for(num_tasks):
            return list(itertools.islice(itertools.cycle(self.hosts), num_tasks))
        left = [count // (self.cpus_per_task or 1) for count in self.cpus]
        rounds = (
            host for turn in range(max(left)) for host, count in zip(self.hosts, left, strict=True) if turn < count
        )
        return list(itertools.islice(rounds, num_tasks))

    def _is_too_small_for(self, num_tasks: int) -> bool:
        return sum(count // (self.cpus_per_task or 1) for count in self.cpus) < num_tasks

    def srun(self, num_tasks: int, command: Sequence[str]) -> list[str]:
        """Return the command that starts a step, whose tasks run on the hosts of `placement`.

        The step lives until its last task has ended, whatever the others do: the launcher decides what a failure means.
        """
        options = [
            f"--ntasks={num_tasks}",
            "--distribution=cyclic",
            "--job-name=echelon",
            "--mpi=none",
            "--export=ALL",  # the credentials are in the environment
            "--input=none",
            "--kill-on-bad-exit=0",
            "--wait=0",
        ]
        if self.cpus_per_task is not None:  # srun does not inherit it from sbatch
            options.append(f"--cpus-per-task={self.cpus_per_task}")
        if self._is_too_small_for(num_tasks):
            options.append("--overcommit")
        if self.in_step:
            options.append("--overlap")  # otherwise this step would wait for the CPUs of its own launcher
        return ["srun", *options, *command]


def current_allocation() -> Allocation | None:
    """Return the allocation that this process runs in, or None."""
    job_id, nodes = variable("SLURM_JOB_ID"), variable("SLURM_JOB_NODELIST")
    if not job_id or not nodes:
        return None
    hosts = tuple(run_command(["scontrol", "show", "hostnames", nodes]).split())
    return Allocation(
        job_id,
        hosts,
        parse_cpus(variable("SLURM_JOB_CPUS_PER_NODE") or f"1(x{len(hosts)})"),
        _number("SLURM_CPUS_PER_TASK"),
        in_step=bool(variable("SLURM_STEP_ID")),
    )


def parse_cpus(text: str) -> tuple[int, ...]:
    """Return the CPUs of each host from SLURM_JOB_CPUS_PER_NODE: 72, 72 and 36 for "72(x2),36"."""
    found = [_CPUS.fullmatch(part) for part in text.split(",")]
    if None in found:
        raise UsageError(f"SLURM_JOB_CPUS_PER_NODE is {text!r}; Slurm writes it as in 72(x2),36")
    return tuple(int(one[1]) for one in found if one is not None for _ in range(int(one[2] or 1)))


def _number(name: str) -> int | None:
    text = variable(name)
    return int(text) if text and text.isdecimal() else None
