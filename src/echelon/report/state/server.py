"""One server of a run, as of its last report."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class ServerState:
    """What a server has done for all stores, and what it uses."""

    rank: int
    reported_at: float = 0.0
    stores: dict[int, dict[str, Any]] = field(default_factory=dict)  # the last report about each
    sent: int = 0  # bytes over sockets
    received: int = 0
    memory_bytes: int = 0
    cpu_s: float = 0.0
    cpu_load: float = 0.0  # cores in use between the last two reports
    updates_per_s: float = 0.0

    def take(self, event: dict[str, Any]) -> None:
        """Update the state with a report."""
        before, elapsed = self.stores.get(event["store"]), event["at"] - self.reported_at
        if self.reported_at and elapsed > 0.1:  # reports about several stores come together
            self.cpu_load = (event["cpu_s"] - self.cpu_s) / elapsed
            self.updates_per_s = 0.0
        if before is not None and event["at"] > before["at"]:
            self.updates_per_s += max(0, event["updates"] - before["updates"]) / (event["at"] - before["at"])
        self.stores[event["store"]] = event
        self.reported_at = event["at"]
        for name in ("sent", "received", "memory_bytes", "cpu_s"):
            setattr(self, name, event[name])

    @property
    def pushes(self) -> int:
        """The pushes so far."""
        return sum(report["pushes"] for report in self.stores.values())

    @property
    def updates(self) -> int:
        """The updates of keys that are pushed together, so far."""
        return sum(report["updates"] for report in self.stores.values())

    @property
    def held(self) -> int:
        """The requests without an answer."""
        return sum(report["held"] for report in self.stores.values())

    @property
    def decision(self) -> str:
        """A recent decision of the scheme of the first store, with its reason."""
        return str(self.stores[min(self.stores)]["decision"]) if self.stores else ""

    @property
    def arrivals(self) -> dict[int, Arrival]:
        """How the pushes of each worker to the first store arrive: the store whose steps a worker's row shows."""
        workers = self.stores[min(self.stores)]["workers"] if self.stores else {}
        return {int(rank): Arrival(one["clock"], one["own_s"], one["late_s"]) for rank, one in workers.items()}


@dataclass(frozen=True, slots=True)
class Arrival:
    """How the pushes of a worker arrive at a server: medians over the last steps, None before the second step."""

    clock: int
    own_s: float | None  # from the server's answer to the worker's next push: the worker's own time
    late_s: float | None  # after the first push of the same round
