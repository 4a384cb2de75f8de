"""How an uncaught JobError is printed: as one line, because its cause is in another process.

The traceback of a worker that cannot continue would hide that of the process that failed. The line names the place in
the user's program, which shows what this worker waited for.

A worker that `echelon join` has started, and that does not fit to the job, is refused in one line, too. It ends with
status 2, with which its launcher does not start it again.
"""

from __future__ import annotations

import site
import sys
import sysconfig
import traceback
from pathlib import Path
from types import TracebackType

from echelon.errors import USAGE, JobError, JoinRefused, UsageError

_LIBRARIES = (str(Path(__file__).parents[1]), sysconfig.get_path("stdlib"), *site.getsitepackages())


PRINTED: list[str] = []  # the errors of this process that were printed in one line


def print_job_errors_in_one_line(*, joins: bool = False) -> None:
    """Change `sys.excepthook` for JobError. Call it after torch.distributed has started, which labels its lines.

    `joins`: this worker joins a running job, which refuses it with a UsageError or JoinRefused.
    """
    before = sys.excepthook
    if getattr(before, "is_for_job_errors", False):
        return

    def print_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        is_refused = joins and isinstance(error, UsageError | JoinRefused)
        if not (isinstance(error, JobError) or is_refused):
            before(kind, error, trace)
            return
        PRINTED.append(str(error))
        print(f"error: {error}{_place(trace)}", file=sys.stderr, flush=True)
        if is_refused:
            sys.exit(USAGE)

    print_error.is_for_job_errors = True  # type: ignore[attr-defined]
    sys.excepthook = print_error


def _place(trace: TracebackType | None) -> str:
    """Return the innermost line of a traceback that is not in a library."""
    own = [frame for frame in traceback.extract_tb(trace) if not frame.filename.startswith(_LIBRARIES)]
    return f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""
