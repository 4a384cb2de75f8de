"""Which rounds a server that was rebuilt from its workers takes as applied."""

from __future__ import annotations

import struct

import pytest

from echelon.cluster.messages import Configure, Contents, Offer, Part
from echelon.cluster.placement import KeySpec, Layout
from echelon.errors import JobError
from echelon.schemes import Apply, Engine
from echelon.server.shard.shard import Shard
from echelon.server.slices.recovery import Recovery, rebuild

LAYOUT = Layout(1)
(SLOT,) = LAYOUT.place([KeySpec("a", (10,), "float32")])


def offer(
    answered: int,
    version: int,
    clocks: dict[int, int] | None = None,
    *,
    before: tuple[int, dict[int, int]] | None = None,
    joined: int = 0,
    part: Part = Part.ACTIVE,
) -> Offer:
    """`clocks`: the rounds of each group that the weights of the worker contain; with `before`, in part."""
    contents = [Contents(version, clocks or {}, [SLOT.key], before)] if version else []
    return Offer(1, LAYOUT.segments, [SLOT], None, [answered], contents, [joined], part)


def shard_of(store: str, offers: dict[int, Offer]) -> Shard:
    """Return a server that was rebuilt from offers. The weights of each worker are its rank."""
    server = Shard(0, 1, dict.fromkeys(sorted(offers), ""), lambda *_: None, lambda _: None)
    recovery = Recovery(offers)
    recovery.config = Configure(1, 0, store, 3 if store == "dist_ssync" else None, None, "share")
    for worker, one in offers.items():
        recovery.add(worker, one, [memoryview(struct.pack("f", worker) * SLOT.padded)] if one.slots else [])
    rebuild(server, recovery, None)
    return server


def engine_of(store: str, offers: dict[int, Offer]) -> Engine:
    """Return the engine of a server that was rebuilt from offers."""
    requests = shard_of(store, offers).requests
    assert requests is not None
    return requests.engine


def clocks_of(store: str, offers: dict[int, Offer]) -> dict[int, int]:
    engine = engine_of(store, offers)
    return engine.clocks(SLOT.key)


def test_what_was_answered_is_applied() -> None:
    assert clocks_of("dist_async", {0: offer(3, 5, {0: 3, 1: 2}), 1: offer(2, 4, {0: 2, 1: 2})}) == {0: 3, 1: 2}


def test_a_push_that_the_weights_of_another_worker_contain_is_not_applied_again() -> None:
    assert clocks_of("dist_async", {0: offer(3, 6, {0: 3, 1: 3}), 1: offer(2, 4, {0: 2, 1: 2})}) == {0: 3, 1: 3}


def test_of_pushes_without_an_answer_those_in_the_weights_are_applied_and_no_others() -> None:
    offers = {0: offer(3, 5, {0: 3, 1: 1, 2: 1}), 1: offer(1, 2, {0: 1, 1: 1}), 2: offer(0, 6, {0: 3, 1: 1, 2: 2})}
    assert clocks_of("dist_async", offers) == {0: 3, 1: 1, 2: 2}


def test_updates_of_a_worker_that_has_left_are_not_taken_for_those_of_others() -> None:
    """It cannot say how many it has made. One that comes in its place does not repeat its clocks."""
    engine = engine_of("dist_async", {0: offer(3, 9, {0: 3, 1: 2, 2: 4}), 1: offer(2, 4, {0: 1, 1: 2, 2: 1})})
    assert any(isinstance(action, Apply) for action in engine.push(0, SLOT.key, 3, 1.0).actions)
    assert any(isinstance(action, Apply) for action in engine.push(1, SLOT.key, 2, 1.0).actions)
    assert engine.next_clocks(2)[SLOT.key] == 4


def test_clocks_that_a_worker_skipped_when_it_joined_hide_no_update() -> None:
    """Worker 1 joined at clock 50. The weights of worker 0 contain a push of it that was not answered."""
    offers = {0: offer(3, 7, {0: 3, 1: 54}), 1: offer(53, 6, {0: 3, 1: 53}, joined=50)}
    assert clocks_of("dist_async", offers) == {0: 3, 1: 54}


def test_a_push_without_a_pull_that_was_answered_is_not_applied_again() -> None:
    assert clocks_of("dist_async", {0: offer(5, 3, {0: 3}), 1: offer(0, 0)}) == {0: 5, 1: 0}


def test_a_group_in_lock_step_has_applied_what_one_member_was_told() -> None:
    assert clocks_of("dist_sync", {0: offer(4, 4, {0: 4}), 1: offer(3, 3, {0: 3})}) == {0: 4}


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
    engine = engine_of(store, {0: offer(5, 5), 1: offer(7, 5, joined=7)})
    assert engine.is_active(1)
    assert engine.clock(0, 0) == 5
    assert any(isinstance(action, Apply) for action in engine.push(0, 0, 5, 1.0).actions), "nobody waits for worker 1"
    engine.push(0, 0, 6, 1.0)
    engine.push(0, 0, 7, 1.0)
    assert any(isinstance(action, Apply) for action in engine.push(1, 0, 7, 1.0).actions)


def test_a_worker_that_has_begun_since_it_joined_knows_the_rounds() -> None:
    engine = engine_of("dist_sync", {0: offer(8, 8), 1: offer(9, 9, joined=7)})
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


def weight_of(server: Shard) -> float:
    (value,) = set(server.storage.weights(LAYOUT.pieces(SLOT, 0)[0]).tolist())
    return float(value)


def test_a_late_worker_gives_its_initial_values_to_no_server() -> None:
    """Nobody has pushed yet, so all have version 0."""
    assert weight_of(shard_of("dist_sync", {0: offer(0, 0, part=Part.LATE), 1: offer(0, 0)})) == 1.0


def test_weights_that_only_late_workers_could_give_are_lost() -> None:
    new = Offer(1, [], [], None, [], [], [], Part.LATE)
    with pytest.raises(JobError, match="the weights of slice 0 are lost"):
        shard_of("dist_sync", {0: new, 1: offer(0, 0, part=Part.LATE)})
    returned = offer(4, 4, {0: 4}, part=Part.LATE)  # it was removed while it was stopped, and has read the weights
    assert weight_of(shard_of("dist_sync", {0: new, 1: returned})) == 1.0


BEFORE = (4, {0: 2, 1: 2})


def test_weights_that_were_written_in_part_are_not_taken_if_others_are_as_new_as_they_were_before() -> None:
    offers = {0: offer(2, 5, {0: 3, 1: 2}, before=BEFORE), 1: offer(2, 4, {0: 2, 1: 2})}
    assert weight_of(shard_of("dist_async", offers)) == 1
    assert clocks_of("dist_async", offers) == {0: 2, 1: 2}, "the push of worker 0 is repeated"


def test_weights_that_were_written_in_part_are_taken_if_all_others_are_older_and_no_round_is_applied_twice() -> None:
    offers = {0: offer(2, 5, {0: 3, 1: 2}, before=BEFORE), 1: offer(1, 3, {0: 2, 1: 1})}
    assert weight_of(shard_of("dist_async", offers)) == 0
    assert clocks_of("dist_async", offers) == {0: 3, 1: 2}
    engine = engine_of("dist_async", offers)
    assert engine.version(SLOT.key) == 5
    assert engine.push(0, SLOT.key, 2, None).actions == (), "it is a part of the weights"


def test_of_weights_that_were_all_written_in_part_the_round_counts() -> None:
    parts = {rank: offer(2, 3, {0: 3}, before=(2, {0: 2})) for rank in (0, 1)}
    assert clocks_of("dist_sync", parts) == {0: 3}


def test_completely_written_weights_come_before_those_of_the_same_round_in_part() -> None:
    offers = {0: offer(2, 3, {0: 3}, before=(2, {0: 2})), 1: offer(2, 3, {0: 3})}
    assert weight_of(shard_of("dist_sync", offers)) == 1
    assert clocks_of("dist_sync", offers) == {0: 3}
