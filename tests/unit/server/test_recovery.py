"""Which rounds a server that was rebuilt from its workers takes as applied."""

from __future__ import annotations

import pytest

from echelon.cluster.messages import Configure, Offer, Part
from echelon.cluster.placement import KeySpec, Layout
from echelon.schemes import Apply, Engine
from echelon.server.shard.shard import Shard
from echelon.server.slices.recovery import Recovery, _clocks, rebuild

LAYOUT = Layout(1)
(SLOT,) = LAYOUT.place([KeySpec("a", (10,), "float32")])


def offer(answered: int, version: int, unanswered: int = 0, *, joined: int = 0, part: Part = Part.ACTIVE) -> Offer:
    return Offer(1, LAYOUT.segments, [SLOT], None, [answered], [version], [unanswered], [joined], part)


def engine_of(store: str, offers: dict[int, Offer]) -> Engine:
    """Return the engine of a server that was rebuilt from offers."""
    server = Shard(0, 1, sorted(offers), lambda *_: None, lambda _: None)
    recovery = Recovery(offers)
    recovery.config = Configure(1, 0, store, 3 if store == "dist_ssync" else None, None, "share")
    weights = memoryview(bytes(4 * SLOT.padded))
    for worker, one in offers.items():
        recovery.add(worker, one, [weights])
    rebuild(server, recovery, None)
    assert server.requests is not None
    return server.requests.engine


def test_what_was_answered_is_applied() -> None:
    offers = {0: offer(3, 5), 1: offer(2, 4, unanswered=1)}
    assert _clocks(offers, SLOT.key, {0: 0, 1: 1}, version=5) == {0: 3, 1: 2}


def test_a_push_that_another_workers_version_contains_is_not_applied_again() -> None:
    offers = {0: offer(3, 6), 1: offer(2, 4, unanswered=1)}
    assert _clocks(offers, SLOT.key, {0: 0, 1: 1}, version=6) == {0: 3, 1: 3}


def test_where_it_is_not_known_which_push_was_applied_none_is_applied_twice() -> None:
    offers = {0: offer(3, 6), 1: offer(1, 2, unanswered=1), 2: offer(1, 2, unanswered=1)}
    assert _clocks(offers, SLOT.key, {0: 0, 1: 1, 2: 2}, version=6) == {0: 3, 1: 2, 2: 2}


def test_a_group_in_lock_step_has_applied_what_one_member_was_told() -> None:
    offers = {0: offer(4, 4), 1: offer(3, 3, unanswered=1)}
    assert _clocks(offers, SLOT.key, {0: 0, 1: 0}, version=4) == {0: 4}


def test_nobody_waits_for_a_worker_that_was_paused_had_retired_or_comes_late() -> None:
    """A worker that waits for samples of others says nothing until there are some."""
    for part in (Part.PAUSED, Part.RETIRED, Part.LATE):
        engine = engine_of("dist_ssync", {0: offer(74, 110), 1: offer(37, 90, part=part)})
        assert (engine.is_active(0), engine.is_active(1)) == (True, False)
        assert [one.actions for one in (engine.push(0, 0, 74, 1.0), engine.pull(0, 0, 75))] != [(), ()]
        assert engine.paused == ({1} if part is Part.PAUSED else set())


def test_a_paused_worker_resumes_at_the_clock_of_its_group() -> None:
    engine = engine_of("dist_sync", {0: offer(5, 5, part=Part.PAUSED), 1: offer(4, 4, part=Part.PAUSED)})
    for worker in (0, 1):
        engine.resume(worker)
    assert [engine.clock(worker, 0) for worker in (0, 1)] == [5, 5]


@pytest.mark.parametrize("store", ["dist_sync", "dist_ssync"])
def test_the_first_clock_of_a_worker_that_joined_and_has_not_begun_is_not_a_round(store: str) -> None:
    """It joins at a clock of the future. The push of the round before is not applied yet."""
    engine = engine_of(store, {0: offer(5, 5, unanswered=1), 1: offer(7, 5, joined=7)})
    assert engine.is_active(1)
    assert engine.clock(0, 0) == 5
    assert any(isinstance(action, Apply) for action in engine.push(0, 0, 5, 1.0).actions), "nobody waits for worker 1"
    engine.push(0, 0, 6, 1.0)
    engine.push(0, 0, 7, 1.0)
    assert any(isinstance(action, Apply) for action in engine.push(1, 0, 7, 1.0).actions)


def test_a_worker_that_has_begun_since_it_joined_knows_the_rounds() -> None:
    engine = engine_of("dist_sync", {0: offer(8, 8, unanswered=1), 1: offer(9, 9, joined=7)})
    assert engine.clock(0, 0) == 9


def test_the_settings_of_a_store_come_from_a_worker_that_has_them() -> None:
    known = Configure(1, 0, "dist_gsync", 3, [[0], [1]], "share")
    joining = Configure(1, 2, "dist_gsync", None, None, "share", late=True)
    for order in ([joining, known], [known, joining]):
        recovery = Recovery([0, 2])
        for config in order:
            recovery.take_config(config)
        assert recovery.config == known


def test_a_round_without_an_update_is_not_a_version() -> None:
    """A worker that joins skips rounds, so clocks may be ahead of versions."""
    engine = engine_of("dist_sync", {0: offer(8, 6), 1: offer(8, 6)})
    assert (engine.version(0), engine.clock(0, 0)) == (6, 8)
    unknown = engine_of("dist_sync", {0: offer(8, 0), 1: offer(8, 0)})
    assert unknown.version(0) == 8
