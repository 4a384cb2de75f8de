"""What a run came to, from its events: `summary.json`, and the lines printed at the end."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from echelon.atomic_file import AtomicFile

Event = dict[str, Any]


@dataclass(slots=True)
class WorkerState:
    """One worker as its last report shows it."""

    rank: int
    clock: int = 0
    samples: int = 0
    wait_s: float = 0.0
    staleness: dict[str, int] = field(default_factory=dict)
    reported_at: float = 0.0
    rate: float = 0.0
    finished: bool = False
    seconds: float = 0.0

    @property
    def mean_staleness(self) -> float:
        """Updates by others between this worker's read and its push, on average."""
        total = sum(self.staleness.values())
        return sum(int(value) * count for value, count in self.staleness.items()) / total if total else 0.0


@dataclass(slots=True)
class RunState:
    """A run as far as its events tell."""

    workers: dict[int, WorkerState] = field(default_factory=dict)
    validations: list[Event] = field(default_factory=list)
    began: float | None = None
    ended: float | None = None
    final: Event | None = None
    news: list[str] = field(default_factory=list)

    def take(self, events: Iterable[Event]) -> None:
        """Read on."""
        for event in events:
            match event["event"]:
                case "begin":
                    self.began = min(self.began or event["at"], event["at"])
                    self.workers.setdefault(event["rank"], WorkerState(event["rank"], reported_at=event["at"]))
                case "progress" | "done":
                    self._report(event)
                case "validation":
                    self.validations.append(event)
                case "final":
                    self.final = event
                case "view" if event.get("departure") in ("failed", "died"):
                    self.news.append(event["reason"])
                case "stall":
                    self.news.append(f"{event['who']} waits: {event['waiting']}")

    def _report(self, event: Event) -> None:
        worker = self.workers.setdefault(event["rank"], WorkerState(event["rank"], reported_at=event["at"]))
        if worker.finished:
            return
        elapsed = event["at"] - worker.reported_at
        if elapsed > 0.05:
            now = (event["samples"] - worker.samples) / elapsed
            worker.rate = now if not worker.rate else 0.6 * worker.rate + 0.4 * now
            worker.reported_at = event["at"]
        worker.clock, worker.samples, worker.wait_s = event["clock"], event["samples"], event["wait_s"]
        worker.staleness = event["staleness"]
        if event["event"] == "done":
            worker.finished, worker.seconds = True, event["seconds"]
            self.ended = max(self.ended or 0.0, event["at"])

    @property
    def has_trained(self) -> bool:
        """Whether a worker has made a step, or came to its end without one."""
        return any(worker.clock or worker.finished for worker in self.workers.values())

    @property
    def samples(self) -> int:
        """Over all workers."""
        return sum(worker.samples for worker in self.workers.values())

    @property
    def seconds(self) -> float:
        """From the first worker's beginning to the last one's end."""
        return max(0.0, self.ended - self.began) if self.ended and self.began else 0.0

    def histogram(self) -> dict[int, int]:
        """Steps by staleness, over all workers."""
        total: dict[int, int] = {}
        for worker in self.workers.values():
            for value, count in worker.staleness.items():
                total[int(value)] = total.get(int(value), 0) + count
        return dict(sorted(total.items()))


def summary(state: RunState, store: str, settings: dict[str, Any], exit_status: int) -> dict[str, Any]:
    """The summary's keys; `accuracy` is that of the final weights, None where nothing was validated."""
    last = state.final or (state.validations[-1] if state.validations else None)
    return {
        "store": store,
        "accuracy": last["accuracy"] if last else None,
        "samples_per_s": round(state.samples / state.seconds, 3) if state.seconds else 0.0,
        "seconds": round(state.seconds, 3),
        "samples": state.samples,
        "exit_status": exit_status,
        "validations": [
            {name: event[name] for name in ("seconds", "epoch", "accuracy", "loss")} for event in state.validations
        ],
        "workers": [
            {
                "rank": worker.rank,
                "clock": worker.clock,
                "samples": worker.samples,
                "wait_s": worker.wait_s,
                "staleness": worker.staleness,
                "finished": worker.finished,
                "seconds": worker.seconds or round(worker.reported_at - (state.began or 0.0), 6),
            }
            for worker in sorted(state.workers.values(), key=lambda w: w.rank)
        ],
        "news": state.news,
        "settings": settings,
    }


def write_summary(directory: Path, facts: dict[str, Any]) -> Path:
    """Write `summary.json`, whole or not at all."""
    path = directory / "summary.json"
    with AtomicFile(path) as file:
        file.stream.write(msgspec.json.format(msgspec.json.encode(facts), indent=2) + b"\n")
    return path
