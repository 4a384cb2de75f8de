"""The interface of a launcher: it plans a job, shows the plan, and runs it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from echelon.launch.plan import Plan, Request
from echelon.launch.supervision.children import OnLine, print_line


@dataclass(frozen=True)
class Output:
    """What a launcher tells its caller while a job runs.

    `on_line` gets every line of a process, and `on_tick` is called several times per second. `shown`: the user sees all
    lines of the workers, so an error does not repeat the last ones.
    """

    on_line: OnLine = print_line
    on_tick: Callable[[], None] = lambda: None
    shown: bool = False


class Launcher(Protocol):
    """Starts a planned job somewhere and waits for its end.

    One that cannot restart single processes has an attribute `no_restarts`, which says why.
    """

    name: str

    def add_arguments(self, group: argparse._ArgumentGroup) -> None:
        """Add the launcher's own flags. Each begins with the launcher's name, as in --slurm-partition."""
        ...

    def plan(self, request: Request) -> Plan:
        """Return the plan of a job. Raises UsageError for what cannot work, before anything starts."""
        ...

    def describe(self, plan: Plan) -> str:
        """Return what `--dry-run` prints: what would be started or submitted, without secrets."""
        ...

    def run(self, plan: Plan, output: Output) -> int:
        """Run a job to its end, and return 0, the first failing exit status, or 128 + the number of a signal."""
        ...
