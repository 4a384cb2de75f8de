"""The exit status of a job: whether its result is whole. Pure.

The scheduler of a job with servers knows whether the work of a lost worker was done by others, and says so with its own
exit status. Without a scheduler, the first process that failed decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from echelon.errors import CRASHED, NOT_WHOLE

MOST_NAMED = 8


class Loss(NamedTuple):
    """A process that failed while the job ran: "worker 1 (pid 7)", how it ended, and whether it was restarted."""

    who: str
    how: str
    restarted: bool

    def __str__(self) -> str:
        return f"{self.who} {self.how}{' and was restarted' if self.restarted else ''}"


class Verdict(NamedTuple):
    """What the scheduler has said of a job that is over: its exit status, and why if that is not 0."""

    status: int
    why: str


class Failure(NamedTuple):
    """The first failure of a job.

    `decisive`: the job cannot be whole, whatever the scheduler says. `uncovered`: a worker failed in a job without a
    ledger. One that the scheduler saw die makes the result not whole. One that left the job before, as a program does
    that ends with an error, has finished for the scheduler, but not for the user.
    """

    status: int
    decisive: bool = False
    uncovered: bool = False


def final_status(first: Failure | None, scheduler: int | None, workers: Sequence[int]) -> int:
    """Return the exit status of a job from its first failure and the exit codes of the scheduler and the workers.

    `scheduler` is None for a job without one, and for one whose end the launcher has not seen. If it was killed before
    it gave a verdict, nobody knows whether the result is whole.
    """
    if first is not None and first.decisive:
        return first.status
    if scheduler == NOT_WHOLE or (scheduler is not None and has_no_verdict(scheduler) and 0 in workers):
        return NOT_WHOLE
    if first is None or (scheduler == 0 and 0 in workers and not first.uncovered):
        return 0
    return first.status


def has_no_verdict(scheduler: int) -> bool:
    """Return whether a scheduler with this exit code was killed or crashed."""
    return scheduler < 0 or scheduler == CRASHED


def stop_reason(line: str, name: str) -> str:
    """Return why the scheduler stopped a job, from its last line, without the loss of the named process.

    "" if it says no more than that: the launcher knows how the process ended.
    """
    reason = line.partition(f": {name} ")[0]
    return "" if reason == "job stopped" else reason


def describe_losses(losses: Sequence[Loss]) -> str:
    """Name the processes that failed, each with how, in the order of time."""
    named = [str(loss) for loss in losses[:MOST_NAMED]]
    more = [f"{len(losses) - MOST_NAMED} more"] if len(losses) > MOST_NAMED else []
    return "; ".join([*named, *more])
