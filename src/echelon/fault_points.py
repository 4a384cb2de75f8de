"""The points at which tests make a process fail. Without ECHELON_FAULTS a point does nothing and costs a function call.

    fault_point("server.applied", clock=7)

| point | reached |
|---|---|
| worker.push, worker.sent, worker.pushed | before a push, after its message to one of the servers, after all of them |
| server.push, server.applied | a push has arrived; its round was applied, and no answer has been sent |
| server.writing | one more part of some weights was updated or written to workers, without a clock |
| scheduler.MESSAGE | the scheduler has received such a message and not acted on it |
| file.write, file.sync, file.renamed | `atomic_file` opens a file, writes it to the disk, has given it its name |
| events.write | a batch of events is written |
| send.MESSAGE, receive.MESSAGE, answer.REQUEST, wait.REQUEST | messages on the way (`transport/faulty.py`) |
"""

from __future__ import annotations

import os
from pathlib import Path

from echelon.errors import UsageError
from echelon.faults import FILE_NAME, Faults, parse

ACTIVE: Faults | None = None  # of this process
_configured = ""  # the value of ECHELON_FAULTS that ACTIVE was made from


def fault_point(point: str, clock: int | None = None, path: str | os.PathLike[str] = "") -> None:
    """Fail here, if a test asks for it."""
    if ACTIVE is not None:
        ACTIVE.reach(point, clock, os.fspath(path))


def configure(text: str, run_dir: str | None, role: str, rank: int | None, restarts: int = 0) -> None:
    """Let this process have the faults of ECHELON_FAULTS. With the same text again, only set role and rank."""
    global ACTIVE, _configured
    if text != _configured:
        if text and not run_dir:
            raise UsageError(f"ECHELON_FAULTS needs ECHELON_RUN_DIR: the folder where {FILE_NAME} records each fault")
        ACTIVE = Faults(parse(text), Path(run_dir or "") / FILE_NAME, role, rank, restarts=restarts) if text else None
        _configured = text
    identify(role, rank)


def identify(role: str, rank: int | None) -> None:
    """Set the role of this process, and its rank once the scheduler has assigned it."""
    if ACTIVE is not None:
        ACTIVE.role = role
        ACTIVE.rank = ACTIVE.rank if rank is None else rank
