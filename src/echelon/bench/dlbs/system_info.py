"""What is recorded of a machine under `hw.*`: always its CPU, memory and software, and more by `exp.sys_info`.

The sources are those of DLBS. A program that is not installed gives a text that says so, because a benchmark should not
fail for want of a description.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from echelon.errors import UsageError, unknown_name
from echelon.observe.machine import machine

_COMMANDS = {
    "lscpu": ["lscpu"],
    "nvidiasmi": ["nvidia-smi", "-q"],
    "inxi": ["inxi", "-Fbfrlp"],
    "dmi": ["dmidecode"],
}
_FILES = {"cpuinfo": Path("/proc/cpuinfo"), "meminfo": Path("/proc/meminfo")}
SOURCES = (*_FILES, *_COMMANDS)
_TIMEOUT_S = 30


def system_info(sources: Iterable[str]) -> dict[str, Any]:
    """Return the description of this machine as `hw.*`."""
    found: dict[str, Any] = {f"hw.{key}": value for key, value in machine().items()}
    for source in sources:
        text = _read(source)
        found[f"hw.{source}"] = parse_fields(text) or text.strip()
    return found


def check_sources(text: str, where: str) -> list[str]:
    """Return the sources of a text with commas; raises UsageError for an unknown one."""
    sources = [word.strip() for word in text.split(",") if word.strip()]
    for source in sources:
        if source not in SOURCES:
            raise UsageError(f"{where}: {unknown_name('source of exp.sys_info', source, SOURCES)}")
    return sources


def parse_fields(text: str) -> dict[str, str]:
    """Return the fields of lines `name: value`. Of repeated blocks, such as the cores of cpuinfo, the first counts."""
    fields: dict[str, str] = {}
    for line in text.splitlines():
        name, colon, value = line.partition(":")
        if colon and name.strip() and value.strip():
            fields.setdefault(name.strip(), value.strip())
    return fields


def _read(source: str) -> str:
    if source in _FILES:
        return _FILES[source].read_text(encoding="utf-8", errors="replace")
    command = _COMMANDS[source]
    if shutil.which(command[0]) is None:
        return f"{command[0]} is not installed"
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{command[0]} failed ({error})"
    return done.stdout or done.stderr
