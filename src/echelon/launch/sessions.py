"""What the kernel knows of a session of processes: whether anybody in it is at work."""

from __future__ import annotations

import os
from pathlib import Path

_SESSION = 3  # of /proc/<pid>/stat, counted behind the command's name, which may have spaces and brackets
_TIMES = slice(11, 15)  # in the process and in children that it has waited for, as a user and in the kernel


def work_done(session: int) -> int:
    """Processor time that the living processes of a session have used, in the kernel's ticks."""
    found = (_fields(int(name)) for name in os.listdir("/proc") if name.isdecimal())
    return sum(sum(map(int, fields[_TIMES])) for fields in found if fields and int(fields[_SESSION]) == session)


def _fields(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []  # it has just ended
