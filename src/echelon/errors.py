"""The errors that Echelon raises. Their types say where the fault is: in a call, in a file, or in the job.

Every message says what failed, both values where two disagree, where (role, rank, key), and what to do next.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher, get_close_matches


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
    near = nearest_names(given, (*synonyms, *known), cutoff=0.5)
    choose = f"did you mean {near[0]!r}? Choose" if near else "choose"
    return UsageError(f"unknown {kind} {given!r}; {choose} one of {', '.join(known)}{advice and f'; {advice}'}")


def nearest_names(given: str, known: Iterable[str], cutoff: float = 0.6) -> list[str]:
    """Return the known name that is most like `given`, and others that are equally like it."""
    by_folded = {_fold(name): name for name in known}
    wanted = _fold(given)
    near = get_close_matches(wanted, by_folded, n=3, cutoff=cutoff)
    likeness = [SequenceMatcher(None, name, wanted).ratio() for name in near]
    return [by_folded[name] for name, like in zip(near, likeness, strict=True) if like == likeness[0]]


def _fold(name: str) -> str:
    """Ignore case, the difference between `-` and `_`, and the dashes before a flag."""
    return name.lower().replace("_", "-").lstrip("-")
