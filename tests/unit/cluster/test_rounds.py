"""How the pool is divided: leases, lock-step blocks, and batches by speed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from echelon.cluster.ledger.intervals import IntervalSet
from echelon.cluster.ledger.rounds import Speeds, sizes_of, take_block, take_lease


def test_a_round_has_the_samples_of_one_worker_with_a_batch_of_all() -> None:
    pool = IntervalSet([(0, 100)])
    shares = take_block(pool, sizes_of([0, 2], 10))
    assert shares == {0: [(0, 10), (20, 30), (40, 50), (60, 70)], 2: [(10, 20), (30, 40), (50, 60), (70, 80)]}
    assert list(pool) == [(80, 100)]


def test_the_last_round_divides_what_is_left_evenly() -> None:
    assert take_block(IntervalSet([(0, 7)]), sizes_of([0, 1, 2], 5)) == {0: [(0, 3)], 1: [(3, 5)], 2: [(5, 7)]}


def test_a_worker_can_get_an_empty_batch_in_the_last_round() -> None:
    shares = take_block(IntervalSet([(0, 2)]), sizes_of([0, 1, 2], 5))
    assert shares == {0: [(0, 1)], 1: [(1, 2)], 2: [(0, 0)]}


def test_leases_become_smaller_towards_the_end_of_an_epoch() -> None:
    pool = IntervalSet([(0, 100)])
    sizes = []
    while pool:
        sizes.append(len(take_lease(pool, 5, 1 / 2)))
    assert sizes == [4, 4, 3, 2, 1, 1, 1, 1, 1, 1, 1]


def test_a_slow_worker_gets_smaller_leases_at_the_end_of_an_epoch() -> None:
    speeds = Speeds()
    assert speeds.share(0, [0, 1]) == 1 / 2
    for worker, seconds in ((0, 1.0), (1, 4.0)):
        speeds.measure(worker, 4, seconds)
    assert speeds.share(1, [0, 1]) == 1 / 5
    sizes = [len(take_lease(IntervalSet([(0, 20)]), 1, speeds.share(worker, [0, 1]))) for worker in (0, 1)]
    assert sizes == [4, 2]


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), min_size=1, max_size=6),
    st.integers(1, 5),
    st.integers(1, 7),
)
def test_blocks_use_every_position_once(holes: list[tuple[int, int]], workers: int, batch_size: int) -> None:
    pool = IntervalSet(holes)
    expected = [position for start, stop in pool for position in range(start, stop)]
    taken: list[int] = []
    while pool:
        shares = take_block(pool, sizes_of(range(workers), batch_size))
        assert len({len(batches) for batches in shares.values()}) == 1, "all workers make the same number of steps"
        batches = [batch for share in shares.values() for batch in share]
        assert all(stop - start <= batch_size for start, stop in batches)
        taken += [position for start, stop in batches for position in range(start, stop)]
    assert sorted(taken) == expected


@given(st.dictionaries(st.integers(0, 9), st.floats(1e-3, 1e6), min_size=1), st.integers(1, 512))
def test_sizes_by_speed_keep_the_samples_of_a_round(speeds: dict[int, float], batch_size: int) -> None:
    sizes = sizes_of(sorted(speeds), batch_size, speeds)
    assert sum(sizes.values()) == batch_size * len(speeds)
    assert min(sizes.values()) >= 1
    assert all(sizes[a] <= sizes[b] + 1 for a in speeds for b in speeds if speeds[a] <= speeds[b])


def test_a_worker_with_a_third_of_the_speed_gets_a_third_of_the_samples() -> None:
    assert sizes_of([0, 1, 2], 70, {0: 300.0, 1: 300.0, 2: 100.0}) == {0: 90, 1: 90, 2: 30}


def test_batches_are_equal_until_all_speeds_are_known() -> None:
    assert sizes_of([0, 1], 8, {0: 3.0}) == {0: 8, 1: 8}


def test_speeds_are_smoothed_and_ignore_measurements_without_time() -> None:
    speeds = Speeds()
    for samples, seconds in ((100, 1.0), (300, 1.0), (5, 0.0), (0, 1.0), (1, float("inf"))):
        speeds.measure(3, samples, seconds)
    assert speeds.by_worker == {3: 200.0}
    speeds.forget(3)
    assert not speeds.by_worker


def test_a_slow_worker_leaves_the_last_batches_to_the_others() -> None:
    speeds = Speeds()
    for worker, speed in ((0, 30.0), (1, 30.0), (2, 30.0), (3, 10.0)):
        speeds.measure(worker, int(speed), 1.0)
    idle = dict.fromkeys(range(4), 0)
    assert not speeds.others_finish_sooner(3, batch=10, pool=200, held=idle), "enough for everybody"
    assert speeds.others_finish_sooner(3, batch=10, pool=40, held=idle), "the others need half of its second"
    busy = {0: 40, 1: 40, 2: 40, 3: 0}
    assert not speeds.others_finish_sooner(3, batch=10, pool=10, held=busy), "the others are busy for longer"
    assert not any(speeds.others_finish_sooner(worker, 10, 10, idle) for worker in range(3)), "a fast one takes it"


def test_equal_workers_do_not_wait_for_each_other_because_of_noise() -> None:
    speeds = Speeds()
    speeds.measure(0, 105, 1.0)
    speeds.measure(1, 100, 1.0)
    assert not speeds.others_finish_sooner(1, batch=10, pool=10, held={0: 0, 1: 0})


def test_no_batch_is_above_the_limit_and_a_round_has_as_many_samples_as_before() -> None:
    """The job began with 2 workers; a third one joins, which is much faster."""
    speeds = {0: 1.0, 1: 1.0, 2: 100.0}
    assert sizes_of([0, 1, 2], 16, speeds)[2] > 32
    sizes = sizes_of([0, 1, 2], 16, speeds, limit=32)
    assert sizes == {0: 8, 1: 8, 2: 32}
    assert sizes_of([0, 1, 2], 1, speeds, limit=1) == {0: 1, 1: 1, 2: 1}
