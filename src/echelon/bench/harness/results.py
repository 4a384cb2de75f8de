"""A finished benchmark, written down: the JSON under `benchmarks/results/` and the table on the terminal.

A figure without its command, commit and machine proves nothing, so the file has all three. It names no host.
"""

from __future__ import annotations

import json
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from echelon.bench.harness.alternate import Case, Ratio
from echelon.system import usable_cores


def write_json(
    path: Path,
    cases: Sequence[Case],
    ratios: Sequence[Ratio],
    settings: Mapping[str, object],
    command: str | None = None,
) -> None:
    """Write one result file. `ratios` maps a name to a number; `ratio_spread` has the same over rounds."""
    write_body(path, {"settings": dict(settings), **figures(cases, ratios)}, command)


def figures(cases: Sequence[Case], ratios: Sequence[Ratio]) -> dict[str, object]:
    """Cases and ratios as a result file has them."""
    return {
        "cases": [asdict(case) for case in cases],
        "ratios": {ratio.name: ratio.value for ratio in ratios},
        "ratio_spread": {
            ratio.name: {"low": ratio.low, "high": ratio.high, "rounds": ratio.rounds} for ratio in ratios
        },
    }


def write_body(path: Path, body: Mapping[str, object], command: str | None = None) -> None:
    """Write a result of any shape, with command, commit, machine and date in front; whole or not at all."""
    stamped = {
        "command": command or command_line(),
        "commit": commit(),
        "machine": machine(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **body,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".tmp")
    unfinished.write_text(json.dumps(stamped, indent=2) + "\n", encoding="utf-8")
    unfinished.replace(path)


def command_line() -> str:
    """How this process was started, without the folder of the program."""
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])


def commit() -> str:
    """The commit of the code that runs, with `-dirty` where tracked files differ; "unknown" outside a checkout."""
    here = Path(__file__)
    if _git(here.parent, "ls-files", "--error-unmatch", here.name) is None:
        return "unknown"  # an installed copy inside somebody else's repository is not that repository's commit
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
    """What the figures depend on."""
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


def print_table(title: str, cases: Sequence[Case], ratios: Sequence[Ratio], console: Console | None = None) -> None:
    """Show medians, spread and ratios."""
    table = Table(title=title, title_justify="left")
    table.add_column("case")
    for heading in ("median ms", "p10", "p90", "samples", "ratio", "over rounds"):
        table.add_column(heading, justify="right")
    by_name = {ratio.name: ratio for ratio in ratios}
    for case in cases:
        ratio = by_name.get(f"{cases[0].name}_vs_{case.name}")
        spread = ("", "") if ratio is None else (f"{ratio.value:.2f} ×", f"{ratio.low:.2f} – {ratio.high:.2f}")
        figures = (f"{value:.3f}" for value in (case.median_ms, case.p10_ms, case.p90_ms))
        table.add_row(case.name, *figures, str(case.samples), *spread)
    (console or Console()).print(table)
    for ratio in ratios:
        (console or Console()).print(f"{ratio.name}: {ratio.value:.2f}")
