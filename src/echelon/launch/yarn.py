"""The YARN launcher: the distributed shell of Hadoop starts an agent in a container for each server and worker.

The agents connect to the launcher's hub, and the scheduler runs beside the launcher. YARN shows the command line and
the variables of a container to others, so the secret does not go through it: launcher and containers read the same
credentials file, which every node of the cluster must have.
"""

from __future__ import annotations

import argparse
import glob
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from echelon.environment import CREDENTIALS_FILE, HUB, SECURITY_POLICY, user_configuration, variable
from echelon.errors import UsageError
from echelon.launch.addresses import launcher_address
from echelon.launch.agents.hub import Hub, task_command
from echelon.launch.agents.tasks import Cause, TaskProgram, run_tasks
from echelon.launch.interface import Output
from echelon.launch.plan import SCHEDULER, Plan, Request, describe, make_plan
from echelon.transport.admission.credentials import FILE_NAME, read_credentials, user_credentials

YARN = "yarn"
CLIENT = "org.apache.hadoop.yarn.applications.distributedshell.Client"
START_S = 300.0  # YARN may wait for free resources before it starts the containers
_JAR = "share/hadoop/yarn/hadoop-yarn-applications-distributedshell-*.jar"
_HINT = "'yarn logs -applicationId ID' shows what the containers printed"
_UNKNOWN_HUB = "<address of this machine>:<free port>"


class YarnLauncher:
    """Starts a job with `yarn`."""

    name = "yarn"

    def add_arguments(self, group: argparse._ArgumentGroup) -> None:
        """Add the flags of this launcher."""
        group.add_argument("--yarn-jar", help=f"jar of the distributed shell (default: {_JAR} under HADOOP_HOME)")
        group.add_argument("--yarn-queue", help="queue of the application (default: YARN's)")
        group.add_argument("--yarn-memory", type=int, default=4096, help="memory of a container in MB (default: 4096)")
        group.add_argument("--yarn-vcores", type=int, default=1, help="virtual cores of a container (default: 1)")
        group.add_argument("--yarn-python", default="python3", help="Python of the nodes (default: python3)")
        group.add_argument(
            "--yarn-credentials-file",
            help="file with the secret, at the same path on every node (default: ~/.config/echelon/credentials)",
        )

    def plan(self, request: Request) -> Plan:
        """Put the scheduler on this machine; YARN places the other processes."""
        if request.hosts:
            raise UsageError("-H has no meaning with --launcher yarn: YARN chooses the hosts")
        if request.sync_dst_dir:
            raise UsageError("--sync-dst-dir belongs to --launcher ssh; with YARN all nodes need this folder")
        return make_plan(request)

    def describe(self, plan: Plan) -> str:
        """Return the command line of yarn and the plan."""
        options = plan.request.options
        command = application(plan, options, options.get("yarn_jar") or _JAR, _environment(plan, _UNKNOWN_HUB))
        return "\n".join([f"{YARN}: {shlex.join(command)}", describe(plan)])

    def run(self, plan: Plan, output: Output) -> int:
        """Submit the application, and follow its processes to their end."""
        if shutil.which(YARN) is None:
            raise UsageError(
                "--launcher yarn needs the program yarn, which is not in PATH: install Hadoop's client, and set "
                "HADOOP_HOME and PATH"
            )
        options = plan.request.options
        jar = find_jar(options.get("yarn_jar"), variable("HADOOP_HOME"))
        if plan.job.security != "none":
            file = options.get("yarn_credentials_file")
            secret = read_credentials(Path(file)) if file else user_credentials()
            plan = plan.with_credentials(secret.to_text())
        address = launcher_address(plan.job.interface, [], one_machine=False)

        def program(hub: Hub) -> TaskProgram:
            variables = _environment(plan, ":".join(map(str, hub.address)))
            return TaskProgram(YARN, application(plan, options, jar, variables), {}, _cause_of, _HINT)

        return run_tasks(plan, output, address, program, start_s=START_S)


def application(plan: Plan, options: Mapping[str, Any], jar: str, variables: Mapping[str, str]) -> list[str]:
    """Return the command line that submits an application with one container per server and worker."""
    num_containers = sum(process.role != SCHEDULER for process in plan.processes)
    queue = options.get("yarn_queue")
    return [
        *(YARN, "jar", jar, CLIENT, "-jar", jar, "-appname", "echelon"),
        *("-num_containers", str(num_containers)),
        *("-container_memory", str(options.get("yarn_memory") or 4096)),
        *("-container_vcores", str(options.get("yarn_vcores") or 1)),
        *(["-queue", queue] if queue else []),
        *(word for name, value in sorted(variables.items()) for word in ("-shell_env", f"{name}={value}")),
        *("-shell_command", shlex.join(task_command(options.get("yarn_python") or "python3"))),
    ]


def find_jar(given: str | None, hadoop_home: str | None) -> str:
    """Return the jar of the distributed shell: the given one, or that of the Hadoop installation."""
    if given:
        if not Path(given).is_file():
            raise UsageError(f"--yarn-jar {given}: there is no such file")
        return given
    if not hadoop_home:
        raise UsageError("the jar of YARN's distributed shell is unknown: set HADOOP_HOME, or give it with --yarn-jar")
    found = sorted(glob.glob(str(Path(hadoop_home) / _JAR)))
    if not found:
        raise UsageError(f"there is no {Path(hadoop_home) / _JAR}: give the distributed shell's jar with --yarn-jar")
    return found[-1]


def _environment(plan: Plan, hub: str) -> dict[str, str]:
    """Return the variables of a container. The secret is not among them, but the file that has it."""
    variables = {HUB: hub, SECURITY_POLICY: plan.job.security}
    if plan.job.security != "none":
        file = plan.request.options.get("yarn_credentials_file") or str(user_configuration() / FILE_NAME)
        variables[CREDENTIALS_FILE] = file
    return variables


def _cause_of(line: str) -> Cause | None:
    """Return why containers cannot run, if a line of yarn is a known error."""
    known = "No module named" in line
    return Cause(None, "every node needs Echelon for the Python of --yarn-python") if known else None
