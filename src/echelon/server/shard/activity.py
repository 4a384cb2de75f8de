"""What a shard has done, for the event log: counts, arrivals of the workers, and a recent decision of the scheme."""

from __future__ import annotations

from typing import Any

from echelon.schemes import Decision, Engine
from echelon.server.shard.arrivals import Arrivals

DESCRIBE_S = 0.5  # how often a decision is described


class Activity:
    """The counts of one shard."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._arrivals = Arrivals(engine.rules.group_of)
        self.num_pushes = self.num_updates = 0
        self.decision = ""  # a recent decision of the scheme, with its reason
        self._described_at = 0.0

    def pushed(self, worker: int, clock: int, now: float) -> None:
        """Record a push of a worker."""
        self.num_pushes += 1
        self._arrivals.pushed(worker, clock, now)

    def answered(self, worker: int, now: float) -> None:
        """Record an answer to a worker."""
        self._arrivals.answered(worker, now)

    def remove(self, worker: int) -> None:
        """Forget a worker that has left."""
        self._arrivals.remove(worker)

    def describe_if_due(self, worker: int, lane: int, clock: int, decision: Decision, now: float) -> None:
        """Describe a decision that was not carried out yet: its reason, and the workers that it waits for."""
        if now - self._described_at < DESCRIBE_S:
            return
        self._described_at = now
        missing = self._engine.missing(worker, lane, clock)
        waits_for = f" (worker {', '.join(map(str, missing))})" if missing else ""
        self.decision = f"worker {worker}, clock {clock}: {decision.reason}{waits_for}"

    def report(self, num_held: int) -> dict[str, Any]:
        """Return the fields of an event. `num_held`: the requests without an answer."""
        return {
            "pushes": self.num_pushes,
            "updates": self.num_updates,
            "held": num_held,
            "workers": self._arrivals.report(),
            "decision": self.decision,
        }
