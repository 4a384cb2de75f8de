"""The rate of all workers: the sum of their rates over one common window."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.bench.dlbs.window import (
    Window,
    WorkerTimes,
    check_complete,
    common_window,
    results,
    throughput,
)
from echelon.errors import DataError

SECONDS = st.floats(0.001, 10.0)


def worker(rank: int, batch_size: int, seconds: list[float]) -> WorkerTimes:
    return WorkerTimes(rank, batch_size, tuple(itertools.accumulate(seconds)))


@st.composite
def overlapping(draw: st.DrawFn) -> tuple[list[WorkerTimes], int]:
    """Workers whose measured batches overlap, and the number of warm-up batches."""
    num_warmup = draw(st.integers(0, 3))
    count = num_warmup + draw(st.integers(1, 6))
    found = [
        worker(rank, draw(st.integers(1, 64)), draw(st.lists(st.floats(0.9, 1.0), min_size=count, max_size=count)))
        for rank in range(draw(st.integers(1, 4)))
    ]
    warm = max(one.ends[num_warmup - 1] if num_warmup else 0.0 for one in found)
    if warm >= min(one.ends[-1] for one in found):
        found = found[:1]
    return found, num_warmup


@given(st.integers(1, 64), SECONDS, st.integers(2, 20), st.integers(1, 8))
def test_equal_workers_have_the_rate_of_one_times_their_number(
    batch: int, seconds: float, count: int, num_workers: int
) -> None:
    workers = [worker(rank, batch, [seconds] * count) for rank in range(num_workers)]
    rate = throughput(workers, common_window(workers, 1))
    assert rate == pytest.approx(num_workers * batch / seconds)


@given(overlapping())
def test_the_rate_is_a_sum_and_each_part_lies_between_the_slowest_and_the_fastest_batch(
    case: tuple[list[WorkerTimes], int],
) -> None:
    workers, num_warmup = case
    window = common_window(workers, num_warmup)
    rates = [one.rate(window) for one in workers]
    assert throughput(workers, window) == pytest.approx(sum(rates))
    for one, rate in zip(workers, rates, strict=True):
        times = one.batch_ms(num_warmup)
        assert one.batch_size * 999.99 / max(times) <= rate <= one.batch_size * 1000.01 / min(times)


@given(overlapping(), st.floats(0.1, 100.0))
def test_a_clock_that_runs_faster_scales_all_rates(case: tuple[list[WorkerTimes], int], factor: float) -> None:
    workers, num_warmup = case
    faster = [WorkerTimes(one.rank, one.batch_size, tuple(end * factor for end in one.ends)) for one in workers]
    rate = throughput(workers, common_window(workers, num_warmup))
    assert throughput(faster, common_window(faster, num_warmup)) == pytest.approx(rate / factor)


@given(overlapping())
def test_batches_until_grows_from_nothing_to_all(case: tuple[list[WorkerTimes], int]) -> None:
    (first, *_), _ = case
    moments = [first.ends[-1] * tenth / 10 for tenth in range(10)]
    counts = [first.batches_until(moment) for moment in (*moments, first.ends[-1])]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (0.0, len(first.ends))
    for index, end in enumerate(first.ends, 1):
        assert first.batches_until(end) == index


def test_a_slow_worker_counts_with_its_own_rate() -> None:
    """Three times the rate of rank 0, as DLBS computes it, would be 300 samples per second."""
    workers = [worker(0, 10, [0.1] * 90), worker(1, 10, [0.1] * 90), worker(2, 10, [0.3] * 90)]
    assert throughput(workers, common_window(workers, 3)) == pytest.approx(100 + 100 + 100 / 3)


def test_warm_up_is_not_measured() -> None:
    slow_start = worker(0, 8, [5.0, 3.0, 0.5, 0.5])
    found = results([slow_start], num_warmup=2, num_batches=2)
    assert found["results.time"] == 500.0
    assert found["results.throughput"] == 16.0
    assert found["results.time_data"] == [500.0, 500.0]
    assert found["results.worker_time_data"] == [[500.0, 500.0]]


def test_without_warm_up_the_first_batch_counts() -> None:
    assert results([worker(0, 8, [1.0, 0.5])], num_warmup=0, num_batches=2)["results.time"] == 750.0


def test_workers_that_never_ran_together_have_no_rate() -> None:
    workers = [worker(0, 8, [0.1] * 4), worker(1, 8, [1.0] * 4)]
    with pytest.raises(DataError, match=r"no common window: worker 1 ended its warm-up after 1.000 s, when worker 0"):
        common_window(workers, 1)
    assert common_window([workers[0]], 1) == pytest.approx(Window(0.1, 0.4))


def test_too_few_batches_are_an_error() -> None:
    with pytest.raises(DataError, match="worker 3 ran 2 of 5 batches: the data has too few samples"):
        check_complete([worker(3, 8, [0.1, 0.1])], num_warmup=1, num_batches=4)
    with pytest.raises(DataError, match="no worker reported"):
        check_complete([], 0, 1)
