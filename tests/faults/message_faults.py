"""What can happen to a worker's request and to its answer."""

from __future__ import annotations

from echelon.faults import Fault, Kind

Action = tuple[Kind, str]  # what happens, and to which of the two
LOSE: Action = (Kind.DROP, "send")
LOSE_ANSWER: Action = (Kind.DROP, "answer")
REPEAT: Action = (Kind.DUPLICATE, "send")
REPEAT_ANSWER: Action = (Kind.DUPLICATE, "answer")
REPEAT_LATE: Action = (Kind.REPLAY, "send")
REORDER: Action = (Kind.REORDER, "send")
DELAY: Action = (Kind.DELAY, "send")
ACTIONS = (LOSE, LOSE_ANSWER, REPEAT, REPEAT_ANSWER, REPEAT_LATE, REORDER, DELAY)
LATE_S = 0.1  # later than the worker asks about its request in these tests


def message_fault(action: Action, rank: int, request: str, clock: int | None = None) -> Fault:
    """Return a fault of a worker's request of this kind. `clock` counts steps."""
    kind, way = action
    return Fault(kind, "worker", rank, clock, f"{way}.{request}", seconds=LATE_S)
