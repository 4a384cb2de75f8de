"""The errors that Echelon raises. Their types say where the fault is: in a call, in a file, or in the job.

Every message says what failed, both values where two disagree, where (role, rank, key), and what to do next.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class EchelonError(Exception):
    """The base class of all errors that Echelon raises."""


class UsageError(EchelonError, ValueError):
    """The caller gave an invalid name, flag, file or shape. Nothing was changed."""


class DataError(EchelonError):
    """A file is missing, truncated or corrupt. The message names the file and the position in it."""


class JobError(EchelonError, RuntimeError):
    """The job of this process failed: another process died, a timeout passed, or the scheduler disconnected."""


def unknown_name(
    kind: str, given: str, known: Iterable[str], advice: str = "", *, synonyms: Iterable[str] = ()
) -> UsageError:
    """Return the error for an unknown name, which the caller raises. `advice` is appended after a semicolon.

    `synonyms` are accepted as well: the error may suggest one, but does not list them.
    """
    known = tuple(known)
    by_folded = {_fold(name): name for name in (*synonyms, *known)}
    near = get_close_matches(_fold(given), by_folded, n=1, cutoff=0.5)
    choose = f"did you mean {by_folded[near[0]]!r}? Choose" if near else "choose"
    return UsageError(f"unknown {kind} {given!r}; {choose} one of {', '.join(known)}{advice and f'; {advice}'}")


def _fold(name: str) -> str:
    """Ignore case and the difference between `-` and `_`."""
    return name.lower().replace("_", "-")
