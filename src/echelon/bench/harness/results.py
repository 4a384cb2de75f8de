"""The result of a benchmark: a table on the terminal and a JSON file under `benchmarks/results/`.

A result file records the command, the commit and the machine, because figures are not comparable without them. It does
not contain the host name.
"""

from __future__ import annotations

import json
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from echelon.atomic_file import AtomicFile
from echelon.bench.harness.turns import Case, ratios
from echelon.system import usable_cores


def write_result(path: Path, body: Mapping[str, object], command: str | None = None) -> None:
    """Write a result file atomically: command, commit, machine and date, then `body`."""
    stamped = {
        "command": command or command_line(),
        "commit": commit(),
        "machine": machine(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **body,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with AtomicFile(path) as file:
        file.stream.write((json.dumps(stamped, indent=2) + "\n").encode())


def figures(cases: Sequence[Case]) -> dict[str, object]:
    """Return cases and ratios in the form of a result file."""
    against_first = ratios(cases)
    return {
        "cases": [asdict(case) for case in cases],
        "ratios": {ratio.name: ratio.value for ratio in against_first},
        "ratio_spread": {
            ratio.name: {"low": ratio.low, "high": ratio.high, "rounds": ratio.rounds} for ratio in against_first
        },
    }


def command_line() -> str:
    """Return the command line of this process, without the folder of the program."""
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])


def commit() -> str:
    """Return the commit of the running code, with `-dirty` if tracked files differ; "unknown" outside a checkout."""
    here = Path(__file__)
    if _git(here.parent, "ls-files", "--error-unmatch", here.name) is None:
        return "unknown"  # an installed copy may lie inside another project's repository
    describe = _git(here.parent, "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*")
    return describe or "unknown"


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def machine() -> dict[str, object]:
    """Return the properties of this machine and its software that the figures depend on."""
    return {
        "cpu": _cpu_model(),
        "cores": usable_cores(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": version("torch"),
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        field, _, value = line.partition(":")
        if field.strip() == "model name":
            return value.strip()
    return platform.machine()


def print_times(title: str, cases: Sequence[Case]) -> None:
    """Print the median and spread of each contender's step times, then the ratios."""

    def cells(case: Case) -> list[str]:
        times = [f"{value:.3f}" for value in (case.median_ms, case.p10_ms, case.p90_ms)]
        return [*times, str(case.samples)]

    print_cases(title, cases, ("median ms", "p10", "p90", "samples"), cells)
    for ratio in ratios(cases):
        print(f"{ratio.name}: {ratio.value:.2f}")


def print_cases(
    title: str, cases: Sequence[Case], headings: Sequence[str], cells: Callable[[Case], Sequence[str]]
) -> None:
    """Print one row per contender: its name, its cells, and the ratio of the first contender to it."""
    table = Table(title=title, title_justify="left")
    table.add_column("case")
    for heading in (*headings, "ratio", "over rounds"):
        table.add_column(heading, justify="right")
    shown = [("", ""), *((f"{ratio.value:.2f} ×", f"{ratio.low:.2f} – {ratio.high:.2f}") for ratio in ratios(cases))]
    for case, compared in zip(cases, shown, strict=True):
        table.add_row(case.name, *cells(case), *compared)
    Console().print(table)
