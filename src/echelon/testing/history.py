"""Checks the history of a run: what workers were told, against what servers did. Pure: it reads events only.

    report = check(run_dir)
    assert not report.problems, report

`observe.history` says which events there are. The updates of a slice are read as a chain: version v of a key is the
update that the server made which stored the slice last. A backup makes the same updates as its primary; when it becomes
the primary, its own ones are the chain. The checks, each on every key:

lost       a push that a worker was told to be applied is not in the chain
twice      the push of a worker and clock is in the chain twice
gap        a version is missing in the chain
differs    a backup made another update than its primary, or its weights have another digest
bound      a pull was answered although its worker was too many rounds ahead
missed     samples of a complete epoch that no step has trained
repeated   samples of an epoch that two steps have trained
unnamed    a gradient that does not say which samples it is of, if all steps of the program have samples of a ledger

A step that was applied to some keys only, because its worker died between its pushes, is partial. It is counted, and
another step has to train its samples.

A server without a backup that died while it wrote new weights to workers leaves an update in part. The server after it
says which update of which keys that is; it is counted, and belongs to the chain.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from echelon.observe.events import EventReader
from echelon.observe.history import from_ranges

LOST, TWICE, GAP, DIFFERS = "lost", "twice", "gap", "differs"
BOUND, MISSED, REPEATED, UNNAMED = "bound", "missed", "repeated", "unnamed"
Event = Mapping[str, Any]
Place = tuple[int, int]  # store and slice
Work = tuple[int, int, int, int]  # ledger, epoch, start, stop
_Push = tuple[Place, int, int, int]  # place, key, worker, clock


class Problem(NamedTuple):
    """Something that must not happen."""

    kind: str
    text: str


class Part(NamedTuple):
    """The gradient of one worker in an update."""

    worker: int
    works: tuple[Work, ...]


class Update(NamedTuple):
    """An update of a key, with a digest of the weights after it."""

    clock: int
    parts: tuple[Part, ...]
    digest: int = 0


@dataclass
class Report:
    """What was found, and how much was checked."""

    problems: list[Problem] = field(default_factory=list)
    acked: int = 0  # pushes of keys
    updates: int = 0  # of keys, without those of backups
    answers: int = 0
    steps: int = 0  # with samples of a ledger
    partial_steps: int = 0
    updates_in_part: int = 0  # of keys
    epochs: int = 0  # complete ones
    longest_pause_s: float = 0.0  # without an update on any server
    update_times: list[float] = field(default_factory=list, repr=False)

    def pause_between(self, begin: float = -math.inf, end: float = math.inf, others: Sequence[float] = ()) -> float:
        """Return the longest time without an update that overlaps an interval of time.

        Pauses in which something else happened, at the times `others`, do not count.
        """
        gaps = [(a, b) for a, b in itertools.pairwise(self.update_times) if b >= begin and a <= end]
        return max((b - a for a, b in gaps if not any(a <= other <= b for other in others)), default=0.0)

    def count(self, kind: str) -> int:
        """Return the number of problems of a kind."""
        return sum(problem.kind == kind for problem in self.problems)


@dataclass
class _Instance:
    """What one process did with one slice of one store. `original_since` is None while it is a backup's copy."""

    original_since: int | None
    updates: dict[int, dict[int, Update]] = field(default_factory=lambda: defaultdict(dict))  # key -> version -> …
    copied: dict[int, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))  # as a backup: … -> event


Chain = dict[int, dict[int, Update]]  # key -> version -> its update


def check(run_dir: Path, *, num_samples: int | None = None, ended: bool = True, all_named: bool = False) -> Report:
    """Check the events of a run. `num_samples`: of an epoch; None: as many as the works say.

    `ended`: the run has trained all epochs, so that the last one is complete, too. `all_named`: all gradients are of
    samples of a ledger. Not every program is such: it may make steps without `samples`, too.
    """
    return check_events(EventReader(run_dir).poll(), num_samples=num_samples, ended=ended, all_named=all_named)


def check_events(
    events: Sequence[Event], *, num_samples: int | None = None, ended: bool = True, all_named: bool = False
) -> Report:
    """Check a list of events; see `check`."""
    report = Report()
    instances = _instances(events, report)
    acked = _acked(events)
    chains = {place: _chain(of_place, place, report) for place, of_place in instances.items()}
    _add_updates_in_part(events, chains, acked, report)
    for place, chain in chains.items():
        for key, made in chain.items():
            _check_chain(key, made, place, report)
    _check_acked(acked, chains, report)
    _check_bounds(events, report)
    _check_samples(chains, report, num_samples, ended)
    if all_named:
        _check_named(chains, report)
    report.update_times = sorted(event["at"] for event in events if _makes_updates(event))
    report.longest_pause_s = report.pause_between()
    return report


def _makes_updates(event: Event) -> bool:
    return event["event"] == "history" and bool(event.get("updates")) and not event["copy"]


# --- the updates of servers


def _instances(events: Sequence[Event], report: Report) -> dict[Place, list[_Instance]]:
    """Return the processes that stored each slice, in the order in which they became its primary."""
    found: dict[tuple[Place, str, int], _Instance] = {}
    for number, event in enumerate(events):
        if event["event"] not in ("history_store", "history", "history_role"):
            continue
        place = event["store"], event["slice"]
        one = found.setdefault((place, event["who"], event["pid"]), _Instance(None if event["copy"] else number))
        if not event["copy"] and one.original_since is None:
            one.original_since = number
        for keys, clock, version, parts, *digest in event.get("updates", ()):
            update = Update(clock, tuple(Part(worker, tuple(map(tuple, works))) for worker, works in parts), *digest)
            for key in from_ranges(keys):
                report.updates += not event["copy"]
                _add(one, key, version, update, place, report)
                if event["copy"]:
                    one.copied[key][version] = number
    by_place: dict[Place, list[_Instance]] = defaultdict(list)
    for (place, _, _), one in found.items():
        by_place[place].append(one)
    return {place: sorted(many, key=_tenure) for place, many in by_place.items()}


def _tenure(one: _Instance) -> float:
    return float("inf") if one.original_since is None else one.original_since


def _add(one: _Instance, key: int, version: int, update: Update, place: Place, report: Report) -> None:
    if version in one.updates[key]:
        report.problems.append(Problem(TWICE, f"{_named(place, key)}: version {version} was made twice by one server"))
    one.updates[key][version] = update


def _chain(instances: Sequence[_Instance], place: Place, report: Report) -> Chain:
    """Return the updates that the last primary's weights consist of."""
    chain: Chain = {}
    for one in instances:
        if one.original_since is None:
            continue
        for key, made in one.updates.items():
            first = min(made)
            chain[key] = {v: update for v, update in chain.get(key, {}).items() if v < first} | made
    for one in instances:
        _compare_copy(one, instances, place, report)
    return chain


def _add_updates_in_part(
    events: Iterable[Event], chains: Mapping[Place, Chain], acked: Mapping[_Push, tuple[Work, ...]], report: Report
) -> None:
    """Add the updates to the chains that a server died in, and that its last record therefore does not have."""
    for event in events:
        if event["event"] != "history_rebuilt":
            continue
        place = event["store"], event["slice"]
        for keys, version, rounds in event["in_part"]:
            pushes = [(worker, clock) for worker, first, end in rounds for clock in range(first, end)]
            for key in from_ranges(keys):
                made = chains[place].setdefault(key, {})
                known = {(part.worker, update.clock) for update in made.values() for part in update.parts}
                told = [push for push in pushes if push not in known and (place, key, *push) in acked]
                clocks = sorted({clock for _, clock in told}, reverse=True) or [0]
                for made_before, clock in enumerate(clocks):
                    workers = [worker for worker, other in told if other == clock]
                    parts = tuple(Part(worker, acked[place, key, worker, clock]) for worker in workers)
                    made.setdefault(version - made_before, Update(clock, parts))
                report.updates_in_part += 1


def _compare_copy(copy: _Instance, instances: Sequence[_Instance], place: Place, report: Report) -> None:
    """Compare what a server did as a backup with what the primary of that time did, also if it was promoted later."""
    for key, versions in copy.copied.items():
        for version, number in versions.items():
            primaries = [one for one in instances if one is not copy and _tenure(one) <= number]
            original = primaries[-1].updates[key].get(version) if primaries else None
            update = copy.updates[key][version]
            if original is not None and original != update:
                text = f"{_named(place, key)}: version {version} is {original} on the primary and {update} on a backup"
                report.problems.append(Problem(DIFFERS, text))


def _check_chain(key: int, made: dict[int, Update], place: Place, report: Report) -> None:
    if missing := sorted(set(range(1, max(made) + 1)) - set(made)):
        report.problems.append(Problem(GAP, f"{_named(place, key)}: versions {_short(missing)} are missing"))
    counts = Counter((part.worker, update.clock) for update in made.values() for part in update.parts)
    for (worker, clock), count in counts.items():
        if count > 1:
            text = f"{_named(place, key)}: the push of worker {worker}, clock {clock}, was applied {count} times"
            report.problems.append(Problem(TWICE, text))


# --- what workers were told


def _acked(events: Iterable[Event]) -> dict[_Push, tuple[Work, ...]]:
    """Return the pushes that workers were told to be applied, with their samples."""
    found = {}
    for event in events:
        if event["event"] == "history_acked":
            worker = int(event["who"].split()[1])
            for number, keys, clock, works in event["pushes"]:
                for key in from_ranges(keys):
                    found[(event["store"], number), key, worker, clock] = tuple(map(tuple, works))
    return found


def _check_acked(acked: Iterable[_Push], chains: Mapping[Place, Chain], report: Report) -> None:
    applied = {
        place: {
            (key, part.worker, update.clock)
            for key, made in chain.items()
            for update in made.values()
            for part in update.parts
        }
        for place, chain in chains.items()
    }
    for place, key, worker, clock in acked:
        report.acked += 1
        if (key, worker, clock) not in applied.get(place, ()):
            text = f"{_named(place, key)}: worker {worker} was told that its push of clock {clock} was applied"
            report.problems.append(Problem(LOST, text))


class _Bounds:
    """The clocks of the groups of one slice, as far as its updates and answers tell them."""

    def __init__(self, bound: int | None) -> None:
        self._bound = bound
        self._groups: dict[int, int] = {}  # active worker -> group
        self._clocks: dict[tuple[int, int], int] = {}  # (key, group) -> rounds applied since it became active

    def read(self, event: Event) -> list[str]:
        """Take an event of the slice. Return what exceeded the bound."""
        if "active" in event:
            self._change_members(dict(event["active"]))
        for keys, clock, _, parts, *_ in event.get("updates", ()):
            for worker, _ in parts:
                self._note(keys, worker, clock + 1)
        for keys, worker, clock, _ in event.get("answers", ()):  # all of them, because they are of one moment
            self._note(keys, worker, clock)
        return [text for answer in event.get("answers", ()) for text in self._answer(*answer)]

    def _change_members(self, groups: dict[int, int]) -> None:
        """Forget the clocks of groups whose members change: such a group can skip rounds that nobody has to push."""
        changed = {group for _, group in self._groups.items() ^ groups.items()}
        self._groups = groups
        self._clocks = {place: clock for place, clock in self._clocks.items() if place[1] not in changed}

    def _note(self, keys: str, worker: int, clock: int) -> None:
        if (group := self._groups.get(worker)) is not None:
            for key in from_ranges(keys):
                self._clocks[key, group] = max(clock, self._clocks.get((key, group), 0))

    def _answer(self, keys: str, worker: int, clock: int, ahead: int) -> list[str]:
        if worker not in self._groups or self._bound is None:
            return []
        problems = []
        for key in from_ranges(keys):
            slowest = min(known for (other, _), known in self._clocks.items() if other == key)
            furthest = max(ahead, clock - slowest)
            if furthest > self._bound:
                problems.append(f"worker {worker} got key {key} at clock {clock}, {furthest} rounds ahead")
        return problems


def _check_bounds(events: Iterable[Event], report: Report) -> None:
    slices: dict[tuple[Place, str, int], _Bounds] = {}
    for event in events:
        if event["event"] not in ("history_store", "history"):
            continue
        place = event["store"], event["slice"]
        instance = place, event["who"], event["pid"]
        if event["event"] == "history_store":
            slices[instance] = _Bounds(event["bound"])
        elif instance in slices:
            report.answers += len(event.get("answers", ()))
            found = slices[instance].read(event)
            report.problems += [Problem(BOUND, f"store {place[0]}, slice {place[1]}: {text}") for text in found]


# --- which samples were trained


def _check_samples(chains: Mapping[Place, Chain], report: Report, num_samples: int | None, ended: bool) -> None:
    keys: dict[int, set[tuple[int, int]]] = defaultdict(set)  # store -> (slice, key) that steps update
    steps: dict[tuple[int, int, int], tuple[set[tuple[int, int]], tuple[Work, ...]]] = {}  # store, worker, clock
    for (store, number), chain in chains.items():
        for key, made in chain.items():
            for update in made.values():
                for part in update.parts:
                    if part.works:
                        keys[store].add((number, key))
                        step = steps.setdefault((store, part.worker, update.clock), (set(), part.works))
                        step[0].add((number, key))
    works: list[tuple[int, Work]] = []
    for (store, _, _), (updated, of_step) in steps.items():
        report.steps += 1
        if updated == keys[store]:
            works += [(store, work) for work in of_step]
        else:
            report.partial_steps += 1
    _check_epochs(works, report, num_samples, ended)


def _check_named(chains: Mapping[Place, Chain], report: Report) -> None:
    """Check that every gradient names its samples. An empty step has no part in an update."""
    for place, chain in chains.items():
        for key, made in chain.items():
            for update in made.values():
                for part in update.parts:
                    if not part.works:
                        text = f"{_named(place, key)}: the gradient of worker {part.worker}, clock {update.clock}"
                        report.problems.append(Problem(UNNAMED, f"{text}, names no samples"))


def _check_epochs(works: Sequence[tuple[int, Work]], report: Report, num_samples: int | None, ended: bool) -> None:
    epochs: dict[tuple[int, int], dict[int, list[tuple[int, int]]]] = defaultdict(lambda: defaultdict(list))
    for store, (ledger, epoch, start, stop) in works:
        if stop > start:
            epochs[store, ledger][epoch].append((start, stop))
    for (store, ledger), by_epoch in epochs.items():
        size = num_samples or max(stop for intervals in by_epoch.values() for _, stop in intervals)
        last = max(by_epoch)
        for epoch, intervals in sorted(by_epoch.items()):
            is_complete = epoch < last or ended
            report.epochs += is_complete
            named = f"store {store}, ledger {ledger}, epoch {epoch}"
            _check_epoch(named, sorted(intervals), size if is_complete else None, report)


def _check_epoch(named: str, intervals: Sequence[tuple[int, int]], size: int | None, report: Report) -> None:
    """Check that sorted intervals do not overlap and, if the epoch is complete, that they cover its samples."""
    at = 0
    for start, stop in intervals:
        if start > at and size is not None:
            report.problems.append(Problem(MISSED, f"{named}: samples {at} to {start - 1} were not trained"))
        if start < at:
            text = f"{named}: samples {start} to {min(stop, at) - 1} were trained twice"
            report.problems.append(Problem(REPEATED, text))
        at = max(at, stop)
    if size is not None and at < size:
        report.problems.append(Problem(MISSED, f"{named}: samples {at} to {size - 1} were not trained"))


def _named(place: Place, key: int) -> str:
    return f"store {place[0]}, slice {place[1]}, key {key}"


def _short(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:5])) + (" …" if len(numbers) > 5 else "")
