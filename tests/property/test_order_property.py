"""The order of samples, for any number of samples, workers, batches and epochs."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.data.loading.order import BatchPlan, ByFraction, ByPart, Sampling, Sharding, State, permutation, uniforms
from echelon.errors import UsageError

SIZES = st.integers(1, 300)
SEEDS = st.integers(0, 2**64 - 1)
EPOCHS = st.integers(0, 1000)
WORKERS = st.integers(1, 9)
PINNED_ORDER = [4, 8, 2, 5, 6, 0, 7, 9, 1, 11, 10, 3]
PINNED_DRAWS = [0.9210399564976706, 0.730601792641818, 0.39872308511446175]
CUTS = st.lists(st.integers(1, 99), max_size=6, unique=True)


def epoch_of(sampling: Sampling, epoch: int = 0) -> list[BatchPlan]:
    return list(islice(sampling.batches(State(epoch, 0)), sampling.batches_per_epoch))


def pairs(batch: BatchPlan) -> set[tuple[int, int]]:
    return set(zip(batch.counters.tolist(), batch.records.tolist(), strict=True))


def loads(size: int, shardings: list[Sharding], seed: int, batch: int) -> list[Sampling]:
    """Return a Sampling for each worker that has at least one sample."""
    return [Sampling(size, batch, seed, sharding=one) for one in shardings if len(one.positions(size))]


@settings(deadline=None)  # CI has two busy cores
@given(SEEDS, EPOCHS, SIZES)
def test_an_epoch_is_a_permutation(seed: int, epoch: int, size: int) -> None:
    assert sorted(permutation(seed, epoch, size)) == list(range(size))


@settings(deadline=None)
@given(SIZES, WORKERS, SEEDS, EPOCHS, st.integers(1, 40))
def test_every_sample_once_over_all_workers(size: int, workers: int, seed: int, epoch: int, batch: int) -> None:
    samplings = loads(size, [ByPart(rank, workers) for rank in range(workers)], seed, batch)
    seen = [record for one in samplings for step in epoch_of(one, epoch) for record in step.records.tolist()]
    assert sorted(seen) == list(range(size))


@settings(deadline=None)
@given(SIZES, CUTS, SEEDS, st.integers(1, 40))
def test_every_sample_once_over_unequal_shares(size: int, cuts: list[int], seed: int, batch: int) -> None:
    borders = [0.0, *(cut / 100 for cut in sorted(cuts)), 1.0]
    shares: list[Sharding] = [ByFraction(start, end) for start, end in pairwise(borders)]
    seen = [record for one in loads(size, shares, seed, batch) for step in epoch_of(one) for record in step.records]
    assert sorted(seen) == list(range(size))


@settings(deadline=None)
@given(st.integers(1, 60), WORKERS, st.integers(1, 8), SEEDS)
def test_many_workers_together_use_the_samples_of_one(steps: int, workers: int, batch: int, seed: int) -> None:
    """At each step, W workers with batches of B use the samples and counters of one worker with batches of W x B."""
    size = steps * workers * batch
    alone = epoch_of(Sampling(size, batch * workers, seed))
    parts = [epoch_of(Sampling(size, batch, seed, sharding=ByPart(rank, workers))) for rank in range(workers)]
    for step, whole in enumerate(alone):
        assert set().union(*(pairs(part[step]) for part in parts)) == pairs(whole)


@settings(deadline=None)
@given(SIZES, st.integers(1, 40), SEEDS, st.integers(0, 30), st.sampled_from(["keep", "wrap"]))
def test_resuming_from_any_state_gives_the_rest(size: int, batch: int, seed: int, skip: int, last: str) -> None:
    sampling = Sampling(size, batch, seed, last_batch=last)  # type: ignore[arg-type]
    whole = list(islice(sampling.batches(State()), skip + 5))
    state = whole[skip - 1].after if skip else State()
    for expected, got in zip(whole[skip:], sampling.batches(state), strict=False):
        assert expected.after == got.after
        assert np.array_equal(expected.records, got.records)
        assert np.array_equal(expected.counters, got.counters)


@settings(deadline=None)
@given(SEEDS, EPOCHS, st.lists(st.integers(0, 2**40), min_size=1, max_size=20), st.integers(1, 30))
def test_random_numbers_depend_only_on_the_counter(seed: int, epoch: int, counters: list[int], num: int) -> None:
    together = uniforms(seed, epoch, np.array(counters), num)
    assert together.min() >= 0
    assert together.max() < 1
    for row, counter in enumerate(counters):
        assert np.array_equal(uniforms(seed, epoch, np.array([counter]), num + 3)[0, :num], together[row])


def test_the_order_is_pinned() -> None:
    """If a version changed the order, machines would disagree, and checkpoints would resume at other samples."""
    assert permutation(7, 3, 12).tolist() == PINNED_ORDER
    assert uniforms(7, 3, np.array([5]), 3)[0].tolist() == PINNED_DRAWS


def test_epochs_and_seeds_differ() -> None:
    orders = {tuple(permutation(seed, epoch, 50)) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16


def test_random_numbers_are_uniform_and_uncorrelated() -> None:
    draws = uniforms(1, 2, np.arange(20000), 4)
    assert np.abs(draws.mean(0) - 0.5).max() < 0.01
    assert np.abs(draws.std(0) - 12**-0.5).max() < 0.01
    assert np.abs(np.corrcoef(draws.T) - np.eye(4)).max() < 0.03
    assert abs(np.corrcoef(draws[1:, 0], draws[:-1, 0])[0, 1]) < 0.03


def test_the_last_batch() -> None:
    assert [len(step.records) for step in epoch_of(Sampling(10, 4))] == [4, 4, 2]
    assert [len(step.records) for step in epoch_of(Sampling(10, 4, last_batch="drop"))] == [4, 4]
    wrapped = epoch_of(Sampling(10, 4, shuffle=False, last_batch="wrap"))
    assert [step.records.tolist() for step in wrapped] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1]]
    assert [len(step.records) for step in epoch_of(Sampling(10, 4, num_batches=5))] == [4] * 5
    assert [len(step.records) for step in epoch_of(Sampling(100, 4, num_batches=5))] == [4] * 5


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ByPart(2, 2), "part 2 of 2"),
        (lambda: ByFraction(0.5, 0.5), "0.5 0.5"),
        (lambda: Sampling(0, 4), "0 and 4"),
        (
            lambda: Sampling(3, 4, last_batch="drop"),
            r"no batch of 4 for this worker: it has 3 of 3 samples, and a smaller last batch is dropped; "
            r"use fewer workers or use a smaller batch size$",
        ),
        (
            lambda: Sampling(3, 1, sharding=ByPart(3, 4)),
            r"no batch of 1 for this worker: part 3 of 0 \.\.\. 3 has 0 of 3 samples; use fewer workers$",
        ),
        (
            lambda: Sampling(3, 1, sharding=ByPart(3, 4), num_batches=2),
            r"part 3 of 0 \.\.\. 3 has 0 of 3 samples; use fewer workers$",
        ),
        (
            lambda: Sampling(300, 30, sharding=ByFraction(0, 0.001)),
            r"no batch of 30 for this worker: its share 0 \.\.\. 0\.001 has 0 of 300 samples; "
            r"give it a larger share in the data_sharding file \(one sample is 1/300 of the data\)$",
        ),
        (
            lambda: Sampling(300, 31, sharding=ByFraction(0.9, 1), last_batch="drop"),
            r"its share 0\.9 \.\.\. 1 has 30 of 300 samples, and a .* dropped; give it a larger share .* or use",
        ),
        (lambda: Sampling(3, 1, last_batch="lose"), "'lose'"),  # type: ignore[arg-type]
    ],
)
def test_invalid_settings_are_rejected(make: Callable[[], object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()
