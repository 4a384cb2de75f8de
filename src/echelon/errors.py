"""The errors that Echelon raises. Their types say where the fault is: in a call, in a file, or in the job.

Every message says what failed, both values where two disagree, where (role, rank, key), and what to do next.
"""

from __future__ import annotations


class EchelonError(Exception):
    """The base class of all errors that Echelon raises."""


class UsageError(EchelonError, ValueError):
    """The caller gave an invalid name, flag, file or shape. Nothing was changed."""


class DataError(EchelonError):
    """A file is missing, truncated or corrupt. The message names the file and the position in it."""


class JobError(EchelonError, RuntimeError):
    """The job of this process failed: another process died, a timeout passed, or the scheduler disconnected."""
