"""The machine and the software that figures depend on, for the records of runs and benchmarks. No host name."""

from __future__ import annotations

import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path

from echelon.system import PACKAGE, machine_memory, usable_cores

_NOT_CODE = (":!benchmarks/results", ":!docs", ":!*.md")


def machine() -> dict[str, object]:
    """Return the properties of this machine and its software that figures depend on."""
    return {
        "cpu": _cpu_model(),
        "cores": usable_cores(),
        "memory_gib": round(machine_memory() / 2**30, 1),
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": version("torch"),
    }


def own_version() -> str:
    """Return the version of Echelon; "unknown" if it runs from a copy that was not installed."""
    try:
        return version("echelon")
    except PackageNotFoundError:
        return "unknown"


def command_line(words: Sequence[str] | None = None) -> str:
    """Return the command line of this process as a user types it, without folders of programs.

    The values of `--env` are left out, because they may be secret.
    """
    words = words or sys.argv
    shown = _program(words[0], sys.orig_argv)
    for before, word in pairwise(words):
        is_variable = before.startswith("--env") or word.startswith("--env=")
        _, equals, value = word.removeprefix("--env=").partition("=")
        shown.append(word.removesuffix(value) + "…" if is_variable and equals and value else word)
    return shlex.join(shown)


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
    if _git(PACKAGE, "ls-files", "--error-unmatch", "__init__.py") is None:
        return "unknown"  # an installed copy may lie inside another project's repository
    root = _git(PACKAGE, "rev-parse", "--show-toplevel") or "."
    changed = _git(Path(root), "status", "--porcelain", "--untracked-files=no", "--", ".", *_NOT_CODE)
    found = _git(PACKAGE, "rev-parse", "HEAD")
    return f"{found}-dirty" if found and changed else found or "unknown"


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        field, _, value = line.partition(":")
        if field.strip() == "model name":
            return value.strip()
    return platform.machine()
