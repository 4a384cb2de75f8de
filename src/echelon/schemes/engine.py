"""The engine of all schemes: for each push and pull it decides what to hold, apply and answer.

A worker's clock for a key counts how often the worker has pushed that key. The pushes of clock c by the members of a
group form round c of that group. A round is applied when every active member has pushed it and the round before it is
applied. Rounds are applied in order, in whatever order messages arrive. A pull at clock c is answered when the worker's
group has applied c rounds (so the worker sees its own updates) and c is at most `bound` ahead of the slowest active
group.

    push(c) ──> round c of the group ──complete, in order──> Apply (version += 1, group clock += 1)
    pull(c) ──> group clock >= c and c - min(active group clocks) <= bound ──> Reply, else held

Each applied round and each worker that leaves cause the held pulls to be checked again, so no pull waits for a worker
that has left. What a worker pushed before it left stays in its round and counts, unless nobody of its group is left to
complete it.

A worker joins a running job at a clock that it chooses (`next_clocks`, `join`): the same number on all servers, so that
its pushes of a step belong to one round. A number is refused if the round was applied meanwhile, or if the worker has
pushed this clock before it left. Nothing is therefore applied twice, and nobody waits for the worker before this round.

A push may be gated: its round is then applied in two stages. When the round is complete, `Gathered` reports it, and its
contributions do not change any more. `release` applies it. Between the two, servers agree on the norm of all gradients.

`Divisor.ROUND` compares the samples of an update with those of a round of all workers: the latest push of each. Workers
that finished their data still count, so that the slower ones do not take larger steps at the end. Dead ones do not.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from echelon.schemes.rules import Divisor, Rules


class Contribution(NamedTuple):
    """One worker's part of an update. `staleness`: updates by others since this worker last read the key.

    `samples` is the gradient's weight in the mean of the round. None: gradients are added, without weights.
    """

    worker: int
    samples: float | None
    staleness: int


class Gathered(NamedTuple):
    """A gated round of a group is complete. Its contributions are final, and its update waits for `Engine.release`."""

    key: int
    group: int
    clock: int
    contributions: tuple[Contribution, ...]
    absent: float = 0.0


class Apply(NamedTuple):
    """Sum these contributions in rank order and update the key once, with the step divided by `divisor`.

    `absent`: samples of the round's workers whose batches give the key no gradient. They count as zero gradients.
    `scale` multiplies the sum; it is 1 unless the round was gated.
    """

    key: int
    clock: int
    contributions: tuple[Contribution, ...]
    divisor: float
    version: int
    absent: float = 0.0
    scale: float = 1.0


class Reply(NamedTuple):
    """Answer this worker's pull at `clock` with the present value of the key."""

    key: int
    worker: int
    clock: int
    version: int


Action = Gathered | Apply | Reply
Plain = dict[str, Any]  # a state as numbers, texts, lists and dicts


class Decision(NamedTuple):
    """What to do, in this order, and why."""

    actions: tuple[Action, ...]
    reason: str


APPLIED = "the round is complete"
HELD_FOR_MEMBERS = "held: members of the group have not pushed this clock"
HELD_AT_GATE = "held: the round is complete and waits for its release"
HELD_FOR_BOUND = "held: too far ahead of the slowest group"
ANSWERED = "nothing to wait for"
DUPLICATE = "seen before: already applied or waiting in its round"
OBSERVER = "answered: the worker does not take part and only reads"
NOT_A_MEMBER = "the worker is not in the view"
RELEASED = "released by a change of the view"
RELEASED_NOTHING = "the change of the view releases nothing"
JOINED = "the worker takes part from this clock on"
TOO_LATE = "refused: a round from this clock on was applied, or the worker has pushed it before"

_IGNORED = Decision((), DUPLICATE)
_REJECTED = Decision((), NOT_A_MEMBER)


class _Group:
    """The rounds of one group for one key."""

    __slots__ = ("absent", "clock", "gates", "rounds", "seen")

    def __init__(self, clock: int) -> None:
        self.clock = clock  # rounds applied
        self.gates: dict[int, bool] = {}  # clock of a gated round -> whether it was reported as gathered
        self.seen = 0  # the version of the key after this group's last update
        self.rounds: dict[int, dict[int, float | None]] = {}  # clock -> worker -> samples
        self.absent: dict[int, float] = {}  # clock -> samples of pushes that carry no gradient

    def drop_rounds(self) -> None:
        """Drop the incomplete rounds."""
        self.gates.clear()
        self.rounds.clear()
        self.absent.clear()


class _Key:
    """The state of one key."""

    __slots__ = ("groups", "held", "read", "samples", "starts", "version")

    def __init__(self) -> None:
        self.version = 0
        self.groups: dict[int, _Group] = {}
        self.held: dict[tuple[int, int], None] = {}  # (worker, clock) of held pulls, oldest first
        self.read: dict[int, int] = {}  # worker -> version that it read last
        self.samples: dict[int, float] = {}  # worker -> samples of its latest push
        self.starts: dict[int, int] = {}  # worker that joined later -> its first clock, until its group has reached it


class Engine:
    """The state of the scheme for all keys of one server."""

    def __init__(self, rules: Rules, workers: Iterable[int]) -> None:
        self.rules = rules
        self._members: dict[int, set[int]] = {}
        self._keys: dict[int, _Key] = {}
        self._paused: set[int] = set()
        self._round = set(workers)  # the workers of a round for Divisor.ROUND: the active and the finished
        for worker in self._round:
            self._members.setdefault(rules.group_of(worker), set()).add(worker)

    @property
    def workers(self) -> set[int]:
        """The active workers."""
        return set().union(*self._members.values())

    @property
    def present(self) -> set[int]:
        """The active workers and the paused ones."""
        return self.workers | self._paused

    @property
    def paused(self) -> frozenset[int]:
        """The paused workers."""
        return frozenset(self._paused)

    def is_active(self, worker: int) -> bool:
        """Return whether a worker takes part."""
        return worker in self._members.get(self.rules.group_of(worker), ())

    def group_is_active(self, worker: int) -> bool:
        """Return whether any member of a worker's group takes part."""
        return self.rules.group_of(worker) in self._members

    def group_is_over(self, worker: int) -> bool:
        """Return whether no member of a worker's group takes part or is paused."""
        group_id = self.rules.group_of(worker)
        return group_id not in self._members and all(self.rules.group_of(other) != group_id for other in self._paused)

    def add_key(self, key: int) -> None:
        """Start a key at version 0 and clock 0."""
        state = self._keys[key] = _Key()
        for group in self._members:
            state.groups[group] = _Group(0)

    def untouched(self, key: int) -> bool:
        """Return whether a key has no pushes, held pulls or late workers. All such keys have the same state."""
        state = self._keys[key]
        begun = state.version or state.held or state.starts
        return not begun and not any(g.clock or g.rounds for g in state.groups.values())

    def unite(self, keys: Iterable[int], lane: int) -> None:
        """Let one state named `lane` replace the states of untouched keys."""
        states = [self._keys.pop(key) for key in keys]
        self._keys[lane] = states[0]

    def split(self, lane: int, keys: Iterable[int]) -> None:
        """Replace a state by several, each with a copy of its history."""
        state = self._keys.pop(lane)
        for key in keys:
            self._keys[key] = copy.deepcopy(state)

    def version(self, key: int) -> int:
        """Return the number of updates applied to a key."""
        return self._keys[key].version

    def clock(self, worker: int, key: int) -> int:
        """Return how many rounds the worker's group has applied; 0 if the group had left before the key was added."""
        group = self._keys[key].groups.get(self.rules.group_of(worker))
        return group.clock if group else 0

    def clocks(self, key: int) -> dict[int, int]:
        """Return how many rounds of a key each group has applied, also those whose workers have left."""
        return {number: group.clock for number, group in self._keys[key].groups.items()}

    def rounds_ahead(self, worker: int, key: int, clock: int) -> int:
        """Return how many rounds a worker that reads at `clock` is ahead of the slowest active group.

        Negative if all active groups have applied more than `clock` rounds; 0 if the worker does not take part.
        """
        return clock - self._slowest(self._keys[key]) if self.is_active(worker) else 0

    def push(
        self, worker: int, key: int, clock: int, samples: float | None, absent: float = 0.0, *, gated: bool = False
    ) -> Decision:
        """Record a worker's push of `clock`, which starts at 0. With `samples` 0 the push carries no gradient.

        `absent` is then the number of samples in the worker's batch, of which none gives the key a gradient. `gated`:
        the round is not applied before `release`.
        """
        group_id = self.rules.group_of(worker)
        if worker not in self._members.get(group_id, ()):
            return _REJECTED
        state = self._keys[key]
        group = state.groups[group_id]
        early = clock < max(group.clock, state.starts.get(worker, 0))
        if early or worker in (waiting := group.rounds.setdefault(clock, {})):
            return _IGNORED
        waiting[worker] = samples
        if absent:
            group.absent[clock] = group.absent.get(clock, 0.0) + absent
        if samples is not None:
            state.samples[worker] = samples + absent
        if gated:
            group.gates.setdefault(clock, False)
        actions: list[Action] = []
        before = group.clock
        self._advance(key, state, group_id, actions)
        held = HELD_AT_GATE if self.waits_for_release(worker, key) else HELD_FOR_MEMBERS
        return Decision(tuple(actions), APPLIED if group.clock > before else held)

    def put_back(self, worker: int, key: int, clock: int, samples: float | None, absent: float, *, gated: bool) -> bool:
        """Put the push of a worker that does not take part any more into its round, as in the engine that this copies.

        Return False if the round was applied. Nothing is applied here: a member that takes part completes the round.
        """
        group = self._keys[key].groups.get(self.rules.group_of(worker))
        if group is None or clock < group.clock:
            return False
        group.rounds.setdefault(clock, {})[worker] = samples
        if absent:
            group.absent[clock] = group.absent.get(clock, 0.0) + absent
        if gated:
            group.gates.setdefault(clock, False)
        return True

    def release(self, worker: int, key: int, clock: int, scale: float = 1.0) -> Decision:
        """Apply the gathered round `clock` of a worker's group, its sum times `scale`. Only the first call counts."""
        group_id = self.rules.group_of(worker)
        if group_id not in self._members:
            return _REJECTED
        state = self._keys[key]
        group = state.groups[group_id]
        if clock != group.clock or not group.gates.get(clock):
            return _IGNORED
        del group.gates[clock]
        actions: list[Action] = []
        self._apply(key, state, group, actions, scale)
        self._advance(key, state, group_id, actions)
        if state.held:
            self._answer_held(key, state, actions)
        return Decision(tuple(actions), APPLIED)

    def pull(self, worker: int, key: int, clock: int) -> Decision:
        """Decide on the pull of a worker that has pushed `clock` rounds. An inactive worker never waits."""
        group_id = self.rules.group_of(worker)
        state = self._keys[key]
        if worker not in self._members.get(group_id, ()):
            return Decision((Reply(key, worker, clock, state.version),), OBSERVER)
        if state.groups[group_id].clock < clock:
            state.held[worker, clock] = None
            return Decision((), HELD_FOR_MEMBERS)
        if not self._within_bound(state, clock):
            state.held[worker, clock] = None
            return Decision((), HELD_FOR_BOUND)
        return Decision((self._reply(key, state, worker, clock),), ANSWERED)

    def to_plain(self) -> Plain:
        """Return the state as numbers, lists and dicts, without rounds that are not complete and without pulls."""
        return {
            "members": {group: sorted(members) for group, members in self._members.items()},
            "paused": sorted(self._paused),
            "round": sorted(self._round),
            "keys": {
                key: {
                    "version": state.version,
                    "groups": {group: [one.clock, one.seen] for group, one in state.groups.items()},
                    "read": state.read,
                    "samples": state.samples,
                    "starts": state.starts,
                }
                for key, state in self._keys.items()
            },
        }

    def load_plain(self, plain: Plain) -> None:
        """Take over what `to_plain` returned."""
        self._members = {group: set(members) for group, members in plain["members"].items()}
        self._paused, self._round = set(plain["paused"]), set(plain["round"])
        self._keys = {}
        for key, values in plain["keys"].items():
            state = self._keys[key] = _Key()
            state.version = values["version"]
            state.read, state.samples = dict(values["read"]), dict(values["samples"])
            state.starts = dict(values["starts"])
            for group, (clock, seen) in values["groups"].items():
                state.groups[group] = _Group(clock)
                state.groups[group].seen = seen

    def forget_pulls(self) -> None:
        """Drop all held pulls; they will be sent again."""
        for state in self._keys.values():
            state.held.clear()

    def leave(self, worker: int, *, finished: bool = False) -> Decision:
        """Remove a worker that died or finished: nothing waits for it, and its own held pulls are dropped."""
        group_id = self.rules.group_of(worker)
        members = self._members.get(group_id, set())
        if worker not in members:
            if worker in self._paused and not finished:
                self._paused.discard(worker)
                self._round.discard(worker)
                self._drop_if_over(worker)
            return _REJECTED
        members.discard(worker)
        if not finished:
            self._round.discard(worker)
        if not members:
            del self._members[group_id]
        actions: list[Action] = []
        for key, state in self._keys.items():
            state.starts.pop(worker, None)
            for held in [held for held in state.held if held[0] == worker]:
                del state.held[held]
            if members:
                self._advance(key, state, group_id, actions)
            self._answer_held(key, state, actions)
        self._drop_if_over(worker)
        return Decision(tuple(actions), RELEASED if actions else RELEASED_NOTHING)

    def _drop_if_over(self, worker: int) -> None:
        """Drop the incomplete rounds of a worker's group if nobody can complete them."""
        if self.group_is_over(worker):
            self.drop_rounds(worker)

    def drop_rounds(self, worker: int) -> None:
        """Drop the incomplete rounds of a worker's group, in which nobody takes part now."""
        group_id = self.rules.group_of(worker)
        for state in self._keys.values():
            if group_id in state.groups:
                state.groups[group_id].drop_rounds()

    def pause(self, worker: int) -> Decision:
        """Stop waiting for a worker that waits for all others. It has no pushes in flight."""
        if self.is_active(worker):
            self._paused.add(worker)
        return self.leave(worker, finished=True)

    def resume(self, worker: int) -> None:
        """Let a paused worker take part again, from the next round of its group. No other worker is in a round."""
        if worker in self._paused:
            self._paused.discard(worker)
            group_id = self.rules.group_of(worker)
            self._members.setdefault(group_id, set()).add(worker)
            for state in self._keys.values():
                state.groups.setdefault(group_id, _Group(0))  # keys that were added while the whole group was paused

    def next_clocks(self, worker: int) -> dict[int, int]:
        """Return for every key the first clock from which on a worker may join now.

        A worker that is alone in its group is not expected to repeat what the slowest group has done.
        """
        group_id = self.rules.group_of(worker)
        clocks = {key: self._first_free(state, group_id, worker) for key, state in self._keys.items()}
        if self._members and group_id not in self._members:
            clocks = {key: max(clock, self._slowest(self._keys[key])) for key, clock in clocks.items()}
        return clocks

    def join(self, worker: int, first: int, firsts: Mapping[int, int] | None = None) -> Decision:
        """Let a new, returning or paused worker take part from clock `first` on, in all keys.

        `firsts` has the first clocks of keys that differ. A worker that takes part already, and has no push in flight,
        moves to the new clock. If one clock is not free any more, the reason is TOO_LATE, and nothing has changed.
        """
        group_id = self.rules.group_of(worker)
        starts = {key: (firsts or {}).get(key, first) for key in self._keys}
        free = (self._first_free(state, group_id, worker) <= starts[key] for key, state in self._keys.items())
        if not all(free):
            return Decision((), TOO_LATE)
        alone = group_id not in self._members
        self._members.setdefault(group_id, set()).add(worker)
        self._paused.discard(worker)
        self._round.add(worker)
        actions: list[Action] = []
        for key, state in self._keys.items():
            group = state.groups.setdefault(group_id, _Group(0))
            if alone:
                group.seen = state.version
            state.starts[worker] = starts[key]
            state.read[worker] = state.version
            self._advance(key, state, group_id, actions)
            self._answer_held(key, state, actions)
        return Decision(tuple(actions), JOINED)

    def waits_for_release(self, worker: int, key: int) -> bool:
        """Return whether the next round of a worker's group is gathered and waits for `release`."""
        group = self._keys[key].groups.get(self.rules.group_of(worker))
        return group is not None and group.gates.get(group.clock, False)

    def missing(self, worker: int, key: int, clock: int) -> dict[int, int]:
        """Return the workers that a pull of `worker` at `clock` waits for, each with the clock it must still push."""
        state = self._keys[key]
        group_id = self.rules.group_of(worker)
        if group_id not in self._members:
            return {}
        group = state.groups[group_id]
        if group.clock < clock:
            arrived = group.rounds.get(group.clock, {})
            return {w: group.clock for w in sorted(self._required(state, group_id, group.clock)) if w not in arrived}
        if self._within_bound(state, clock):
            return {}
        needed = clock - (self.rules.bound or 0)
        behind: dict[int, int] = {}
        for other in self._members:
            at = state.groups[other].clock
            if at < needed:
                arrived = state.groups[other].rounds.get(at, {})
                behind |= {w: at for w in sorted(self._required(state, other, at)) if w not in arrived}
        return behind

    def _advance(self, key: int, state: _Key, group_id: int, actions: list[Action]) -> None:
        """Apply every complete round of a group, then answer the pulls which that releases."""
        group = state.groups[group_id]
        before = group.clock
        while self._required(state, group_id, group.clock) <= group.rounds.get(group.clock, {}).keys():
            if group.clock in group.gates:
                if not group.gates[group.clock]:
                    group.gates[group.clock] = True
                    parts = self._contributions(state, group.rounds[group.clock])
                    absent = group.absent.get(group.clock, 0.0)
                    actions.append(Gathered(key, group_id, group.clock, parts, absent))
                break
            if group.clock in group.rounds:
                self._apply(key, state, group, actions)
            else:  # no pushes are expected: all members joined later, at later clocks
                group.clock = min([*group.rounds, *(state.starts[worker] for worker in self._members[group_id])])
        if state.starts:
            self._forget_reached(state, group_id)
        if group.clock != before and state.held:
            self._answer_held(key, state, actions)

    def _forget_reached(self, state: _Key, group_id: int) -> None:
        """Forget the first clocks of workers that their group has reached: the group's clock now says the same."""
        clock = state.groups[group_id].clock
        for worker in self._members[group_id]:
            if state.starts.get(worker, clock + 1) <= clock:
                del state.starts[worker]

    def _first_free(self, state: _Key, group_id: int, worker: int) -> int:
        """Return the first clock of a key that is neither final in the worker's group nor pushed by the worker."""
        group = state.groups.get(group_id)
        if group is None:
            return 0
        final = group.clock + group.gates.get(group.clock, False)
        return max([final, *(clock + 1 for clock, arrived in group.rounds.items() if worker in arrived)])

    def _apply(self, key: int, state: _Key, group: _Group, actions: list[Action], scale: float = 1.0) -> None:
        parts = self._contributions(state, group.rounds.pop(group.clock))
        absent = group.absent.pop(group.clock, 0.0)
        if parts:
            divisor = self._divisor(state, group, parts)
            state.version += 1
            group.seen = state.version
            actions.append(Apply(key, group.clock, parts, divisor, state.version, absent, scale))
        group.clock += 1

    def _contributions(self, state: _Key, arrived: dict[int, float | None]) -> tuple[Contribution, ...]:
        return tuple(
            Contribution(worker, arrived[worker], state.version - state.read.get(worker, 0))
            for worker in sorted(arrived)
            if arrived[worker] != 0
        )

    def _divisor(self, state: _Key, group: _Group, parts: tuple[Contribution, ...]) -> float:
        if self.rules.divisor is Divisor.ONE:
            return 1
        if self.rules.divisor is Divisor.STALENESS:
            return max(1, state.version - group.seen + 1)
        known = [part.samples for part in parts if part.samples is not None]
        if len(known) < len(parts):
            return 1  # gradients that are added without weights are added in BSP, too
        samples = sum(known)
        typical = samples / len(known)  # for workers that have not pushed yet
        others = self._round.difference(part.worker for part in parts)
        return (samples + sum(state.samples.get(worker, typical) for worker in others)) / samples

    def _answer_held(self, key: int, state: _Key, actions: list[Action]) -> None:
        for worker, clock in list(state.held):
            if state.groups[self.rules.group_of(worker)].clock >= clock and self._within_bound(state, clock):
                del state.held[worker, clock]
                actions.append(self._reply(key, state, worker, clock))

    def _reply(self, key: int, state: _Key, worker: int, clock: int) -> Reply:
        state.read[worker] = state.version
        return Reply(key, worker, clock, state.version)

    def _required(self, state: _Key, group_id: int, clock: int) -> set[int]:
        members = self._members[group_id]
        if not state.starts:
            return members
        return {worker for worker in members if state.starts.get(worker, 0) <= clock}

    def _within_bound(self, state: _Key, clock: int) -> bool:
        return self.rules.bound is None or clock - self._slowest(state) <= self.rules.bound

    def _slowest(self, state: _Key) -> int:
        return min(state.groups[group].clock for group in self._members)
