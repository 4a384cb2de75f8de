"""`echelon report`: what logs and run folders say. One module per command; each imports what it needs when it runs."""

from __future__ import annotations

import argparse
import importlib

COMMANDS = {  # the command, and its module in this package
    "html": "html",
    "plots": "plots",
    "parse-log": "parse_log",
    "tables": "tables",
}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `report` and its commands."""
    about = "Tables and pages from the logs and the run folders of trainings."
    parser = subparsers.add_parser("report", help="read logs and runs: tables and pages", description=about)
    commands = parser.add_subparsers(dest="report_command", metavar="COMMAND", required=True)
    for name, module in COMMANDS.items():
        importlib.import_module(f"echelon.cli.report.{module}").add_parser(commands, name)
