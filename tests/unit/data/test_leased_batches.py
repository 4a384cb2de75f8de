"""Loaders whose batches are leased: they wait for a lease only when the consumer has used every batch before it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from sample_images import NUM_RECORDS, jpeg, make_records, picture, write_records
from torch import Tensor

from echelon.data.images.config import AugmentConfig
from echelon.data.loading.device import DeviceLoader, DeviceMemoryLoader
from echelon.data.loading.loader import Batches, Loader
from echelon.data.loading.memory import MemoryLoader, MemorySource
from echelon.data.loading.order import BatchPlan, Sampling, State
from echelon.data.loading.sources import RecordSource

pytestmark = pytest.mark.numeric

CONFIG = AugmentConfig(shape=(3, 24, 32), random_crop=True, random_mirror=True)
CPU = torch.device("cpu")
SAMPLING = Sampling(NUM_RECORDS, 4, seed=3)


class Leases:
    """Plans from leases. The next one comes when all batches before it are used, as at the end of an epoch."""

    def __init__(self, leases: list[list[tuple[int, int]]], sampling: Sampling = SAMPLING, epoch: int = 1) -> None:
        self._leases = iter(leases)
        self._order = sampling.order(epoch)
        self._epoch = epoch
        self._ready: list[tuple[int, int]] = []
        self.taken = self.used = 0
        self.lost = 0  # of the batches that were taken last

    def drop_lost(self, limit: int) -> int:
        dropped, self.lost = min(limit, self.lost), 0
        self.taken -= dropped
        return dropped

    def take(self, *, wait: bool) -> BatchPlan | None:
        if not self._ready:
            if not wait:
                return None
            assert self.used == self.taken, "it waits for a lease, but holds batches that nobody has used"
            self._ready = list(next(self._leases, []))
            if not self._ready:
                return None
        start, stop = self._ready.pop(0)
        self.taken += 1
        positions = np.arange(start, stop, dtype=np.int64)
        return BatchPlan(self._epoch, self._order[start:stop], positions, State(self._epoch, stop), (0, self.taken))


def read(batches: Batches, leases: Leases) -> Iterator[tuple[Tensor, Tensor, tuple[int, int]]]:
    for images, labels in batches:
        assert batches.plan is not None
        positions = batches.plan.counters
        leases.used += 1
        yield images.clone(), labels, (int(positions[0]), int(positions[-1]) + 1) if len(positions) else (0, 0)


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> RecordSource:
    return RecordSource(make_records(tmp_path_factory.mktemp("records") / "some.rec"))


def of_loader(source: RecordSource, leases: Leases) -> Batches:
    return Loader(source, CONFIG, SAMPLING, threads=2, plans=leases)


def of_device_loader(source: RecordSource, leases: Leases) -> Batches:
    inner = Loader(source, CONFIG, SAMPLING, threads=2, output="uint8", plans=leases)
    return DeviceLoader(inner, CONFIG, CPU)


def of_memory(source: RecordSource, leases: Leases) -> Batches:
    return MemoryLoader(_in_memory(), CONFIG, SAMPLING, plans=leases)


def of_device_memory(source: RecordSource, leases: Leases) -> Batches:
    return DeviceMemoryLoader(_in_memory(), CONFIG, SAMPLING, CPU, plans=leases)


def _in_memory() -> MemorySource:
    images = np.stack([picture(number, 40, 40) for number in range(NUM_RECORDS)])
    return MemorySource(images, np.arange(NUM_RECORDS, dtype=np.int64))


MAKERS = pytest.mark.parametrize("make", [of_loader, of_device_loader, of_memory, of_device_memory])


@MAKERS
def test_batches_are_those_of_the_leases_and_none_is_waited_for_too_early(
    records: RecordSource, make: Callable[[RecordSource, Leases], Batches]
) -> None:
    given = [[(0, 4), (8, 11)], [(4, 4)], [(11, 14), (4, 8)]]
    leases = Leases(given)
    with closing(make(records, leases)) as batches:
        found = list(read(batches, leases))
    flat = [batch if batch[1] > batch[0] else (0, 0) for lease in given for batch in lease]
    assert [positions for _, _, positions in found] == flat
    order = SAMPLING.order(1)
    for images, labels, (start, stop) in found:
        assert len(images) == stop - start
        assert labels.tolist() == [int(number) for number in order[start:stop]]


@MAKERS
def test_the_pixels_of_a_leased_batch_are_those_of_the_same_positions_without_leases(
    records: RecordSource, make: Callable[[RecordSource, Leases], Batches]
) -> None:
    parts = []
    for lease in ([[(2, 6)]], [[(2, 4), (4, 6)]]):
        leases = Leases(lease)
        with closing(make(records, leases)) as batches:
            parts.append(torch.cat([images for images, _, _ in read(batches, leases)]))
    assert torch.equal(*parts)


def test_batches_that_were_read_ahead_are_dropped_when_their_lease_is_lost(records: RecordSource) -> None:
    leases = Leases([[(0, 4), (4, 8), (8, 12), (12, 14)]])
    with closing(Loader(records, CONFIG, SAMPLING, threads=1, prefetch=3, plans=leases)) as batches:
        found = []
        for _, _, positions in read(batches, leases):
            found.append(positions)
            if len(found) == 1:
                leases.lost = 2
    assert found == [(0, 4), (12, 14)]


def test_a_leased_batch_of_bad_records_is_an_empty_batch_because_its_step_must_be_made(tmp_path: Path) -> None:
    source = RecordSource(write_records(tmp_path / "bad.rec", [b"no", b"no", jpeg(picture(1))]))
    sampling = Sampling(3, 2, shuffle=False)
    leases = Leases([[(0, 2), (2, 3)]], sampling)
    with Loader(source, CONFIG, sampling, threads=2, plans=leases, skip_bad_records=True) as batches:
        assert [labels.tolist() for _, labels, _ in read(batches, leases)] == [[], [2]]


@pytest.mark.parametrize("on_device", [False, True])
def test_bad_records_of_leases_are_counted_once_where_the_plans_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, on_device: bool
) -> None:
    source = RecordSource(write_records(tmp_path / "bad.rec", [b"no", jpeg(picture(1)), b"no", jpeg(picture(2))]))
    sampling = Sampling(4, 2, shuffle=False)
    leases = Leases([[(0, 2)], [(2, 4)], [], [(0, 2)]], sampling)
    inner = Loader(source, CONFIG, sampling, threads=2, output="uint8", plans=leases, skip_bad_records=True)
    with closing(DeviceLoader(inner, CONFIG, CPU) if on_device else inner) as batches:
        counts = []
        for _ in range(2):
            caplog.clear()
            assert all(len(labels) == 1 for _, labels, _ in read(batches, leases))
            counts.append([line for line in caplog.messages if line.startswith("bad records")])
    assert counts == [[f"bad records skipped in this epoch: {count}"] for count in (2, 1)]
