"""One server of a run, as of its last report."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class ServerState:
    """What a server has done for one store, and what it uses."""

    rank: int
    reported_at: float = 0.0
    store: int = 0
    pushes: int = 0
    updates: int = 0
    held: int = 0  # requests without an answer
    sent: int = 0  # bytes over sockets
    received: int = 0
    memory_bytes: int = 0
    cpu_s: float = 0.0
    cpu_load: float = 0.0  # cores in use between the last two reports
    updates_per_s: float = 0.0
    decision: str = ""  # a recent decision of the scheme, with its reason
    arrivals: dict[int, Arrival] = field(default_factory=dict)  # by worker

    def take(self, event: dict[str, Any]) -> None:
        """Update the state with a report."""
        elapsed = event["at"] - self.reported_at
        if self.reported_at and elapsed > 0:
            self.cpu_load = (event["cpu_s"] - self.cpu_s) / elapsed
            self.updates_per_s = max(0.0, (event["updates"] - self.updates) / elapsed)
        self.reported_at = event["at"]
        for name in ("store", "pushes", "updates", "held", "sent", "received", "memory_bytes", "cpu_s", "decision"):
            setattr(self, name, event[name])
        self.arrivals = {
            int(rank): Arrival(one["clock"], one["own_s"], one["late_s"]) for rank, one in event["workers"].items()
        }


@dataclass(frozen=True, slots=True)
class Arrival:
    """How the pushes of a worker arrive at a server: medians over the last steps, None before the second step."""

    clock: int
    own_s: float | None  # from the server's answer to the worker's next push: the worker's own time
    late_s: float | None  # after the first push of the same round
