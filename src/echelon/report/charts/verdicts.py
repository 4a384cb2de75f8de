"""Who was slow over a whole run. `state/slowness.py` judges one moment; here its judgements are collected."""

from __future__ import annotations

from dataclasses import dataclass, field

from echelon.report.state.run import RunState
from echelon.report.state.slowness import Slow, own_times, slow_workers

FIRST_INTERVAL_S = 0.5
SHARE = 1 / 200  # of the time since the beginning: the interval grows with the run, so that the cost stays small
LEAST_SHARE = 0.25  # of the time: any worker is slow now and then


@dataclass(slots=True)
class _Record:
    """How long a worker was slow, and by which factor on average over that time."""

    seconds: float = 0.0
    factor_seconds: float = 0.0
    latest: Slow | None = None


@dataclass(slots=True)
class Verdicts:
    """The judgements over a run, each with the time since the one before it.

    `seconds` is the time in which at least two workers could be compared.
    """

    seconds: float = 0.0
    _records: dict[int, _Record] = field(default_factory=dict)
    _began: float | None = None
    _judged_at: float = 0.0

    def judge(self, state: RunState, now: float) -> None:
        """Judge the workers now, if enough time has passed since the last judgement."""
        if self._began is None:
            self._began = self._judged_at = now
        interval = now - self._judged_at
        if interval < max(FIRST_INTERVAL_S, SHARE * (now - self._began)):
            return
        self._judged_at = now
        if len(own_times(state)) < 2:  # there is nobody to compare with
            return
        self.seconds += interval
        for slow in slow_workers(state):
            record = self._records.setdefault(slow.rank, _Record())
            record.seconds += interval
            record.factor_seconds += interval * slow.factor
            record.latest = slow

    def sentences(self) -> list[str]:
        """Return a sentence per worker that was slow for a good part of the time, the longest first."""
        found = []
        for rank, record in sorted(self._records.items(), key=lambda item: -item[1].seconds):
            if record.latest is None or record.seconds < LEAST_SHARE * self.seconds:
                continue
            share, factor = record.seconds / self.seconds, record.factor_seconds / record.seconds
            found.append(
                f"Worker {rank} was slow for {share:.0%} of the time: its own part of a step took {factor:.1f} times "
                f"as long as the median of the others. When last judged: {record.latest.why}."
            )
        return found
