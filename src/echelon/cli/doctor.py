"""`echelon doctor -H hosts`: what would go wrong if a job started on these hosts, and how to mend it."""

from __future__ import annotations

import argparse

from rich.console import Console

from echelon.doctor.diagnose import diagnose, table
from echelon.doctor.examine import examine
from echelon.environment import Job
from echelon.launch import LAUNCHERS
from echelon.launch.hosts import read_hosts
from echelon.launch.plan import Request
from echelon.train.flags.parser import Parser


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Add the `doctor` command."""
    parser = subparsers.add_parser("doctor", help="check the hosts of a job before it starts", description=__doc__)
    parser.add_argument("-H", "--hostfile", required=True, help="file with the hosts of the job, one per line")
    parser.add_argument("-i", "--interface", help="network interface of the job (default: DMLC_INTERFACE)")
    parser.add_argument("--sync-dst-dir", help="the folder that the launcher will copy this one to, on every host")
    parser.add_argument("--port", type=int, help="a port that the job needs on the first host, such as 29500")
    LAUNCHERS["ssh"].add_arguments(parser.add_argument_group("ssh"))
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print what was found out, and return 1 if a job could not run."""
    request = Request(
        Job(interface=options.interface or Job.from_environment().interface),
        [],
        hosts=read_hosts(options.hostfile),
        sync_dst_dir=options.sync_dst_dir,
        options=vars(options),
    )
    with Console(stderr=True).status("") as status:
        found = examine(request, options.port, status.update)
    findings = diagnose(found)
    print("\n".join([*table(found), *map(str, findings)]))
    errors = sum(finding.fatal for finding in findings)
    warnings = len(findings) - errors
    counts = f"{_count(errors, 'error')}, {_count(warnings, 'warning')}"
    print(counts if findings else "no problems found")
    return 1 if errors else 0


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
