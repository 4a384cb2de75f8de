"""What the events of a run tell the harness: how far the slowest worker is, and what the steps consisted of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

_PHASES = ("compute_s", "push_s", "wait_s", "pull_s")


class RunEvents:
    """The last report of every worker of this machine."""

    def __init__(self) -> None:
        self._last: dict[int, Mapping[str, Any]] = {}

    def take(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Read new events."""
        for event in events:
            if event.get("event") in ("progress", "done") and isinstance(event.get("rank"), int):
                self._last[event["rank"]] = event

    @property
    def batches(self) -> int:
        """The batches that the slowest of the workers that have reported has done."""
        return min((int(event.get("clock", 0)) for event in self._last.values()), default=0)

    def records(self) -> dict[str, Any]:
        """Return the totals of the run, with its warm-up: seconds of each phase by worker, bytes, and staleness."""
        workers = [self._last[rank] for rank in sorted(self._last)]
        if not workers or any("compute_s" not in one for one in workers):
            return {}
        totals: Counter[str] = Counter()
        staleness: Counter[str] = Counter()
        for one in workers:
            totals.update(one.get("bytes", {}))
            staleness.update(one.get("staleness", {}))
        phases = {f"results.worker_{phase}": [one[phase] for one in workers] for phase in _PHASES}
        return {**phases, "results.bytes": dict(totals), "results.staleness": dict(staleness)}
