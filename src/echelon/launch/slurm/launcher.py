"""The Slurm launcher: one `srun` starts an agent for each server and worker of a job.

In an allocation (`sbatch`, `salloc`) it uses that allocation, with the scheduler beside it. Elsewhere it submits a
batch job, in which it is started again, and follows that job.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
from dataclasses import replace
from functools import partial
from types import FrameType

from echelon.environment import take_variable
from echelon.errors import JobError, UsageError
from echelon.launch.addresses import launcher_address
from echelon.launch.agents.hub import Hub, task_command
from echelon.launch.agents.tasks import TaskProgram, find_cause, num_tasks, python_path, run_tasks
from echelon.launch.hosts import Host
from echelon.launch.interface import Output
from echelon.launch.plan import Plan, Request, describe, make_plan
from echelon.launch.run import protect
from echelon.launch.slurm.allocation import Allocation, current_allocation
from echelon.launch.slurm.batch import follow, submit
from echelon.launch.slurm.commands import run_command
from echelon.launch.slurm.script import WARNING_S, BatchOptions, output_file, parse_state, sbatch_command, to_text

SRUN = "srun"
TASK_NUMBER = "SLURM_PROCID"
_ERRORS = {
    "Unable to create step": "the allocation does not permit this step; request a CPU per server and worker",
    "No module named": "every node needs the same Python with Echelon, at the same path",
}


class SlurmLauncher:
    """Starts a job in an allocation of Slurm, or submits it."""

    name = "slurm"

    def add_arguments(self, group: argparse._ArgumentGroup) -> None:
        """Add the flags of this launcher. All of them are for batch jobs that it submits."""
        group.add_argument("--slurm-partition", help="partition of the batch job")
        group.add_argument("--slurm-account", help="account that the batch job is charged to")
        group.add_argument("--slurm-time", metavar="LIMIT", help="time limit of the batch job, for example 2:00:00")
        group.add_argument("--slurm-nodes", type=int, metavar="N", help="spread servers and workers over N nodes")
        group.add_argument(
            "--slurm-args",
            action="append",
            default=[],
            metavar="OPTIONS",
            help="more options of sbatch, in one word: --slurm-args='--gpus-per-task=1 --mem=8G'",
        )
        group.add_argument(
            "--slurm-requeue",
            action="store_true",
            help=f"when the job is preempted, and {WARNING_S} s before its time limit, save and queue it again; the "
            "command must resume from its checkpoint (echelon train --resume auto does)",
        )
        group.add_argument("--slurm-detach", action="store_true", help="submit the batch job and do not wait for it")

    def plan(self, request: Request) -> Plan:
        """Put the scheduler beside the launcher, and the other processes on the nodes in turn."""
        if request.hosts:
            raise UsageError(
                "--launcher slurm runs on the nodes that Slurm allocates: omit -H, and name nodes, if you must, with "
                "--slurm-args=--nodelist=NODES"
            )
        if request.sync_dst_dir:
            raise UsageError(
                "--sync-dst-dir belongs to --launcher ssh; with --launcher slurm all nodes need this folder at the "
                "same path, on a shared disk"
            )
        options = BatchOptions.of(request.options)
        allocation = current_allocation()
        if allocation is not None:
            names = allocation.placement(request.job.num_servers + request.job.num_workers)
            return make_plan(replace(request, hosts=tuple(map(Host, names))))
        nodes = tuple(Host(f"<node {number}>") for number in range(1, 1 + (options.nodes or 1)))
        return make_plan(replace(request, hosts=nodes), scheduler_host=nodes[0])

    def describe(self, plan: Plan) -> str:
        """Return the command line of sbatch or srun, and the plan."""
        allocation = current_allocation()
        if allocation is None:
            return f"{shlex.join(_sbatch(plan))}\n{describe(plan)}"
        return f"{shlex.join(_srun(plan, allocation))}\n{describe(plan)}"

    def run(self, plan: Plan, output: Output) -> int:
        """Run the job in this allocation, or in one that is requested for it."""
        allocation = current_allocation()
        if allocation is not None:
            return _run_step(plan, allocation, output)
        job_id = submit(_sbatch(plan), to_text(replace(plan.request, hosts=()), os.getcwd()))
        file = output_file(os.getcwd(), job_id)
        print(f"echelon: submitted Slurm job {job_id}; its output goes to {file}", file=sys.stderr, flush=True)
        if BatchOptions.of(plan.request.options).detach:
            return 0
        return follow(job_id, os.getcwd(), output)

    def run_batch(self, request: Request) -> int:
        """Run a job in the batch job that was submitted for it, and queue that again if Slurm needs the nodes."""
        allocation = current_allocation()
        if allocation is None:
            raise UsageError("this program runs in a batch job of Slurm, but SLURM_JOB_ID is not set")
        signal.signal(signal.SIGUSR1, _stop_workers)
        status = _run_step(protect(self.plan(request)), allocation, Output())
        if status == 128 + signal.SIGTERM and BatchOptions.of(request.options).requeue:
            _requeue(allocation.job_id)
        return status


def _stop_workers(number: int, frame: FrameType | None) -> None:
    """Handle Slurm's warning that the time is nearly over. The supervisor collects SIGTERM, and lets workers save."""
    os.kill(os.getpid(), signal.SIGTERM)


def _requeue(job_id: str) -> None:
    """Queue this batch job again, unless Slurm is ending it: then it is cancelled, or Slurm requeues it itself."""
    state = parse_state(run_command(["scontrol", "--oneliner", "show", "job", job_id]))
    if state.name != "RUNNING":
        return
    print(f"echelon: Slurm job {job_id} is queued again, to continue later", file=sys.stderr, flush=True)
    try:
        run_command(["scontrol", "requeue", job_id])
        signal.pause()  # Slurm ends this process; its own end would be the end of the batch job
    except JobError as error:
        print(f"echelon: Slurm job {job_id} cannot be queued again: {error}", file=sys.stderr, flush=True)


def _run_step(plan: Plan, allocation: Allocation, output: Output) -> int:
    take_variable("SLURM_NTASKS_PER_NODE")  # that of the allocation may contradict the number of tasks
    address = launcher_address(plan.job.interface, [host.name for host in plan.hosts()], one_machine=False)

    def start(hub: Hub) -> TaskProgram:
        variables = {**hub.environment(TASK_NUMBER), **python_path()}
        return TaskProgram(SRUN, _srun(plan, allocation), variables, partial(find_cause, _ERRORS))

    return run_tasks(plan, output, address, start)


def _srun(plan: Plan, allocation: Allocation) -> list[str]:
    return allocation.srun(num_tasks(plan), task_command())


def _sbatch(plan: Plan) -> list[str]:
    return sbatch_command(BatchOptions.of(plan.request.options), num_tasks(plan), os.getcwd(), sys.executable)
