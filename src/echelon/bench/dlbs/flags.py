"""The flags of `echelon bench run`, `build`, `validate`, `print-config`, `help` and `sysinfo`: those of DLBS."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TypeAlias

Benchmarks: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

LEVELS = ("critical", "error", "warning", "info", "debug")
ACTIONS = {
    "run": "run the experiments of a DLBS configuration",
    "build": "print the experiments of a configuration, or write them to --plan",
    "validate": "check all experiments of a configuration, and run none",
    "print-config": "print a configuration with its defaults and the flags",
}


def add_harness(benchmarks: Benchmarks) -> None:
    """Add the actions of the harness beside the other benchmarks."""
    for action, summary in ACTIONS.items():
        parser = benchmarks.add_parser(action, help=summary)
        _add_config(parser)
        if action in ("run", "build"):
            text = "run the experiments of this file" if action == "run" else "write the experiments to this file"
            parser.add_argument("--plan", type=Path, metavar="FILE", help=text)
        if action == "run":
            _add_run(parser)
        _finish(parser, action)
    parser = benchmarks.add_parser("help", help="list the parameters of configurations")
    parser.add_argument("words", nargs="*", metavar="WORD", help="only parameters with this word in key or description")
    _finish(parser, "help")
    parser = benchmarks.add_parser("sysinfo", help="print what is recorded of this machine (hw.*)")
    parser.add_argument("--sources", default="", help="as exp.sys_info (default: all)")
    _finish(parser, "sysinfo")


def _add_config(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--config", type=Path, metavar="FILE", help="parameters, variables and extensions as JSON, as in DLBS")
    add(
        *("-P", "--parameter"),
        dest="parameters",
        action="append",
        default=[],
        metavar="KEY=JSON",
        help="""set a parameter: -P exp.num_batches=100, -P 'exp.model="lenet"'""",
    )
    add(
        *("-V", "--variable"),
        dest="variables",
        action="append",
        default=[],
        metavar="KEY=LIST",
        help="sweep over values: -V 'exp.replica_batch=[32,64]'; several give all combinations",
    )
    add(
        *("-E", "--extension"),
        dest="extensions",
        action="append",
        default=[],
        metavar="JSON",
        help='change experiments: {"condition": {…}, "parameters": {…}, "cases": [{…}]}',
    )
    add("--discard-default-config", action="store_true", help="parameters that are not given have no value")
    add("--log-level", choices=LEVELS, default="info", help="debug also shows the lines of the processes")


def _add_run(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--json", type=Path, metavar="FILE", help='write all results to this file, as {"data": [{…}]}')
    add(
        "--progress_file", "--progress-file", type=Path, metavar="FILE", help="keep the state of the sweep in this file"
    )
    add("--no-validation", action="store_true", help="do not check the experiments before the first one starts")


def _finish(parser: argparse.ArgumentParser, action: str) -> None:
    def run(args: argparse.Namespace) -> int:
        start: Callable[[argparse.Namespace], int] = import_module("echelon.bench.dlbs.actions").run
        return start(args)

    parser.set_defaults(run=run, action=action)
