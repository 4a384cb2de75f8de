"""What all commands of `echelon data` share: how they end, and how they report bad records.

Results go to standard output, bad records and progress to standard error. A command returns 0, or 1 if `verify` found a
bad record; other faults are raised as errors.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable
from typing import TypeAlias

from echelon.data.pack.im2rec import ImageError
from echelon.data.records import RecordError
from echelon.errors import DataError
from echelon.system import raised_by_sigterm

Run: TypeAlias = Callable[[argparse.Namespace], int]
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

_NUM_SHOWN = 10


class _Terminated(BaseException):
    """SIGTERM was received. As with KeyboardInterrupt, only clean-up code should catch it."""


def add_command(
    commands: Commands, name: str, run: Run, about: str, *, skips_bad_records: bool = True
) -> argparse.ArgumentParser:
    """Add a command whose `run` is wrapped: SIGTERM and errors of the system end it without a traceback."""

    def guarded(args: argparse.Namespace) -> int:
        try:
            with raised_by_sigterm(_Terminated):
                return run(args)
        except _Terminated:
            print("echelon: stopped by SIGTERM", file=sys.stderr)
            return 128 + signal.SIGTERM
        except (RecordError, ImageError) as error:
            raise DataError(f"{error}; use --skip-bad-records to leave bad ones out") from error
        except BrokenPipeError:  # `main` ends silently
            raise
        except OSError as error:  # for example a full disk or missing permissions
            raise DataError(f"echelon data {name}: {error}") from error

    command = commands.add_parser(name, help=about, description=about[0].upper() + about[1:] + ".")
    command.set_defaults(run=guarded)
    if skips_bad_records:
        command.add_argument(
            "--skip-bad-records", action="store_true", help="count and report bad records instead of failing"
        )
    return command


class BadRecords:
    """Counts bad records for --skip-bad-records and prints the first few."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.count = 0
        self.handler: Callable[[DataError], None] | None = self._count if args.skip_bad_records else None

    def _count(self, fault: DataError) -> None:
        self.count += 1
        if self.count <= _NUM_SHOWN:
            print(f"bad: {fault}", file=sys.stderr)

    def summary(self) -> str:
        """Return the text to append to a result line."""
        return f", {self.count} bad skipped" if self.count else ""
