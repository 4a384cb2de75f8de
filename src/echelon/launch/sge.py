"""The Grid Engine launcher: `qsub` runs an array job whose tasks are agents, one per server and worker.

The scheduler runs beside the launcher, which stays until the job has ended. Every user can read the environment of a
job of Grid Engine (`qstat -j`), so the credentials are in a file that only this user can read, in a folder that the
hosts share with this machine.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import secrets
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from echelon.environment import CREDENTIALS, CREDENTIALS_FILE, TASK
from echelon.errors import UsageError
from echelon.launch.addresses import launcher_address
from echelon.launch.agents.hub import Hub, task_command, variable_names
from echelon.launch.agents.tasks import TaskProgram, find_cause, num_tasks, python_path, run_tasks
from echelon.launch.hosts import Host
from echelon.launch.interface import Output
from echelon.launch.plan import Plan, Request, describe, make_plan
from echelon.transport.admission.credentials import Credentials, write_credentials

QSUB = "qsub"
LOG_FOLDER = "<log folder>"
JOB_NAME = "<job name>"
ANY_HOST = Host("<a host of Grid Engine>")
QDEL_S = 30.0
SCRIPT = "task.sh"
_ERRORS = {
    "is no submit host": "start the launcher on a submit host of Grid Engine",
    "not allowed to run in any queue": "name a queue that you may use with --sge-queue",
}


def job_script(python: str = sys.executable) -> str:
    """Return the script of every task. Grid Engine counts tasks from 1."""
    lines = [f"{TASK}=$((SGE_TASK_ID - 1))", f"export {TASK}", f"exec {shlex.join(task_command(python))}"]
    return "\n".join(["#!/bin/sh", *lines, ""])


def qsub_command(options: Mapping[str, Any], num_tasks: int, name: str, folder: str, variables: list[str]) -> list[str]:
    """Return the command that submits the array job and waits for its end. The path of the script follows.

    `folder` receives the output of the tasks, to which qsub passes the named variables on.
    """
    words = [QSUB, "-terse", "-sync", "y", "-N", name, "-t", f"1-{num_tasks}", "-cwd", "-S", "/bin/sh"]
    words += ["-r", "n", "-j", "y", "-o", folder, "-v", ",".join(variables)]
    if queue := options.get("sge_queue"):
        words += ["-q", queue]
    return [*words, *itertools.chain.from_iterable(map(shlex.split, options.get("sge_args") or []))]


class SgeLauncher:
    """Starts a job with qsub."""

    name = "sge"

    def add_arguments(self, group: argparse._ArgumentGroup) -> None:
        """Add the flags of this launcher."""
        group.add_argument("--sge-queue", metavar="QUEUE", help="queue of the array job")
        group.add_argument(
            "--sge-args",
            action="append",
            default=[],
            metavar="OPTIONS",
            help="more options of qsub, in one word: --sge-args='-l h_rt=3600,gpu=1'",
        )
        group.add_argument(
            "--sge-log-dir",
            metavar="FOLDER",
            help="folder that all hosts share, for the output of the tasks while the job runs (default: this one)",
        )

    def plan(self, request: Request) -> Plan:
        """Put the scheduler beside the launcher. Grid Engine chooses the hosts of the other processes."""
        if request.hosts:
            raise UsageError(
                "--launcher sge runs on the hosts that Grid Engine chooses: omit -H, and name hosts, if you must, with "
                "--sge-queue=QUEUE@HOST"
            )
        if request.sync_dst_dir:
            raise UsageError(
                "--sync-dst-dir belongs to --launcher ssh; with --launcher sge all hosts need this folder at the same "
                "path, on a shared disk"
            )
        return make_plan(request)

    def describe(self, plan: Plan) -> str:
        """Return the command line of qsub, the script and the plan."""
        variables = [_credentials_by_file(name) for name in variable_names(plan.job) if name != TASK]
        command = qsub_command(
            plan.request.options, num_tasks(plan), JOB_NAME, LOG_FOLDER, [*variables, *python_path()]
        )
        anywhere = make_plan(replace(plan.request, hosts=(ANY_HOST,)))
        return f"{shlex.join(command)} <<END\n{job_script()}END\n{describe(anywhere)}"

    def run(self, plan: Plan, output: Output) -> int:
        """Run the job."""
        name = f"echelon-{secrets.token_hex(4)}"
        address = launcher_address(plan.job.interface, [], one_machine=False)
        with _shared_folder(plan, name) as folder:

            def start(hub: Hub) -> TaskProgram:
                variables = _write_files(hub, folder)
                command = qsub_command(plan.request.options, num_tasks(plan), name, str(folder), list(variables))
                return TaskProgram(QSUB, [*command, str(folder / SCRIPT)], variables, partial(find_cause, _ERRORS))

            try:
                return run_tasks(plan, output, address, start, start_s=math.inf)  # tasks may wait in the queue
            finally:
                _delete(name)
                _show_logs(folder, name, output)


def _write_files(hub: Hub, folder: Path) -> dict[str, str]:
    """Write the script and the credentials, and return the variables of the tasks, which are not secret."""
    (folder / SCRIPT).write_text(job_script())
    variables = {**hub.environment(""), **python_path()}
    del variables[TASK]  # the script sets it
    if text := variables.pop(CREDENTIALS, None):
        variables[CREDENTIALS_FILE] = str(folder / "credentials")
        write_credentials(folder / "credentials", Credentials.parse(text, "the job"))
    return variables


def _credentials_by_file(name: str) -> str:
    return CREDENTIALS_FILE if name == CREDENTIALS else name


@contextmanager
def _shared_folder(plan: Plan, name: str) -> Iterator[Path]:
    parent = plan.request.options.get("sge_log_dir") or os.getcwd()
    try:
        folder = TemporaryDirectory(prefix=f"{name}-", dir=parent)
    except OSError as error:
        raise UsageError(
            f"no folder can be made in {parent}: {error.strerror}; name a writable one that all hosts share with "
            "--sge-log-dir"
        ) from error
    with folder as path:
        yield Path(path)


def _delete(name: str) -> None:
    """Delete what is left of the job, for example tasks that still wait."""
    with suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(["qdel", name], stdin=subprocess.DEVNULL, capture_output=True, timeout=QDEL_S, check=False)


def _show_logs(folder: Path, name: str, output: Output) -> None:
    """Show what tasks have printed, which is only errors of their agents: their processes print over the hub."""
    for path in sorted(folder.glob(f"{name}.o*")):
        for line in path.read_text(errors="replace").splitlines():
            output.on_line(f"task {int(path.suffix[1:]) - 1}", line)
