"""`echelon join`: start workers that join a running job, as in `echelon join 10.0.0.1:4711 -n 2 -- python train.py`.

The job must have been started with --max-workers; its launcher prints this command. The file with the job's credentials
is on the launcher's machine: copy it to this one, or share it.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from echelon.cli.launch import GIVEN_UP, add_security_arguments, command_of, warn
from echelon.cli.node import take_command
from echelon.environment import Job
from echelon.errors import UsageError
from echelon.launch.interface import Output
from echelon.launch.join import join_plan, parse_address, run_join
from echelon.train.flags.parser import Parser


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Add the `join` command."""
    parser = subparsers.add_parser("join", help="start workers that join a running job", description=__doc__)
    add = parser.add_argument
    add("address", metavar="HOST:PORT", help="the address of the job's scheduler")
    add("-n", "--num-workers", type=int, default=1, help="number of workers that join (default: 1)")
    add("--credentials-file", help="file with the secret of the job (default: ECHELON_CREDENTIALS_FILE, or your own)")
    add("--job-workers", type=int, default=1, help="number of workers that the job was started with (default: 1)")
    add("--job-servers", type=int, default=1, help="number of servers of the job (default: 1)")
    add("--run-dir", help="folder for events.jsonl, which must be that of the job (default: none)")
    add("--max-restarts", type=int, help="how often each worker is restarted (default: ECHELON_MAX_RESTARTS, or 3)")
    add_security_arguments(parser)
    parser.advice = "the command of the workers comes after --, as in: echelon join HOST:PORT -- python train.py"
    take_command(parser, "echelon join HOST:PORT [flags] -- command …")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the workers until they have ended."""
    if not options.program:
        raise UsageError("no command to run; give it last, as in: echelon join HOST:PORT -- python train.py")
    if options.job_workers < 1 or options.job_servers < 1:
        raise UsageError(
            f"--job-workers and --job-servers must be 1 or more, not {options.job_workers} and {options.job_servers}"
        )
    environment = Job.from_environment()
    security = options.security or environment.security
    if security in GIVEN_UP:
        warn(GIVEN_UP[security])
    job = replace(
        environment,
        num_workers=options.job_workers,
        num_servers=options.job_servers,
        run_dir=options.run_dir or environment.run_dir,
        max_restarts=environment.max_restarts if options.max_restarts is None else options.max_restarts,
        security=security,
        credentials=None if options.credentials_file else environment.credentials,
        credentials_file=options.credentials_file or environment.credentials_file,
    )
    plan = join_plan(job, parse_address(options.address), command_of(options.program), options.num_workers)
    return run_join(plan, Output())
