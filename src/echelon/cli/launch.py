"""`echelon launch -n 2 -s 2 --launcher local python train.py …`"""

from __future__ import annotations

import argparse

from echelon.environment import Job
from echelon.errors import UsageError
from echelon.launch import local
from echelon.transport import by_name

LAUNCHERS = ("local",)


def add_job_arguments(parser: argparse.ArgumentParser, default_workers: int | None = None) -> None:
    """What describes a job, shared by `launch` and `train`."""
    required = default_workers is None
    parser.add_argument("-n", "--num-workers", type=int, required=required, default=default_workers, help="workers")
    parser.add_argument("-s", "--num-servers", type=int, help="servers to start (default: as many as workers)")
    parser.add_argument("--launcher", default="local", help=f"how to start processes: {', '.join(LAUNCHERS)}")
    parser.add_argument("-i", "--interface", help="network interface to use (DMLC_INTERFACE)")
    parser.add_argument("--transport", default="auto", help="auto, shm or tcp")
    parser.add_argument("--stall-seconds", type=float, default=10.0, help="report who is waited for after this long")


def job_from(options: argparse.Namespace, **more: object) -> Job:
    """The job that the arguments describe."""
    if options.launcher not in LAUNCHERS:
        raise UsageError(f"there is no launcher {options.launcher!r}; there is {', '.join(LAUNCHERS)}")
    by_name(options.transport)  # an unknown one is an error here, not in every process
    servers = options.num_workers if options.num_servers is None else options.num_servers
    told = Job.from_environment()
    return Job(
        num_workers=options.num_workers,
        num_servers=servers,
        interface=options.interface or told.interface,
        verbose=told.verbose,
        timeout_s=told.timeout_s,
        heartbeat_timeout_s=told.heartbeat_timeout_s,
        transport=options.transport,
        stall_seconds=options.stall_seconds,
        **more,  # type: ignore[arg-type]
    )


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `launch`."""
    parser = subparsers.add_parser("launch", help="start a job around any command")
    add_job_arguments(parser)
    parser.add_argument("--staleness", type=int, help="bound for dist_ssync and dist_gsync")
    parser.add_argument("--groups", help="groups file for dist_gsync")
    parser.add_argument("--run-dir", help="where to write events.jsonl")
    parser.add_argument("program", nargs=argparse.REMAINDER, metavar="command …", help="what every worker runs")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Start the job and wait for it."""
    program = options.program[1:] if options.program[:1] == ["--"] else options.program
    if not program:
        raise UsageError("no command to launch; write it last, for example: echelon launch -n 2 -s 2 python train.py")
    job = job_from(options, staleness=options.staleness, groups=options.groups, run_dir=options.run_dir)
    return local.run(job, program)
