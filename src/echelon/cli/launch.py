"""`echelon launch`: run any command as the workers of a job, for example `echelon launch -n 2 -s 2 python train.py`."""

from __future__ import annotations

import argparse
import math
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any

from echelon.cli.live_page import add_dash_flag, listener_from, live_page
from echelon.cluster.messages import SERVER, WORKER
from echelon.cluster.shares import groups_text, read_groups, read_shares, shares_text
from echelon.environment import Job, import_paths, variable
from echelon.errors import UsageError, unknown_name
from echelon.launch import LAUNCHERS, Launcher
from echelon.launch.hosts import read_hosts
from echelon.launch.interface import Output
from echelon.launch.plan import Plan, Request
from echelon.launch.run import protect
from echelon.report.runs import new_run
from echelon.train.flags.parser import Parser
from echelon.transport.interface import check_name

_VARIABLE = re.compile(r"(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?:[=:](?P<value>.*))?", re.DOTALL)


GIVEN_UP = {  # by Job.security
    "proof": "--no-encryption: whoever can read or change packets on the network can read and change the weights",
    "none": "--insecure: whoever reaches a port of this job can read and change its weights, or stop it",
}
_SURVIVAL = ("max_restarts", "min_workers", "max_workers", "replicas")  # fields of Job that are flags of the same name


def add_job_arguments(
    parser: argparse.ArgumentParser,
    default_workers: int | None = None,
    other_names: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> None:
    """Add the flags that describe a job, which `launch` and `train` share. `other_names` has more names for some."""

    def names(*own: str) -> tuple[str, ...]:
        return (*own, *other_names.get(own[-1], ()))

    parser.add_argument(
        *names("-n", "--num-workers"),
        dest="num_workers",
        type=int,
        required=default_workers is None,
        default=default_workers,
        help="number of workers",
    )
    parser.add_argument(
        *names("-s", "--num-servers"),
        dest="num_servers",
        type=int,
        help="number of servers (default: as many as workers)",
    )
    parser.add_argument(
        "--launcher",
        default="local",
        help=f"how to start processes: {', '.join(LAUNCHERS)}, or package.module:NAME for your own (default: local)",
    )
    parser.add_argument(
        *names("-H", "--hostfile"),
        dest="hostfile",
        help="file with one host per line: host, host slots=2 or user@host:port",
    )
    parser.add_argument("-i", "--interface", help="network interface (default: DMLC_INTERFACE, or the one that fits)")
    parser.add_argument(
        *names("--sync-dst-dir"), dest="sync_dst_dir", help="copy this folder to that path on every host, and run there"
    )
    for flag, whom in (("--env", "all processes"), ("--env-worker", "workers"), ("--env-server", "servers")):
        parser.add_argument(
            flag,
            action="append",
            default=[],
            metavar="NAME[=VALUE]",
            help=f"set a variable for {whom}, or pass this shell's value on; can be given several times",
        )
    parser.add_argument("--dry-run", action="store_true", help="print what would be started where, and start nothing")
    parser.add_argument("--transport", help="auto, shm or tcp (default: ECHELON_TRANSPORT, or auto)")
    add_security_arguments(parser)
    parser.add_argument(
        "--stall-seconds",
        type=float,
        help="interval of reports on what a process waits for (default: ECHELON_STALL_SECONDS, or 10)",
    )

    add_survival_arguments(parser)
    add_dash_flag(parser)
    for launcher in LAUNCHERS.values():
        launcher.add_arguments(parser.add_argument_group(f"--launcher {launcher.name}"))


def add_security_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that give up protection."""
    security = parser.add_mutually_exclusive_group()
    security.add_argument(
        "--no-encryption",
        action="store_const",
        const="proof",
        dest="security",
        help="processes prove that they belong to the job, but send plain messages (default: TLS between machines)",
    )
    security.add_argument(
        "--insecure",
        action="store_const",
        const="none",
        dest="security",
        help="whoever reaches a port of the job can read and change its weights (default: processes prove a secret)",
    )


def add_survival_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say which losses of processes a job survives."""
    add = parser.add_argument
    add(
        "--max-restarts",
        type=int,
        metavar="N",
        help="how often each process is started again after it failed (default: ECHELON_MAX_RESTARTS, or 3)",
    )
    add(
        "--min-workers",
        type=int,
        metavar="N",
        help="stop the job when fewer workers are alive (default: ECHELON_MIN_WORKERS, or 1)",
    )
    add(
        "--max-workers",
        type=int,
        metavar="N",
        help="let workers join the running job, up to N, with 'echelon join' (default: ECHELON_MAX_WORKERS, or -n)",
    )
    add(
        "--replicas",
        type=int,
        metavar="N",
        help="1: two servers have every update, so that losing one loses nothing (default: ECHELON_REPLICAS, or 0)",
    )


def warn(text: str) -> None:
    """Print a warning."""
    print(f"echelon: warning: {text}", file=sys.stderr, flush=True)


def launcher_of(name: str) -> Launcher:
    """Return the launcher of a name, or a user's own, `package.module:NAME`."""
    if name in LAUNCHERS:
        return LAUNCHERS[name]
    if ":" not in name:
        raise unknown_name("launcher", name, LAUNCHERS, "name one of your own as package.module:NAME")
    module, _, attribute = import_paths("--launcher", name).partition(":")
    try:
        launcher: Launcher = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"--launcher {name} cannot be loaded: {error}") from error
    return launcher() if isinstance(launcher, type) else launcher


def warn_if_no_restarts(options: argparse.Namespace, launcher: Launcher) -> None:
    """Warn about --max-restarts if the launcher cannot restart single processes."""
    if options.max_restarts and (why := getattr(launcher, "no_restarts", None)):
        warn(f"--max-restarts has no effect with --launcher {launcher.name}: {why}")


def request_from(options: argparse.Namespace, job: Job, command: Sequence[str]) -> Request:
    """Return what the flags ask a launcher for."""
    return Request(
        job,
        command,
        hosts=read_hosts(options.hostfile) if options.hostfile else (),
        variables=request_variables("--env", options.env),
        variables_of={
            WORKER: request_variables("--env-worker", options.env_worker),
            SERVER: request_variables("--env-server", options.env_server),
        },
        sync_dst_dir=options.sync_dst_dir,
        options=vars(options),
    )


def request_variables(flag: str, given: Sequence[str]) -> dict[str, str]:
    """Return variables of `NAME=VALUE`, of MXNet's `NAME:VALUE`, or of `NAME`, which takes this process's value."""
    variables = {}
    for text in given:
        found = _VARIABLE.fullmatch(text)
        if found is None:
            raise UsageError(f"{flag} {text!r}: write NAME=VALUE, or NAME for the value it has in this shell")
        name, value = found["name"], found["value"]
        if value is None:
            value = variable(name)
            if value is None:
                raise UsageError(f"{flag} {name}: this shell has no such variable; write {flag} {name}=VALUE")
        variables[name] = value
    return variables


def survival_from(options: argparse.Namespace, environment: Job) -> dict[str, Any]:
    """Return the fields of a job that `add_survival_arguments` has flags for; those not given are the environment's."""
    given = {name: getattr(options, name) for name in _SURVIVAL}
    return {name: getattr(environment, name) if value is None else value for name, value in given.items()}


def job_from(options: argparse.Namespace, **more: object) -> Job:
    """Return the job that the flags and the environment describe."""
    servers = options.num_workers if options.num_servers is None else options.num_servers
    environment = Job.from_environment()
    transport = options.transport or environment.transport
    check_name(transport)  # raises for an unknown transport, here and not in every process
    stall_seconds = environment.stall_seconds if options.stall_seconds is None else options.stall_seconds
    if not 0 < stall_seconds < math.inf:
        raise UsageError(f"--stall-seconds must be above 0 and finite, not {stall_seconds:g}")
    security = options.security or environment.security
    if security in GIVEN_UP:
        warn(GIVEN_UP[security])
    return Job(
        num_workers=options.num_workers,
        num_servers=servers,
        interface=options.interface or environment.interface,
        host=environment.host,
        verbose=environment.verbose,
        timeout_s=environment.timeout_s,
        heartbeat_timeout_s=environment.heartbeat_timeout_s,
        transport=transport,
        stall_seconds=stall_seconds,
        **survival_from(options, environment),
        security=security,
        credentials=environment.credentials,
        credentials_file=environment.credentials_file,
        **more,  # type: ignore[arg-type]
    )


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Add the `launch` command."""
    parser = subparsers.add_parser(
        "launch",
        help="run any command as the workers of a job",
        description=__doc__,
    )
    parser.advice = "the command's own flags come after it, as in: echelon launch -n 2 python train.py --lr 0.1"
    add_launch_arguments(parser)
    parser.set_defaults(run=run)


def add_launch_arguments(
    parser: argparse.ArgumentParser, other_names: Mapping[str, Sequence[str]] = MappingProxyType({})
) -> None:
    """Add the flags of `launch`, and the command, at which they end."""
    add_job_arguments(parser, other_names=other_names)
    parser.add_argument("--staleness", type=int, help="staleness bound of dist_ssync and dist_gsync")
    parser.add_argument("--groups", help="groups of dist_gsync: a groups file, or ranks as in 0,1,2/3")
    parser.add_argument(
        "--data-sharding", help="file with every worker's part of the data, for a command with --data-allocator 1"
    )
    parser.add_argument(
        "--run-dir", help="folder for events.jsonl (default: none, or a new one under runs with --dash)"
    )
    parser.add_argument(
        "--allow-optimizer",
        action="append",
        default=[],
        metavar="PACKAGE.MODULE:CLASS",
        help="an optimizer class of your own that the servers may import and run; can be given several times",
    )
    parser.add_argument("program", nargs=argparse.REMAINDER, metavar="command …", help="the command of every worker")


def run(options: argparse.Namespace) -> int:
    """Start the job and wait for it."""
    program = options.program[1:] if options.program[:1] == ["--"] else options.program
    if not program:
        raise UsageError("no command to launch; give it last, for example: echelon launch -n 2 -s 2 python train.py")
    job = job_from(
        options,
        staleness=options.staleness,
        groups=options.groups,
        data_sharding=options.data_sharding,
        run_dir=options.run_dir,
        allow_optimizers=_allowed(options.allow_optimizer),
    )
    launcher = launcher_of(options.launcher)
    warn_if_no_restarts(options, launcher)
    command = command_of(program) if launcher.name in ("local", "inproc") else command_on_hosts(program)
    plan = launcher.plan(request_from(options, job, command))
    _check_settings(job)
    plan = _with_files(plan)
    if options.dry_run:
        print(launcher.describe(plan))
        return 0
    listener = listener_from(options.dash)
    if listener is None:
        return launcher.run(protect(plan), Output())
    folder = Path(job.run_dir or new_run(None, "launch")).absolute()
    with live_page(listener, folder):
        return launcher.run(protect(_with_events_in(plan, folder)), Output())


def _with_events_in(plan: Plan, folder: Path) -> Plan:
    """Return the plan of a job that writes events to a folder, which all hosts must share with this machine."""
    plan = plan.with_settings(run_dir=str(folder))
    return replace(plan, request=replace(plan.request, shared_folder=str(folder)))


def _allowed(given: Sequence[str]) -> str | None:
    """Return the optimizers that the flags or else the environment allow."""
    if not given:
        return Job.from_environment().allow_optimizers
    return ",".join(import_paths("--allow-optimizer", path) for path in given)


def command_of(program: Sequence[str]) -> list[str]:
    """Return the command that every worker runs: a Python file that cannot be executed is run by this Python.

    Raises UsageError for a program that does not exist, once and not in every worker.
    """
    name = program[0]
    if _needs_python(name):
        return [sys.executable, *program]
    if shutil.which(name) is not None:
        return list(program)
    if Path(name).exists():
        raise UsageError(f"{name} is not a program: it is a folder, or not executable; put its interpreter before it")
    raise UsageError(f"there is no program {name!r}, neither here nor in a folder of PATH; check its name")


def command_on_hosts(program: Sequence[str]) -> list[str]:
    """Return the same for other machines. They may have programs that this one does not have, and another Python."""
    return ["python", *program] if _needs_python(program[0]) else list(program)


def _needs_python(name: str) -> bool:
    """Return whether a program is a Python file that the system cannot run, or that names no interpreter."""
    if not name.endswith(".py"):
        return False
    found = shutil.which(name)
    if found is None:
        return Path(name).is_file()
    with open(found, "rb") as file:
        return file.read(2) != b"#!"


def _with_files(plan: Plan) -> Plan:
    """Return the plan with the content of its groups and data_sharding files, which need not be on the hosts."""
    job, settings = plan.job, {}
    if job.groups:
        settings["groups"] = groups_text(read_groups(job.groups, plan.worker_hosts()))
    if job.data_sharding:
        settings["data_sharding"] = shares_text(read_shares(job.data_sharding, job.num_workers))
    return plan.with_settings(**settings)


def _check_settings(job: Job) -> None:
    """Report mistakes once, before any process is started, instead of once in every process."""
    if job.staleness is not None and job.staleness < 0:
        raise UsageError(f"--staleness must be 0 or more, not {job.staleness}")
    if job.run_dir:
        try:
            Path(job.run_dir).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"--run-dir {job.run_dir} cannot be created: {error.strerror}; give a writable folder"
            ) from error
        if not os.access(job.run_dir, os.W_OK | os.X_OK):
            raise UsageError(f"--run-dir {job.run_dir} is not writable; give a writable folder")
