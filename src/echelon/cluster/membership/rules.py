"""The settings of a job that decide how its membership may change."""

from __future__ import annotations

from dataclasses import dataclass

RESTART_S = 60.0  # that a job waits for a process that can be started again


@dataclass(frozen=True, slots=True)
class Rules:
    """How many workers a job needs and may have, and what happens when a process is lost.

    min_workers   the job stops when fewer are left, not counting those that finished
    max_workers   that may join a running job; None: as many as it started with
    replicas      how many more servers store each slice, 0 or 1
    can_restart   whether somebody starts lost processes again, so that the job waits for them
    is_restarted  whether this scheduler was started again: processes that return to it are the members of the job
    return_s      how long a scheduler that was started again waits for the members of the job
    """

    min_workers: int = 1
    max_workers: int | None = None
    replicas: int = 0
    can_restart: bool = False
    is_restarted: bool = False
    return_s: float = 6.0
