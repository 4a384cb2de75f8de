"""Sets decoded into memory give the same bits as the loader, on the CPU and on a device; data sets by name."""

from __future__ import annotations

import struct
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from sample_images import encoded, jpeg, make_records, picture, write_records

from digits import load_float_digits
from echelon.data.images.config import AugmentConfig
from echelon.data.loading.device import DeviceLoader, DeviceMemoryLoader
from echelon.data.loading.loader import Batches, Loader
from echelon.data.loading.memory import MemoryLoader, MemorySource
from echelon.data.loading.order import ByFraction, ByPart, Sampling, State
from echelon.data.loading.sources import FolderSource, RecordSource
from echelon.data.sets.builtin import SyntheticLoader
from echelon.data.sets.datasets import DataOptions, dataset_names, make_loader, open_dataset
from echelon.errors import DataError, UsageError

pytestmark = pytest.mark.numeric

CONFIG = AugmentConfig(
    shape=(3, 28, 28), random_crop=True, random_mirror=True, pad_size=4, fill_value=127,
    rgb_mean=(123.68, 116.779, 103.939), rgb_std=(3.0, 4.0, 5.0),
)  # fmt: skip
SAMPLING = Sampling(50, 8, seed=9, sharding=ByFraction(0.1, 0.9))
IMAGES = np.stack([picture(number, 32, 32) for number in range(50)])
SOURCE = MemorySource(IMAGES, np.arange(50) % 10)


def epochs(batches: Batches, count: int = 2) -> list[tuple[torch.Tensor, torch.Tensor]]:
    try:
        return [batch for _ in range(count) for batch in batches]
    finally:
        batches.close()


def same(some: Batches, other: Batches) -> bool:
    pairs = zip(epochs(some), epochs(other), strict=True)
    return all(torch.equal(x, u) and torch.equal(y, v) for (x, y), (u, v) in pairs)


@pytest.mark.parametrize("config", [CONFIG, CONFIG.for_validation(), replace(CONFIG, shape=(3, 32, 32))])
def test_memory_loader_and_loader_give_identical_batches(config: AugmentConfig) -> None:
    assert same(MemoryLoader(SOURCE, config, SAMPLING), Loader(SOURCE, config, SAMPLING, threads=2))


def test_device_memory_loader_gives_identical_batches() -> None:
    assert same(MemoryLoader(SOURCE, CONFIG, SAMPLING), DeviceMemoryLoader(SOURCE, CONFIG, SAMPLING, "cpu"))


def test_device_batches_are_channels_last_and_of_any_dtype() -> None:
    images, labels = epochs(DeviceMemoryLoader(SOURCE, CONFIG, SAMPLING, "cpu", torch.float16))[0]
    assert images.dtype == torch.float16
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert labels.dtype == torch.int64


def test_device_loader_normalises_on_the_device() -> None:
    config = replace(CONFIG, brightness=0.2)
    brought = DeviceLoader(Loader(SOURCE, config, SAMPLING, threads=2, output="uint8"), config, "cpu")
    assert same(brought, Loader(SOURCE, config, SAMPLING, threads=2))


def test_the_state_does_not_count_the_batch_ahead() -> None:
    loader = Loader(SOURCE, CONFIG, SAMPLING, threads=1, output="uint8")
    with closing(DeviceLoader(loader, CONFIG, "cpu")) as batches:
        states = [batches.state for _ in batches]
    assert states == [State(0, 8), State(0, 16), State(0, 24), State(0, 32), State(1, 0)]


@pytest.mark.parametrize(
    "make",
    [
        lambda state: MemoryLoader(SOURCE, CONFIG, SAMPLING, state=state),
        lambda state: DeviceMemoryLoader(SOURCE, CONFIG, SAMPLING, "cpu", state=state),
    ],
)
def test_resuming_in_mid_epoch(make: Callable[[State | None], Batches]) -> None:
    whole = epochs(make(None))
    first = make(None)
    for index, _ in enumerate(first):
        if index == 2:
            break
    rest = epochs(make(first.state))
    assert all(torch.equal(x, u) for (x, _), (u, _) in zip(whole[3:], rest, strict=False))


def test_a_kept_batch_of_the_memory_loader_is_never_overwritten() -> None:
    kept = [(images, images.clone()) for images, _ in epochs(MemoryLoader(SOURCE, CONFIG, SAMPLING), 4)]
    assert all(torch.equal(now, then) for now, then in kept)


def test_records_of_one_size_can_be_decoded_into_memory(tmp_path: Path) -> None:
    payloads = [encoded(IMAGES[number], "PNG") for number in range(12)]
    source = MemorySource.from_source(RecordSource(write_records(tmp_path / "small.rec", payloads)), threads=3)
    assert np.array_equal(source.images, IMAGES[:12])
    assert source.labels.tolist() == list(range(12))
    mixed = [*payloads, jpeg(picture(1, 40, 30))]
    with pytest.raises(DataError, match=r"record 12 at byte \d+: 30x40 pixels, but the first image has 32x32"):
        MemorySource.from_source(RecordSource(write_records(tmp_path / "mixed.rec", mixed)))


def test_make_loader_uses_loader_for_other_augmentations() -> None:
    assert isinstance(make_loader(SOURCE, CONFIG, SAMPLING), MemoryLoader)
    for config in (replace(CONFIG, max_random_h=9), replace(CONFIG, shape=(3, 64, 64)), replace(CONFIG, resize=20)):
        with pytest.raises(UsageError, match=r"use Loader"):
            MemoryLoader(SOURCE, config, SAMPLING)
        other = make_loader(SOURCE, config, SAMPLING, threads=1)
        assert isinstance(other, Loader)
        assert epochs(other, 1)[0][0].shape[1:] == config.shape


def test_digits_have_fixed_float_values() -> None:
    digits = open_dataset("digits")
    (images, labels), (held_out, _) = load_float_digits()
    batch = next(iter(make_loader(digits.train, digits.augment, Sampling(len(images), len(images), shuffle=False))))
    assert torch.equal(batch[0], images)
    assert torch.equal(batch[1], labels)
    assert digits.validation is not None
    assert len(digits.validation) == len(held_out)
    assert (digits.num_classes, digits.image_shape) == (10, (1, 8, 8))


def write_cifar(folder: Path, each: int = 4) -> None:
    folder.mkdir(parents=True)
    for name in [*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"]:
        rows = b"".join(bytes([number]) + IMAGES[number].transpose(2, 0, 1).tobytes() for number in range(each))
        (folder / name).write_bytes(rows)


@pytest.mark.parametrize("below", [".", "cifar10", "cifar-10-batches-bin"])
def test_cifar10_from_its_files(tmp_path: Path, below: str) -> None:
    write_cifar(tmp_path / "x" / below if below != "." else tmp_path / "x")
    cifar = open_dataset("cifar10", DataOptions(tmp_path / "x"))
    assert isinstance(cifar.train, MemorySource)
    assert np.array_equal(cifar.train.images, np.concatenate([IMAGES[:4]] * 5))
    assert (cifar.num_classes, cifar.image_shape, cifar.augment.pad_size) == (10, (3, 28, 28), 4)


def test_cifar10_from_records(tmp_path: Path) -> None:
    for name in ("cifar10_train.rec", "cifar10_val.rec"):
        write_records(tmp_path / name, [encoded(IMAGES[number], "PNG") for number in range(6)])
    cifar = open_dataset("cifar10", DataOptions(tmp_path, image_shape=(3, 32, 32)))
    assert isinstance(cifar.train, MemorySource)
    assert np.array_equal(cifar.train.images, IMAGES[:6])
    assert cifar.image_shape == (3, 32, 32)


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_mnist_from_its_files(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    folder.mkdir()
    for part, count in (("train", 7), ("t10k", 3)):
        head = struct.pack(">IIII", 0x803, count, 28, 28)
        (folder / f"{part}-images-idx3-ubyte").write_bytes(head + bytes(range(count)) * 784)
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 0x801, count) + bytes(range(count)))
    mnist = open_dataset(name, DataOptions(tmp_path))
    batch = next(iter(make_loader(mnist.train, mnist.augment, Sampling(7, 7, shuffle=False))))
    assert batch[0].shape == (7, 1, 28, 28)
    assert batch[0].max() == pytest.approx(6 / 255)
    assert batch[1].tolist() == list(range(7))


def test_class_folders(tmp_path: Path) -> None:
    for part, names in (("train", "ab"), ("val", "b")):
        for name in names:
            (tmp_path / part / name).mkdir(parents=True)
            (tmp_path / part / name / "1.jpg").write_bytes(jpeg(picture(1)))
            (tmp_path / part / name / "notes.txt").write_text("not an image")
    folder = open_dataset("folder", DataOptions(tmp_path))
    assert isinstance(folder.train, FolderSource)
    assert (folder.num_classes, folder.train.labels) == (2, [0, 1])
    assert isinstance(folder.validation, FolderSource)
    assert folder.validation.labels == [1]
    (tmp_path / "val" / "c").mkdir()
    with pytest.raises(DataError, match="class 'c'"):
        open_dataset("folder", DataOptions(tmp_path))


def test_imagenet_from_records(tmp_path: Path) -> None:
    make_records(tmp_path / "train.rec", 5)
    imagenet = open_dataset("imagenet", DataOptions(data_train=str(tmp_path / "train.rec")))
    assert (len(imagenet.train), imagenet.validation, imagenet.num_classes) == (5, None, 1000)
    counted = open_dataset("folder", DataOptions(tmp_path))
    assert (len(counted.train), counted.num_classes) == (5, 5)


def test_synthetic_batches_repeat() -> None:
    options = DataOptions(image_shape=(3, 9, 8), num_classes=4, num_examples=22)
    synthetic = open_dataset("synthetic", options)
    batches = make_loader(synthetic.train, synthetic.augment, Sampling(22, 5))
    assert isinstance(batches, SyntheticLoader)
    some = epochs(batches, 1)
    assert len(some) == len(batches) == 5
    assert all(images is some[0][0] for images, _ in some)
    assert some[0][0].shape == (5, 3, 9, 8)
    assert -1 <= float(some[0][0].min()) < -0.8
    assert int(some[0][1].max()) < 4
    assert batches.state == State(1, 0)


def test_a_worker_gets_its_share_of_synthetic_batches() -> None:
    synthetic = open_dataset("synthetic", DataOptions(image_shape=(3, 9, 8), num_classes=4, num_examples=640))
    sampling = Sampling(640, 32, sharding=ByPart(1, 2))
    assert len(make_loader(synthetic.train, synthetic.augment, sampling)) == sampling.batches_per_epoch == 10


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "mnist",
            r"no file train-images-idx3.*nowhere/mnist.*; download .*: echelon data get mnist --data-dir .*nowhere$",
        ),
        ("fashion-mnist", r"Fashion-MNIST: no file .*echelon data get fashion-mnist"),
        ("cifar10", r"no file data_batch_1\.bin .*nowhere.*echelon data get cifar10"),
        ("imagenet", r"no file train\.rec and no class folders in .*nowhere; create it: echelon data im2rec"),
        ("folder", r"no file train\.rec and no class folders in .*nowhere"),
    ],
)
def test_missing_data_errors_say_what_where_and_how_to_get_it(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        open_dataset(name, DataOptions(tmp_path / "nowhere"))


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(UsageError, match="did you mean 'cifar10'"):
        open_dataset("cifar")
    assert "digits" in dataset_names()
