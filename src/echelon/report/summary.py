"""The state of a run, collected from its events, and its `summary.json`."""

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
    """One worker, as of its last report."""

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
        """The mean number of updates by others between this worker's read and its push."""
        total = sum(self.staleness.values())
        return sum(int(value) * count for value, count in self.staleness.items()) / total if total else 0.0


@dataclass(slots=True)
class RunState:
    """A run, as of the events read so far."""

    workers: dict[int, WorkerState] = field(default_factory=dict)
    validations: list[Event] = field(default_factory=list)
    began: float | None = None
    ended: float | None = None
    final: Event | None = None
    news: list[str] = field(default_factory=list)

    def take(self, events: Iterable[Event]) -> None:
        """Update the state with new events."""
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
        """Whether a worker has run a step, or has finished without one."""
        return any(worker.clock or worker.finished for worker in self.workers.values())

    @property
    def samples(self) -> int:
        """The samples of all workers."""
        return sum(worker.samples for worker in self.workers.values())

    @property
    def seconds(self) -> float:
        """The time from the start of the first worker to the end of the last one."""
        return max(0.0, self.ended - self.began) if self.ended and self.began else 0.0

    def histogram(self) -> dict[int, int]:
        """Return the number of steps by staleness, over all workers."""
        return sum_histograms(worker.staleness for worker in self.workers.values())


def sum_histograms(histograms: Iterable[dict[str, int]]) -> dict[int, int]:
    """Add histograms whose keys are numbers as text, as in JSON; the result is sorted by number."""
    total: dict[int, int] = {}
    for histogram in histograms:
        for value, count in histogram.items():
            total[int(value)] = total.get(int(value), 0) + count
    return dict(sorted(total.items()))


def summary(state: RunState, store: str, options: dict[str, Any], exit_status: int) -> dict[str, Any]:
    """Return the contents of `summary.json`; `accuracy` is that of the final weights, or None without validation."""
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
        "settings": options,
    }


def write_summary(directory: Path, values: dict[str, Any]) -> Path:
    """Write `summary.json` atomically."""
    path = directory / "summary.json"
    with AtomicFile(path) as file:
        file.stream.write(msgspec.json.format(msgspec.json.encode(values), indent=2) + b"\n")
    return path
