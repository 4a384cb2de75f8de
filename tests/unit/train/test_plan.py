"""The arithmetic of a run: epochs, batches and shares."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from echelon.data.loading.order import State
from echelon.environment import Job
from echelon.errors import UsageError
from echelon.train.flags.arguments import options_from
from echelon.train.flags.check import check_flags
from echelon.train.recipe.options import TrainOptions
from echelon.train.recipe.plan import (
    LargeBatch,
    ProcessRank,
    device_batch,
    epoch_size,
    large_batch_for,
    resume_line,
    sampling_for,
    schedule_for,
    sharding_for,
    state_at,
    worker_batch,
)
from echelon.train.script import make_parser


@pytest.mark.parametrize(
    ("examples", "workers", "batch", "size"),
    [(1281167, 1, 128, 10010), (1281167, 8, 128, 1252), (50000, 2, 128, 196), (60000, 3, 64, 313), (5, 8, 4, 1)],
)
def test_an_epoch_has_as_many_batches_as_in_mxnet(examples: int, workers: int, batch: int, size: int) -> None:
    assert epoch_size(examples, workers, batch) == size


def test_a_batch_is_divided_among_devices_or_rejected_with_valid_sizes() -> None:
    assert device_batch(256, 4) == 64
    with pytest.raises(UsageError, match="--batch-size 10 cannot be divided among 4 devices; use 8 or 12"):
        device_batch(10, 4)
    with pytest.raises(UsageError, match="--batch-size 3 cannot be divided among 4 devices; use 4"):
        device_batch(3, 4)


@pytest.mark.parametrize(
    ("given", "devices", "examples", "samples", "workers", "batch"),
    [
        (8, 4, 6, 6, 1, 4),  # not 6, which is not divisible by 4
        (8, 4, 3, 60000, 1, 4),  # at least one per device
        (8, 4, 64, 64, 1, 8),
        (2000, 4, None, 1437, 1, 1436),  # a small data set
        (128, 1, 16, 1437, 1, 16),
        (128, 2, 16, 1437, 3, 4),
        (128, 2, 1, 1437, 3, 2),
    ],
)
def test_a_batch_that_is_scaled_down_can_be_divided_among_devices(
    given: int, devices: int, examples: int | None, samples: int, workers: int, batch: int
) -> None:
    options = TrainOptions(batch_size=given, num_examples=examples, devices=("cpu",) * devices)
    assert worker_batch(options, samples, workers) == batch
    assert device_batch(batch, devices) >= 1


def test_fewer_samples_than_devices_are_rejected() -> None:
    options = TrainOptions(batch_size=8, devices=("cpu",) * 4)
    assert worker_batch(options, 8, 2) == 4
    with pytest.raises(UsageError, match="7 samples are too few for 8 devices"):
        worker_batch(options, 7, 2)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_step_of_several_processes_has_the_samples_of_one_process(size: int) -> None:
    options = TrainOptions(batch_size=16, num_examples=100)
    alone = sampling_for(options, 200, ProcessRank(0, 1), fixed=True)
    first = next(alone.batches(State()))
    parts = [sampling_for(options, 200, ProcessRank(rank, size, size), fixed=True) for rank in range(size)]
    assert {part.batch_size for part in parts} == {16 // size}
    assert {part.batches_per_epoch for part in parts} == {alone.batches_per_epoch} == {7}
    together = np.concatenate([next(part.batches(State())).records for part in parts])
    assert sorted(together) == sorted(first.records)


def test_without_fixed_steps_every_sample_is_used_once(tmp_path: object) -> None:
    parts = [sampling_for(TrainOptions(batch_size=8), 101, ProcessRank(rank, 3), fixed=False) for rank in range(3)]
    seen = np.concatenate([part.order(0)[part.counters()] for part in parts])
    assert sorted(seen) == list(range(101))


def test_the_devices_of_a_worker_divide_its_share(tmp_path: pytest.TempPathFactory) -> None:
    path = tmp_path / "shares"  # type: ignore[operator]
    path.write_text("0 0.25\n0.25 1\n")
    options = TrainOptions(data_allocator=1, data_sharding=str(path))
    parts = [sharding_for(options, ProcessRank(rank, 4, 2)).positions(1000) for rank in range(4)]
    assert [len(part) for part in parts] == [125, 125, 375, 375]
    assert sorted(np.concatenate(parts)) == list(range(1000))


def test_lbsgd_has_its_own_warm_up_and_macrobatch() -> None:
    """The rate of the schedule is the one that MXNet logs. A macrobatch is rounded up to whole steps of all workers."""
    options = TrainOptions(optimizer="LBSGD", lr=0.1, batch_size=8, macrobatch_size=50, warmup_epochs=2.0)
    made = schedule_for(options, ProcessRank(0, 2), 10, 0)
    assert {made.rate(update) for update in (1, 5, 30)} == {0.1}
    found = large_batch_for(replace(options, num_examples=100, kv_store="dist_sync"), 1000, 2)
    assert found == LargeBatch(4, 16, 100 / 16, 2.0, "linear")
    alone = large_batch_for(replace(options, macrobatch_size=0, warmup_epochs=None), 1000, 1)
    assert (alone.batch_scale, alone.warmup_epochs, alone.updates_per_epoch) == (1, 5.0, 125.0)
    assert large_batch_for(replace(options, kv_store="dist_async"), 1000, 2).batch_size == 8


def test_the_warm_up_by_norms_needs_lbsgd() -> None:
    def check(optimizer: str) -> None:
        flags = f"--optimizer {optimizer} --warmup-strategy lars --kv-store dist_sync --benchmark 1"
        given = make_parser(None).parse_args(flags.split())
        check_flags(given, options_from(given, "digits"), Job(num_workers=2, num_servers=2))

    check("LBSGD")
    with pytest.raises(UsageError, match="--warmup-strategy 'lars': use one of linear"):
        check("sgd")


def test_all_processes_resume_at_the_same_step_and_skip_no_sample() -> None:
    options = TrainOptions(batch_size=8)
    done = 5 * 8 * 2  # five steps of two workers
    for size in (1, 2, 3, 5):
        states = [
            state_at(sampling_for(options, 240, ProcessRank(rank, size), fixed=True), 4, done, size)
            for rank in range(size)
        ]
        assert len(set(states)) == 1
        assert states[0].epoch == 4
        assert done - 8 * size < states[0].position * size <= done
    whole = sampling_for(options, 240, ProcessRank(0, 1), fixed=True)
    assert state_at(whole, 4, 240, 1) == State(5, 0)


def test_a_resumed_run_says_which_samples_are_seen_again() -> None:
    assert resume_line(4, 0, State(4, 0), 3) is None
    assert resume_line(4, 144, State(4, 48), 3) == "resuming epoch 4 after 144 samples"
    again = "samples are seen again, because steps have another size now"
    assert resume_line(4, 144, State(4, 40), 3) == f"resuming epoch 4 after 120 samples; 24 {again}"
    assert resume_line(4, 144, State(4, 0), 3) == f"resuming epoch 4 after 0 samples; 144 {again}"
    skipped = "resuming with epoch 5: epoch 4 has no further step of this size after 239 samples"
    assert resume_line(4, 239, State(5, 0), 2) == skipped
