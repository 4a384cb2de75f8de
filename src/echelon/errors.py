"""The errors Echelon raises, named by whose fault they are.

Every message says what failed, with both values where two disagree, where (role, rank, key), and what to do next.
"""

from __future__ import annotations


class EchelonError(Exception):
    """Anything Echelon itself raises."""


class UsageError(EchelonError, ValueError):
    """The caller asked for something that cannot be: a bad name, flag, file or shape. Nothing was changed."""


class DataError(EchelonError):
    """A file is missing, truncated or corrupt; the message has its path and where in it."""


class JobError(EchelonError, RuntimeError):
    """The job around this process broke: a peer died, a deadline passed, the scheduler is gone."""
