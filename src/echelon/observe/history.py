"""The history of a store: every push that a worker was told to be applied, and every update that a server made.

With ECHELON_HISTORY=1 workers and servers append these events to `events.jsonl`; `echelon.testing.history` checks them.
A server writes its events before it answers, so that what a worker was told is in the file even if the server is killed
at any instant. That costs a system call and about 40 µs per update, which is why it is off by default. A worker writes
one event per wait.

| event | written by | fields |
|---|---|---|
| history_store | server | the scheme of a store: groups and bound |
| history | server | of a slice, in order: `updates` [keys, clock, version, [[worker, works], …], digest of the |
| | | weights], `answers` to pulls [keys, worker, clock, rounds ahead], and the `active` workers with their groups, if |
| | | they changed |
| history_role | server | what it stores of a slice is the original from now on, not a backup's copy |
| history_rebuilt | server | `in_part`: updates that weights from workers have in part: [keys, version, [[worker, |
| | | first clock, end], …]] |
| history_acked | worker | `pushes` that were answered: [slice, keys, clock, works] |

Keys are written as ranges: "0-3,7".
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any

from echelon.cluster.messages import Push, Work
from echelon.environment import HISTORY, variable
from echelon.observe.events import EventLog
from echelon.schemes import Apply, Engine, Reply

Works = list[list[int]]  # each: ledger, epoch, start, stop


def is_recorded(events: EventLog) -> bool:
    """Return whether this process records its history."""
    return events.is_open and variable(HISTORY) == "1"


@lru_cache(maxsize=4096)
def as_ranges(keys: tuple[int, ...]) -> str:
    """Return sorted keys as text: (0, 1, 2, 7) is "0-2,7"."""
    ranges: list[list[int]] = []
    for key in sorted(keys):
        if ranges and key == ranges[-1][1] + 1:
            ranges[-1][1] = key
        else:
            ranges.append([key, key])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in ranges)


@lru_cache(maxsize=4096)
def from_ranges(text: str) -> tuple[int, ...]:
    """Return the keys of `as_ranges`."""
    pairs = [part.partition("-") for part in text.split(",") if part]
    return tuple(key for first, _, last in pairs for key in range(int(first), int(last or first) + 1))


def _as_lists(works: Iterable[Work]) -> Works:
    return [[work.ledger, work.epoch, work.start, work.stop] for work in works]


class ShardHistory:
    """The history of one store on one slice. `is_copy`: of a backup, whose updates repeat those of the primary."""

    def __init__(self, events: EventLog, store: int, slice_number: int, *, is_copy: bool) -> None:
        self._events = events
        self._place = {"store": store, "slice": slice_number, "pid": os.getpid()}
        self._active: list[int] = []
        self.is_copy = is_copy
        self._updates: list[list[Any]] = []

    def begin(self, engine: Engine) -> None:
        """Record the scheme of the store."""
        rules = engine.rules
        groups = {str(worker): rules.group_of(worker) for worker in engine.workers}
        self._write("history_store", scheme=rules.name, bound=rules.bound, groups=groups)

    def promote(self) -> None:
        """Record that this is the original from now on."""
        self.is_copy = False
        self._write("history_role")

    def rebuilt(self, in_part: Sequence[tuple[int, int, Sequence[tuple[int, int, int]]]]) -> None:
        """Record which updates of keys the weights from workers have in part: key, version, rounds of workers."""
        self._write("history_rebuilt", in_part=[[str(key), *rest] for key, *rest in in_part])

    def updated(self, keys: Sequence[int], action: Apply, works: Sequence[Sequence[Work]]) -> None:
        """Record an update. `works` are those of its contributions."""
        parts = [[part.worker, _as_lists(work)] for part, work in zip(action.contributions, works, strict=True)]
        self._updates.append([as_ranges(tuple(keys)), action.clock, action.version, parts])

    def flush(
        self,
        engine: Engine,
        answers: Sequence[tuple[Sequence[int], Reply]],
        digest: Callable[[Sequence[int]], int] = lambda keys: 0,
    ) -> None:
        """Write what has happened since the last call, before the answers leave. `digest`: of the weights of keys."""
        fields: dict[str, Any] = {}
        if self._updates:
            fields["updates"] = [[*update, digest(from_ranges(update[0]))] for update in self._updates]
            self._updates = []
        if answers and not self.is_copy:
            fields["answers"] = [
                [
                    as_ranges(tuple(keys)),
                    reply.worker,
                    reply.clock,
                    engine.rounds_ahead(reply.worker, reply.key, reply.clock),
                ]
                for keys, reply in answers
            ]
        active = sorted(engine.workers)
        if active != self._active:
            fields["active"] = [[worker, engine.rules.group_of(worker)] for worker in active]
            self._active = active
        if fields:
            self._write("history", **fields)

    def _write(self, kind: str, **fields: Any) -> None:
        self._events.write_now(kind, **self._place, copy=self.is_copy, **fields)


class WorkerHistory:
    """The pushes of one worker to one store that were acknowledged."""

    def __init__(self, events: EventLog, store: int) -> None:
        self._events = events
        self._store = store
        self._acked: list[list[Any]] = []

    def acked(self, slice_number: int, push: Push) -> None:
        """Record that a server has answered a push. One that carries no gradient changes nothing."""
        if push.header.samples != 0:
            keys = as_ranges(tuple(push.keys))
            self._acked.append([slice_number, keys, push.clock, _as_lists(push.header.work)])

    def flush(self) -> None:
        """Write what has happened since the last call."""
        if self._acked:
            acked, self._acked = self._acked, []
            self._events.write_now("history_acked", store=self._store, pushes=acked)
