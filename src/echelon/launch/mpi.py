"""The MPI launcher: one `mpirun`, of Open MPI or MPICH, starts an agent for each server and worker.

MPI is only a way to start programs on hosts here; the job does not use its messages. The task's rank in MPI decides
which process of the plan it runs. The scheduler runs beside the launcher. Since the tasks are agents, which end with
status 0, mpirun does not end the job when one worker fails.
"""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from echelon.environment import variable
from echelon.errors import UsageError
from echelon.launch.addresses import launcher_address
from echelon.launch.agents.hub import Hub, task_command, variable_names
from echelon.launch.agents.tasks import Cause, TaskProgram, python_path, run_tasks
from echelon.launch.hosts import Host
from echelon.launch.interface import Output
from echelon.launch.plan import SCHEDULER, Plan, PlannedProcess, Request, describe, make_plan
from echelon.launch.ssh.client import recognize

MPIRUN = "mpirun"
HOSTS_FILE = "<hosts file>"
_INSTALL = "install Open MPI (apt-get install openmpi-bin) or MPICH (apt-get install mpich)"
_LAST = {"ECHELON_LAST": ""}  # MPICH 4.0 does not pass on the last variable of its environment
_ALLOCATIONS = ("SLURM_JOB_ID", "PBS_NODEFILE", "LSB_HOSTS", "PE_HOSTFILE", "COBALT_NODEFILE", "FLUX_JOB_ID")


@dataclass(frozen=True)
class Flavour:
    """How an implementation of MPI starts programs.

    `rank` is the variable with a task's number. `fixed` are arguments of every start: tasks may use all cores of their
    host, the agent enters the working directory, and the death of a task does not end the others.
    """

    name: str
    rank: str
    fixed: tuple[str, ...]
    anywhere: tuple[str, ...]  # to start more tasks than the hosts that mpirun chooses have cores
    hosts_file: tuple[str, ...]  # before the path of a file that has one line per task, in the order of ranks
    own_address: str | None  # before the launcher's address, which the hosts of a file connect to
    variables: Callable[[Sequence[str]], list[str]]  # pass on variables by name: no command line shows their values


OPEN_MPI = Flavour(
    "Open MPI",
    rank="OMPI_COMM_WORLD_RANK",
    fixed=("--bind-to", "none", "--wdir", "/", "--mca", "orte_abort_on_non_zero_status", "0"),
    anywhere=("--oversubscribe",),
    hosts_file=("--map-by", "seq", "--hostfile"),
    own_address=None,
    variables=lambda names: [word for name in names for word in ("-x", name)],
)
MPICH = Flavour(
    "MPICH",
    rank="PMI_RANK",
    fixed=("-bind-to", "none", "-wdir", "/", "-disable-auto-cleanup"),
    anywhere=(),
    hosts_file=("-f",),
    own_address="-localhost",
    variables=lambda names: ["-genvlist", ",".join(names)],
)
_VERSIONS = {r"Open MPI|OpenRTE|PRRTE|prterun": OPEN_MPI, r"HYDRA|MPICH|Intel\(R\) MPI": MPICH}


def flavour_of(program: str, version: str) -> Flavour:
    """Return the implementation that `mpirun --version` names."""
    for pattern, flavour in _VERSIONS.items():
        if re.search(pattern, version):
            return flavour
    first = version.strip().partition("\n")[0]
    raise UsageError(f"{program} belongs neither to Open MPI nor to MPICH: '{program} --version' says {first!r}")


def mpirun_command(
    flavour: Flavour,
    plan: Plan,
    *,
    program: str,
    variables: Sequence[str],
    hosts_file: str,
    address: str,
    extra: Sequence[str] = (),
) -> list[str]:
    """Return the command line of mpirun."""
    arguments = [program, "-n", str(len(tasks_of(plan))), *flavour.fixed]
    if plan.hosts():
        arguments += [*flavour.hosts_file, hosts_file]
        arguments += [flavour.own_address, address] if flavour.own_address else []
    else:
        arguments += flavour.anywhere
    return [*arguments, *flavour.variables(variables), *extra, *task_command()]


def tasks_of(plan: Plan) -> list[PlannedProcess]:
    """Return the processes that mpirun starts, by their ranks in MPI."""
    return [process for process in plan.processes if process.role != SCHEDULER]


def hosts_text(plan: Plan) -> str:
    """Return the hosts file for mpirun. Both implementations put task t on the host of line t."""
    return "".join(f"{process.host}\n" for process in tasks_of(plan) if process.host)


class MpiLauncher:
    """Starts a job with mpirun."""

    name = "mpi"

    def add_arguments(self, group: argparse._ArgumentGroup) -> None:
        """Add the flags of this launcher."""
        group.add_argument(
            "--mpi-program", default=MPIRUN, metavar="MPIRUN", help="the mpirun of Open MPI or MPICH (default: mpirun)"
        )
        group.add_argument(
            "--mpi-args",
            action="append",
            default=[],
            metavar="ARGUMENTS",
            help="more arguments for mpirun, in one word: --mpi-args='--mca plm_rsh_agent rsh'",
        )

    def plan(self, request: Request) -> Plan:
        """Put the scheduler on this machine, and the other processes on the hosts."""
        for host in request.hosts:
            if host.user or host.port:
                raise UsageError(
                    f"mpirun cannot be given the user or the port of ssh for {host.name}: write only the host into the "
                    f"hosts file, and User and Port into ~/.ssh/config ('Host {host.name}')"
                )
        if request.sync_dst_dir:
            raise UsageError(
                "--sync-dst-dir belongs to --launcher ssh; with --launcher mpi all hosts need this folder at the same "
                "path, for example on a shared disk"
            )
        return make_plan(request)

    def describe(self, plan: Plan) -> str:
        """Return the command line of mpirun, its hosts file and the plan."""
        program, flavour = _find(plan)
        address = launcher_address_of(plan)
        variables = [*variable_names(plan.job), *python_path()]
        command = _command(plan, flavour, program, variables, HOSTS_FILE, address)
        hosts = [f"{HOSTS_FILE}:", *(f"    {line}" for line in hosts_text(plan).split())] if plan.hosts() else []
        return "\n".join([f"{flavour.name}: {shlex.join(command)}", *hosts, describe(plan)])

    def run(self, plan: Plan, output: Output) -> int:
        """Run the job."""
        program, flavour = _find(plan)
        address = launcher_address_of(plan)
        with TemporaryDirectory(prefix="echelon-mpi-") as folder:
            hosts_file = Path(folder, "hosts")
            hosts_file.write_text(hosts_text(plan))

            def start(hub: Hub) -> TaskProgram:
                variables = {**hub.environment(flavour.rank), **python_path()}
                command = _command(plan, flavour, program, list(variables), str(hosts_file), address)
                return TaskProgram(MPIRUN, command, variables | _LAST, cause_of)

            return run_tasks(plan, output, address, start)


def launcher_address_of(plan: Plan) -> str:
    """Return the address of this machine for the hosts of the job."""
    one_machine = not any(map(variable, _ALLOCATIONS)) and not plan.request.options.get("mpi_args")
    return launcher_address(plan.job.interface, [host.name for host in plan.hosts()], one_machine=one_machine)


def _find(plan: Plan) -> tuple[str, Flavour]:
    """Return the mpirun to use and its implementation."""
    program = str(plan.request.options.get("mpi_program") or MPIRUN)
    if shutil.which(program) is None:
        raise UsageError(f"--launcher mpi needs the program {program}, which is not in PATH: {_INSTALL}")
    done = subprocess.run([program, "--version"], capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    return program, flavour_of(program, done.stdout + done.stderr)


def _command(
    plan: Plan, flavour: Flavour, program: str, variables: Sequence[str], hosts_file: str, address: str
) -> list[str]:
    extra = [word for text in plan.request.options.get("mpi_args") or [] for word in shlex.split(text)]
    return mpirun_command(
        flavour, plan, program=program, variables=variables, hosts_file=hosts_file, address=address, extra=extra
    )


_HOST = r"(?P<host>[^\s:@\]]+)"
_CAUSES = {  # what mpirun, ssh and agents print, and what to say and do about it; by default the line itself
    r"attempt to run as root": "mpirun of Open MPI refuses to run as root; use another user, or set "
    "OMPI_ALLOW_RUN_AS_ROOT=1 and OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1, for example in a container",
    rf"^the agent on {_HOST} cannot start: ": None,
    r"No module named 'echelon'": "a host has no Echelon for this Python; every host needs it at the same path",
    rf"@{_HOST}\] .*execvp error on file .*": "the host has no {python}; every host needs Python at the same path",
    rf"^Node: +{_HOST}$": "the host has no {python}; every host needs Python at the same path",
    r"(hydra_pmi_proxy|orted): .*(?:not found|No such file)": "a host has no {0}, a part of MPI; install the same MPI, "
    "at the same path, on every host",
    rf"(?:^|@){_HOST}: (?:Permission denied \(|Too many authentication failures)": None,
    rf"Could not resolve hostname {_HOST}: ": None,
    rf"connect to host {_HOST} port \d+: ": None,
    rf"(?:Connection (?:closed|reset|timed out)) .*{_HOST} port \d+": None,
    rf"host key is known for {_HOST} ": "the host key of {host} is unknown; log in once to accept it: ssh {host}",
}


def cause_of(line: str) -> Cause | None:
    """Return why tasks cannot run, if a line of mpirun is a known error."""
    for pattern, text in _CAUSES.items():
        if found := re.search(pattern, line):
            host = found.groupdict().get("host")
            known = recognize(Host(host), line) if host else None
            return Cause(
                host, known or (text.format(*found.groups(), host=host, python=task_command()[0]) if text else line)
            )
    return None
