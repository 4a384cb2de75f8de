"""Lanes: keys that have always been pushed together share one state in the scheme engine.

A trainer pushes the same buckets in every step. The engine decides once per bucket instead of once per key, so the cost
of a step does not depend on the number of keys. The result is the same: keys that were pushed together from the start
have the same history, so one state represents all of them. The first request that names only some keys of a lane splits
it in two, each with a copy of the state.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from echelon.schemes import Engine
from echelon.server.storage.keys_cache import KeysCache


class Lanes:
    """The lane of each key. A single key is a lane with the number of the key; joint lanes count down from -1."""

    def __init__(
        self,
        engine: Engine,
        on_unite: Callable[[tuple[int, ...], int], bool],
        on_split: Callable[[int, tuple[int, ...]], None],
    ) -> None:
        """`on_unite` returns False if the caller's own state differs between these keys; then they stay separate."""
        self._engine = engine
        self._on_unite = on_unite
        self._on_split = on_split
        self._members: dict[int, tuple[int, ...]] = {}
        self._lane_of: dict[int, int] = {}
        self._pushed: KeysCache[list[int]] = KeysCache()  # the lanes of requests: those of pushes, and of others
        self._read: KeysCache[list[int]] = KeysCache()
        self._next = -1

    def add(self, key: int) -> None:
        """Add a new key."""
        self._engine.add_key(key)
        self._members[key] = (key,)
        self._lane_of[key] = key

    def keys(self, lane: int) -> tuple[int, ...]:
        """Return the keys of a lane, in the order of the request that created it."""
        return self._members[lane]

    def lane_of(self, key: int) -> int:
        """Return the lane of a key."""
        return self._lane_of[key]

    def all(self) -> Collection[int]:
        """Return all keys."""
        return self._lane_of.keys()

    def __contains__(self, key: int) -> bool:
        return key in self._lane_of

    def has_seen(self, keys: Sequence[int]) -> bool:
        """Return whether a push of exactly these keys was resolved before. If so, they need no further check."""
        return self._pushed.get(tuple(keys)) is not None

    def resolve(self, keys: Sequence[int], *, pushed: bool) -> list[int]:
        """Return the lanes of a request's keys. Lanes of which it names only some keys are split first."""
        request = tuple(keys)
        known = self._pushed if pushed else self._read
        lanes = known.get(request)
        if lanes is None:
            lanes = self._resolve(request, pushed)
            known.put(request, lanes)
        return lanes

    def _resolve(self, request: tuple[int, ...], pushed: bool) -> list[int]:
        lanes = list(dict.fromkeys(self._lane_of[key] for key in request))
        named = set(request)
        if pushed and len(lanes) > 1 and all(self._is_fresh(lane) for lane in lanes):
            lane, self._next = self._next, self._next - 1
            if self._on_unite(request, lane):
                self._unite(request, lane)
                return [lane]
        for lane in lanes:
            if not named.issuperset(self._members[lane]):
                self._split(lane, named)
        return list(dict.fromkeys(self._lane_of[key] for key in request))

    def to_plain(self) -> dict[str, Any]:
        """Return the lanes as numbers, lists and dicts."""
        return {"members": {lane: list(keys) for lane, keys in self._members.items()}, "next": self._next}

    def load_plain(self, plain: dict[str, Any]) -> None:
        """Take over what `to_plain` returned. The engine has the states of these lanes already."""
        self._members = {lane: tuple(keys) for lane, keys in plain["members"].items()}
        self._lane_of = {key: lane for lane, keys in self._members.items() for key in keys}
        self._next = plain["next"]
        self._pushed.clear()
        self._read.clear()

    def _is_fresh(self, lane: int) -> bool:
        return len(self._members[lane]) == 1 and self._engine.untouched(lane)

    def _unite(self, keys: tuple[int, ...], lane: int) -> None:
        self._engine.unite(keys, lane)
        for key in keys:
            del self._members[key]
            self._lane_of[key] = lane
        self._members[lane] = keys
        self._pushed.clear()
        self._read.clear()

    def _split(self, lane: int, named: set[int]) -> None:
        keys = self._members.pop(lane)
        parts = [tuple(key for key in keys if key in named), tuple(key for key in keys if key not in named)]
        numbers = []
        for part in parts:
            number = part[0] if len(part) == 1 else self._next
            self._next -= len(part) > 1
            self._members[number] = part
            self._lane_of |= dict.fromkeys(part, number)
            numbers.append(number)
        self._engine.split(lane, numbers)
        self._pushed.clear()
        self._read.clear()
        self._on_split(lane, tuple(numbers))
