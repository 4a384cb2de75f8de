"""The errors that Echelon raises. Their types say where the fault is: in a call, in a file, or in the job.

Every message says what failed, both values where two disagree, where (role, rank, key), and what to do next.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher, get_close_matches

CRASHED = 70  # the exit status of a server or scheduler with an uncaught exception (EX_SOFTWARE): it can be restarted
USAGE = 2  # the exit status after an invalid command, and of a worker that cannot join a job because of what it is
NOT_WHOLE = 3  # the exit status of a job that ended, but whose result is not whole; 1 means that it failed


class EchelonError(Exception):
    """The base class of all errors that Echelon raises."""


class UsageError(EchelonError, ValueError):
    """The caller gave an invalid name, flag, file or shape. Nothing was changed."""


class DataError(EchelonError):
    """A file is missing, truncated or corrupt. The message names the file and the position in it."""


REPEATING = (UsageError, DataError)  # a process that ended with one of these would end so again


class JobError(EchelonError, RuntimeError):
    """The job of this process failed: another process died, a timeout passed, or the scheduler disconnected."""


class JoinRefused(JobError):
    """The job does not admit this worker, which `echelon join` has started. It would refuse it again."""


class WorkerRemoved(JobError):
    """The scheduler removed this worker from the job, because it was stopped or cut off. It can join again."""


class WorkerLeft(SystemExit):
    """This worker was told to end (SIGTERM) and has left the job, so a call that needs the job ends its program.

    It is a SystemExit with status 0: the worker has done all that it had to do.
    """

    def __init__(self, rank: int) -> None:
        super().__init__(0)
        self.rank = rank

    def __str__(self) -> str:
        return f"worker {self.rank} was told to end and has left the job"


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
