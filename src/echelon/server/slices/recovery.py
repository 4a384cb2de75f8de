"""Rebuilding a shard whose server was lost and had no backup: the workers have its weights, a file its optimizer state.

Every worker offers what it has: for each key, how many of its rounds were answered, the weights, and which rounds of
all workers they contain, as the last answer said. The new server takes each key from the worker whose weights are the
newest, and continues with the rounds that follow those in them. Updates that no worker has seen are lost; the pushes
that were not answered are repeated by their workers. The optimizer's state comes from
the last file that the lost server wrote (`state_file`), and is therefore some updates old.

A worker that was paused, had retired or had not joined the rounds yet is that again: it does not push now.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from operator import itemgetter
from typing import NamedTuple

from echelon.cluster.messages import UNREAD, Configure, Contents, Offer, Part, Request
from echelon.cluster.placement import Slot
from echelon.errors import JobError, UsageError
from echelon.schemes.rules import Rules
from echelon.server.optimizer.kernel import NO_STEP
from echelon.server.shard.shard import Shard
from echelon.server.slices.state_file import SavedState
from echelon.server.storage.execute import Task, Update, WeightedGradient
from echelon.server.storage.memory import Mapped, Window


class HeldRequest(NamedTuple):
    """A request that waits until the shard is rebuilt."""

    worker: int
    request: Request
    body: bytes
    frames: Sequence[memoryview]


class Recovery:
    """What the workers have offered of one store so far."""

    def __init__(self, expected: Collection[int]) -> None:
        self.config: Configure | None = None
        self.held: list[HeldRequest] = []
        self.offers: dict[int, tuple[Offer, Sequence[memoryview]]] = {}
        self._missing = set(expected)

    def take_config(self, config: Configure) -> None:
        """Take what a worker says about the store. One that joins may not know its groups and its bound yet."""
        if self.config is None or _num_settings(config) > _num_settings(self.config):
            self.config = config

    def add(self, worker: int, offer: Offer, frames: Sequence[memoryview]) -> None:
        """Take the offer of a worker."""
        self.offers[worker] = offer, frames
        self._missing.discard(worker)

    def remove(self, worker: int) -> None:
        """Stop waiting for a worker that left, and forget its offer."""
        self.offers.pop(worker, None)
        self._missing.discard(worker)
        self.held = [one for one in self.held if one.worker != worker]

    @property
    def missing(self) -> list[int]:
        """The workers that have not said what they have."""
        return sorted(self._missing)

    @property
    def is_complete(self) -> bool:
        """Whether all workers have said what they have."""
        return bool(self.offers) and not self._missing


def _num_settings(config: Configure) -> int:
    return (config.groups is not None) + (config.staleness is not None)


class Recovered(NamedTuple):
    """What a recovery found."""

    num_keys: int
    num_in_part: int  # keys whose last update the workers have only in part
    num_updates_old: int | None  # of the optimizer's state; None: there was no file, and it starts from zero


def rebuild(shard: Shard, recovery: Recovery, saved: SavedState | None) -> Recovered:
    """Give an empty shard the newest weights of the workers, their clocks, and the saved state of the optimizer."""
    assert recovery.config is not None
    if all(offer.part is Part.LATE and not offer.contents for offer, _ in recovery.offers.values()):
        raise JobError(
            f"the weights of slice {shard.rank} are lost, because its server and all workers that had them died; start "
            "the job with --replicas 1, and resume from a checkpoint"
        )
    shard.configure(recovery.config)
    requests = shard.requests
    assert requests is not None
    offers = {worker: offer for worker, (offer, _) in recovery.offers.items() if offer.slots}
    slots = {slot.key: slot for offer in offers.values() for slot in offer.slots}
    if tables := [slot.spec.name for slot in slots.values() if slot.spec.row_sparse]:
        raise JobError(
            f"slice {shard.rank} was lost with the row-sparse key {tables[0]!r}, of which no worker has all rows; "
            "start the job with --replicas 1, and resume from a checkpoint"
        )
    for worker, offer in offers.items():
        shard.layout.adopt(offer.segments, offer.slots)
        if offer.optimizer is not None:
            shard.optimization.set_optimizer(offer.optimizer)
        recovery.offers[worker] = offer, recovery.offers[worker][1]
    for key in slots:
        requests.lanes.add(key)
        shard.optimization.add(key)
    _take_weights(shard, recovery, slots)
    contents = {key: _newest(offers, key)[1] for key in slots}
    versions = {key: one.version for key, one in contents.items()}
    parts = {worker: offer.part for worker, (offer, _) in recovery.offers.items()}
    requests.engine.load_plain(engine_state(requests.engine.rules, offers, contents, parts))
    for worker, firsts in _not_begun(offers).items():
        if not requests.join(worker, max(firsts.values()), firsts):
            requests.engine.join(worker, max(requests.next_clocks(worker).values()))
    for worker in shard.workers:
        if parts.get(worker, Part.LATE) is Part.LATE:
            shard.gathering.admit(worker)
    requests.activity.num_updates = max(versions.values(), default=0)
    requests.work.is_complete = False
    for worker, offer in offers.items():
        if offer.norm is not None:
            requests.know_norm(worker, *offer.norm)
    in_part = {key: one for key, one in contents.items() if one.before is not None}
    if shard.history is not None and in_part:
        group_of = {worker: requests.engine.rules.group_of(worker) for worker in shard.workers}
        shard.history.rebuilt([(key, one.version, _rounds_in_part(one, group_of)) for key, one in in_part.items()])
    counts = len(slots), len(in_part)
    if not shard.optimization.has_optimizer or not slots:
        return Recovered(*counts, 0)
    if saved is None or not saved.fits(slots):
        return Recovered(*counts, None)
    try:
        shard.states.fill(saved.entries, saved.frames)
    except UsageError as error:
        print(f"the saved state of slice {shard.rank} is not used: {error}", file=sys.stderr, flush=True)
        return Recovered(*counts, None)
    shard.optimization.load_plain({key: saved.progress.get(key, {}) for key in slots})
    return Recovered(*counts, max((versions[key] - saved.versions.get(key, 0) for key in slots), default=0))


def _take_weights(shard: Shard, recovery: Recovery, slots: Mapping[int, Slot]) -> None:
    """Write each key's weights from the worker that has the newest."""
    offers = {worker: offer for worker, (offer, _) in recovery.offers.items() if offer.slots}
    windows: dict[int, Window] = {}
    for worker, offer in offers.items():
        keys = [slot.key for slot in offer.slots]
        try:
            windows[worker] = shard.tensors.incoming(Mapped(), keys, recovery.offers[worker][1], True)
        except UsageError as error:
            raise JobError(f"worker {worker} offers weights that do not fit slice {shard.rank}: {error}") from error
    shard.storage.reserve(list(slots))
    for key in slots:
        gradient = WeightedGradient(windows[_newest(offers, key)[0]], 1.0)
        shard.storage.run([Task((key,), Update((gradient,), None, NO_STEP), ())])


def _newest(offers: Mapping[int, Offer], key: int) -> tuple[int, Contents]:
    """Return the worker with the newest weights of a key, and what they contain.

    Weights that were written in part count as what they were before. If there are no others as new as that, they are
    taken: the rounds that they contain in part are not applied again, so no element gets a round twice.

    Its rounds stand for a version that it does not know. Otherwise they do not count: a round may make no update. What
    a late worker has before its first read are its own initial values, which the servers did not take.
    """
    found = []
    for worker, offer in offers.items():
        seen = next((one for one in offer.contents if key in one.keys), UNREAD)
        for index, slot in enumerate(offer.slots):
            if slot.key == key:
                rounds = offer.answered[index] if _has_begun(offer, index) else 0
                rank = seen.complete_version, seen.before is None, rounds, offer.part is not Part.LATE, -worker
                found.append((rank, seen))
    (_, _, rounds, _, negative), seen = max(found, key=itemgetter(0))
    return -negative, seen if seen.version else Contents(rounds, seen.clocks)


def _rounds_in_part(contents: Contents, group_of: Mapping[int, int]) -> list[tuple[int, int, int]]:
    """Return the rounds of each worker that are in a part of some weights only: worker, the first, the end."""
    _, before = contents.before or (0, {})
    return [
        (worker, before.get(group, 0), contents.clocks[group])
        for worker, group in group_of.items()
        if before.get(group, 0) < contents.clocks.get(group, 0)
    ]


def engine_state(
    rules: Rules,
    offers: Mapping[int, Offer],
    contents: Mapping[int, Contents],
    parts: Mapping[int, Part],
) -> dict[str, object]:
    """Return the state of the scheme: each group has applied what its weights contain, and what a member was told.

    `contents`: of the weights, by key. `parts`: of all workers, with keys or without. Workers that have joined and not
    begun are added later.
    """
    begun = [worker for worker, part in parts.items() if part is Part.ACTIVE and worker not in _not_begun(offers)]
    members: dict[int, list[int]] = {}
    for worker in sorted(begun):
        members.setdefault(rules.group_of(worker), []).append(worker)
    group_of = {worker: rules.group_of(worker) for worker, part in parts.items() if part is not Part.LATE}
    return {
        "members": members,
        "paused": sorted(worker for worker, part in parts.items() if part is Part.PAUSED),
        "round": sorted(group_of),
        "keys": {
            key: {
                "version": has.version,
                "groups": {
                    number: [clock, has.version] for number, clock in _clocks(offers, key, group_of, has.clocks).items()
                },
                "read": dict.fromkeys(parts, has.version),
                "samples": {},
                "starts": {},
            }
            for key, has in contents.items()
        },
    }


def _has_begun(offer: Offer, index: int) -> bool:
    """Return whether a worker was told of rounds of a key since it joined. Before, its clock may be of the future."""
    return not offer.joined or not offer.joined[index] or offer.answered[index] > offer.joined[index]


def _not_begun(offers: Mapping[int, Offer]) -> dict[int, dict[int, int]]:
    """Return the active workers that have joined others and were told of no round since, with their first clocks."""
    return {
        worker: {slot.key: offer.joined[index] for index, slot in enumerate(offer.slots)}
        for worker, offer in offers.items()
        if offer.part is Part.ACTIVE and offer.slots and not any(_has_begun(offer, i) for i in range(len(offer.slots)))
    }


def _clocks(
    offers: Mapping[int, Offer], key: int, group_of: Mapping[int, int], contained: Mapping[int, int]
) -> dict[int, int]:
    """Return how many rounds of a key each group has applied.

    `contained`: the rounds in the weights, by group. Rounds of pushes without a pull may be answered and not in them.
    Groups whose workers have left are kept, because one that returns must not repeat their clocks.
    """
    clocks = dict.fromkeys(group_of.values(), 0) | dict(contained)
    for worker, offer in offers.items():
        group = group_of.get(worker)
        for index, slot in enumerate(offer.slots):
            if slot.key == key and group is not None and _has_begun(offer, index):
                clocks[group] = max(clocks[group], offer.answered[index])
    return clocks
