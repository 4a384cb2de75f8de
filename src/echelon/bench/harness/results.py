"""The result of a benchmark: a table on the terminal and a JSON file under `benchmarks/results/`.

A result file records the command, the commit and the machine, because figures are not comparable without them. It does
not contain the host name.
"""

from __future__ import annotations

import json
import math
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
from echelon.system import PACKAGE, usable_cores

_NOT_CODE = (":!benchmarks/results", ":!docs", ":!*.md")


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
        file.stream.write((json.dumps(_finite(stamped), indent=2, allow_nan=False) + "\n").encode())


def _finite(value: object) -> object:
    """Return the value with None for every infinite or undefined number, which JSON does not have."""
    if isinstance(value, Mapping):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


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
    """Return the command line of this process as a user types it, without the folder of the program."""
    return shlex.join([*_program(sys.argv[0], sys.orig_argv), *sys.argv[1:]])


def _program(script: str, interpreter_words: Sequence[str]) -> list[str]:
    """Return the words that start the program. `python -m echelon` is the `echelon` command."""
    if Path(script).is_relative_to(PACKAGE):
        return ["echelon"]
    if "-m" in interpreter_words[:-1]:
        return ["python", "-m", interpreter_words[interpreter_words.index("-m") + 1]]
    return [Path(script).name]


def commit() -> str:
    """Return the commit of the running code, with `-dirty` if it was changed since; "unknown" outside a checkout.

    A run of several benchmarks changes the results and documents in the checkout, but not the code.
    """
    here = Path(__file__)
    if _git(here.parent, "ls-files", "--error-unmatch", here.name) is None:
        return "unknown"  # an installed copy may lie inside another project's repository
    root = _git(here.parent, "rev-parse", "--show-toplevel") or "."
    changed = _git(Path(root), "status", "--porcelain", "--untracked-files=no", "--", ".", *_NOT_CODE)
    found = _git(here.parent, "rev-parse", "HEAD")
    return f"{found}-dirty" if found and changed else found or "unknown"


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
