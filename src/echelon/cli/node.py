"""`echelon node`: run this machine's part of a job, when every machine is started by hand.

On two machines: `echelon node 0 --num-nodes 2 --rendezvous eth0:10.0.0.1:29500 -- python train.py` on 10.0.0.1, and the
same with `node 1` on the other one. Every node runs one worker and one server, and node 0 also the scheduler. All nodes
need the same credentials: copy ~/.config/echelon/credentials of one node to the others once, unless they share the home
folder.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from echelon.cli.launch import add_survival_arguments, command_of, request_variables, survival_from
from echelon.errors import UsageError
from echelon.launch.interface import Output
from echelon.launch.node import EXAMPLE, Rendezvous, node_job, node_plan, parse_rendezvous, run_node
from echelon.launch.plan import Request, describe
from echelon.train.flags.parser import Parser


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Add the `node` command."""
    parser = subparsers.add_parser("node", help="run this machine's part of a job", description=__doc__)
    parser.add_argument("rank", type=int, metavar="RANK", help="the number of this node, from 0")
    parser.add_argument("--num-nodes", type=int, help="number of nodes")
    parser.add_argument("--rendezvous", metavar="[INTERFACE:]IP:PORT", help=f"the address of node 0: {EXAMPLE}")
    parser.add_argument("--servers-per-node", type=int, default=1, help="0: for stores without servers")
    parser.add_argument("--run-dir", help="folder for events.jsonl")
    parser.add_argument(
        "--env", action="append", default=[], metavar="NAME[=VALUE]", help="set a variable for all processes"
    )
    parser.add_argument("--dry-run", action="store_true", help="print what would be started, and start nothing")
    add_survival_arguments(parser)
    parser.advice = "the command of the worker comes after --, as in: echelon node 0 … -- python train.py --lr 0.1"
    take_command(parser, "echelon node RANK [flags] -- command …")
    parser.set_defaults(run=run)


def take_command(parser: Parser, usage: str) -> None:
    """Let `--` end the flags. A positional argument for the command would also take the flags after the first one."""
    parse = parser.parse_known_args

    def parse_until_dashes(args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        end = args.index("--") if "--" in args else len(args)
        given, unknown = parse(args[:end], namespace)
        given.program = args[end + 1 :]
        return given, unknown

    parser.usage = usage
    parser.parse_known_args = parse_until_dashes  # type: ignore[method-assign]


def run(options: argparse.Namespace) -> int:
    """Run the processes of this node."""
    num_nodes, rendezvous, command = _from_flags(options)
    if num_nodes < 1 or options.servers_per_node < 0:
        raise UsageError(
            f"a job needs at least one node and no negative number of servers, not {num_nodes} and "
            f"{options.servers_per_node}"
        )
    job = node_job(num_nodes, num_nodes * options.servers_per_node, options.run_dir)
    request = Request(
        replace(job, **survival_from(options, job)),
        command,
        variables=request_variables("--env", options.env),
    )
    plan = node_plan(request, options.rank, rendezvous)
    if options.dry_run:
        print(describe(plan))
        return 0
    return run_node(plan, rendezvous, Output())


def _from_flags(options: argparse.Namespace) -> tuple[int, Rendezvous, list[str]]:
    program = options.program
    if options.num_nodes is None or options.rendezvous is None or not program:
        raise UsageError(
            "echelon node needs --num-nodes, --rendezvous and a command, as in: echelon node 0 --num-nodes 2 "
            "--rendezvous eth0:10.0.0.1:29500 -- python train.py; 'echelon bench run' reads a config.json of DLBS"
        )
    return options.num_nodes, parse_rendezvous(options.rendezvous), command_of(program)
