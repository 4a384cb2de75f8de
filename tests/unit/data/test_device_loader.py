"""Batches for a device: the values of the CPU's batches, and memory that is reused only after copies are done.

The device is the CPU, where nothing is copied, so the copies are simulated by objects that finish on request. If there
is a GPU, the same comparison runs on it too.
"""

from __future__ import annotations

import ctypes
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
import torch
from sample_images import NUM_RECORDS, jpeg, make_records, picture
from torch import Tensor

from echelon.data.images.config import AugmentConfig
from echelon.data.loading.buffers import BufferPool, CopiesInFlight
from echelon.data.loading.device import DeviceLoader
from echelon.data.loading.loader import Loader, mirrored
from echelon.data.loading.order import Sampling
from echelon.data.loading.sources import FolderSource, RecordSource, Source
from echelon.errors import UsageError

pytestmark = pytest.mark.numeric

PLAIN = AugmentConfig((3, 24, 32), random_crop=True, random_mirror=True, rgb_mean=(120.0, 115.0, 105.0))
CONFIGS = {
    "crop and mirror": PLAIN,
    "scaled pixels": replace(PLAIN, rgb_std=(50.0, 51.0, 52.0)),
    "padded": replace(PLAIN, pad_size=30, fill_value=9),
    "resized crop": replace(PLAIN, random_crop=False, random_resized_crop=True, min_random_area=0.2),
    "turned and sheared": replace(PLAIN, max_random_rotate_angle=20, max_random_shear_ratio=0.2),
    "recoloured": replace(PLAIN, brightness=0.3, contrast=0.3, saturation=0.3, max_random_h=20, pca_noise=0.1),
    "all": replace(PLAIN, max_random_rotate_angle=20, min_random_scale=0.6, contrast=0.3, max_random_l=20, pca_noise=1),
    "grey": AugmentConfig((1, 24, 32), random_mirror=True, rgb_mean=(120.0,)),
    "not mirrored": replace(PLAIN, random_mirror=False),
}  # fmt: skip
SAMPLING = Sampling(NUM_RECORDS, 5, seed=3)
DEVICES = ["cpu", *(["cuda:0"] if torch.cuda.is_available() else [])]


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> RecordSource:
    return RecordSource(make_records(tmp_path_factory.mktemp("records") / "some.rec"))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> FolderSource:
    folder = tmp_path_factory.mktemp("files")
    paths = [folder / f"{number}.jpg" for number in range(NUM_RECORDS)]
    for number, path in enumerate(paths):
        path.write_bytes(jpeg(picture(number)))
    return FolderSource(paths, [float(number % 7) for number in range(NUM_RECORDS)])


def on_device(
    source: Source, config: AugmentConfig, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> DeviceLoader:
    pinned = device.startswith("cuda")
    loader = Loader(source, config, SAMPLING, threads=2, output="uint8", pin_memory=pinned)
    return DeviceLoader(loader, config, device, dtype)


def two_epochs(batches: Loader | DeviceLoader) -> list[tuple[Tensor, Tensor]]:
    with closing(batches):
        return [(images.cpu(), labels.cpu()) for _ in range(2) for images, labels in batches]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CONFIGS)
def test_device_batches_equal_cpu_batches(records: RecordSource, name: str, device: str) -> None:
    config = CONFIGS[name]
    expected = two_epochs(Loader(records, config, SAMPLING, threads=2))
    for (images, labels), (floats, numbers) in zip(
        two_epochs(on_device(records, config, device)), expected, strict=True
    ):
        assert torch.allclose(images, floats, rtol=1e-6, atol=1e-4 if device != "cpu" else 0)
        assert torch.equal(labels, numbers)


def test_a_smaller_dtype_is_rounded_once(files: FolderSource) -> None:
    expected = two_epochs(Loader(files, CONFIGS["recoloured"], SAMPLING, threads=2))
    rounded = two_epochs(on_device(files, CONFIGS["recoloured"], dtype=torch.float16))
    assert all(torch.equal(x, y.half()) for (x, _), (y, _) in zip(rounded, expected, strict=True))


@pytest.mark.parametrize("name", ["resized crop", "all"])
def test_raw_batches_are_not_mirrored_and_say_what_to_mirror(records: RecordSource, name: str) -> None:
    config = CONFIGS[name]
    straight = replace(config, random_mirror=False)
    with (
        Loader(records, config, SAMPLING, threads=2, output="uint8") as batches,
        Loader(records, straight, SAMPLING, threads=2, output="uint8") as others,
    ):
        pairs = list(zip(batches.raw_batches(), others.raw_batches(), strict=True))
    assert all(torch.equal(batch.images, other.images) and other.mirrors is None for batch, other in pairs)
    mirrors = torch.cat([batch.mirrors for batch, _ in pairs if batch.mirrors is not None])
    assert len(mirrors) == NUM_RECORDS
    assert 0 < int(mirrors.sum()) < NUM_RECORDS


def test_only_the_marked_images_are_mirrored() -> None:
    images = torch.arange(2 * 3 * 4 * 3, dtype=torch.uint8).reshape(2, 3, 4, 3)
    some = mirrored(images, torch.tensor([False, True]))
    assert torch.equal(some[0], images[0])
    assert torch.equal(some[1, :, 0], images[1, :, 3])
    assert mirrored(images, None) is images


class Copy:
    """A simulated copy that is done when `done` is set, or when it is waited for."""

    def __init__(self) -> None:
        self.done = self.waited_for = False

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.done = self.waited_for = True


def take(pool: BufferPool) -> tuple[Tensor, int]:
    memory = pool.take()
    return memory, memory.data_ptr()


def test_memory_is_reused_only_after_its_copy_is_done() -> None:
    pool, copies_in_flight, first, second = BufferPool((4, 3), np.uint8, 5), CopiesInFlight(3), Copy(), Copy()
    memory, place = take(pool)
    copies_in_flight.hold(memory[:2], first)
    del memory
    other, other_place = take(pool)
    assert other_place != place, "the copy still reads the first buffer"
    copies_in_flight.hold(other, second)
    del other
    first.done = True
    third, third_place = take(pool)
    assert third_place not in (place, other_place), "nothing has checked yet whether the copy is done"
    copies_in_flight.hold(third, Copy())
    assert take(pool)[1] == place
    assert not first.waited_for


def test_with_too_many_copies_in_flight_the_oldest_is_waited_for() -> None:
    copies_in_flight, copies = CopiesInFlight(2), [Copy() for _ in range(4)]
    for copy in copies:
        copies_in_flight.hold(torch.empty(1), copy)
    assert [copy.waited_for for copy in copies] == [True, True, False, False]
    copies_in_flight.wait()
    assert all(copy.waited_for for copy in copies)


class LateCopy(Copy):
    """A simulated copy that reads the memory only when it is waited for, and does not keep it alive."""

    def __init__(self, memory: Tensor) -> None:
        super().__init__()
        self._place, self._size = memory.data_ptr(), memory.nbytes
        self._bytes = memory.numpy().tobytes()
        self.intact = False

    def synchronize(self) -> None:
        super().synchronize()
        self.intact = ctypes.string_at(self._place, self._size) == self._bytes


def test_threads_never_write_into_a_buffer_that_is_being_copied(records: RecordSource) -> None:
    copies_in_flight, copies, places = CopiesInFlight(2), [], set()
    with Loader(records, PLAIN, SAMPLING, threads=2, output="uint8") as batches:
        for _ in range(6):
            for batch in batches.raw_batches():
                copies.append(LateCopy(batch.images))
                copies_in_flight.hold(batch.images, copies[-1])
                places.add(batch.images.data_ptr())
        copies_in_flight.wait()
    assert len(copies) == 30
    assert all(copy.intact for copy in copies)
    assert len(places) <= 5


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_batches_for_a_gpu_are_in_pinned_memory_that_is_reused(records: RecordSource) -> None:
    places = set()
    with Loader(records, PLAIN, SAMPLING, threads=2, output="uint8", pin_memory=True) as batches:
        for _ in range(6):
            for batch in batches.raw_batches():
                assert batch.images.is_pinned()
                places.add(batch.images.data_ptr())
    assert len(places) <= 5


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_pinning_without_a_gpu_is_an_error(records: RecordSource) -> None:
    with pytest.raises(UsageError, match="needs a GPU, and this machine has none; leave pin_memory out"):
        Loader(records, PLAIN, SAMPLING, output="uint8", pin_memory=True)
