"""Published sets: which files belong to which set, and the errors for incomplete files."""

from __future__ import annotations

import gzip
import hashlib
import pickle
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from echelon.data.loading.memory import MemorySource
from echelon.data.pack.convert import convert_split
from echelon.data.records import RecordError
from echelon.data.sets.datasets import DataOptions, open_dataset
from echelon.data.sets.formats import FORMATS
from echelon.data.sets.published import PUBLISHED, Archive
from echelon.errors import DataError

CLASSES = {"mnist": [0, 1, 2], "fashion-mnist": [7, 8, 9], "mine": [4, 4, 4]}
HOME = {"mnist": "MNIST/raw", "fashion-mnist": "FashionMNIST/raw"}
OTHER = {"mnist": "fashion-mnist", "fashion-mnist": "mnist"}


def label_file(labels: list[int]) -> bytes:
    return struct.pack(">II", 0x801, len(labels)) + bytes(labels)


def write_idx(folder: Path, labels: list[int], packed: bool = False) -> Path:
    """Write both splits of a set; training has the labels twice, so that the splits differ."""
    folder.mkdir(parents=True, exist_ok=True)
    for part, those in (("train", labels * 2), ("t10k", labels)):
        images = struct.pack(">IIII", 0x803, len(those), 28, 28) + bytes(len(those) * 784)
        for name, data in ((f"{part}-images-idx3-ubyte", images), (f"{part}-labels-idx1-ubyte", label_file(those))):
            (folder / (f"{name}.gz" if packed else name)).write_bytes(gzip.compress(data) if packed else data)
    return folder


@pytest.fixture(autouse=True)
def published(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the published sets by sets of a few images."""
    for name in OTHER:
        digests = {
            f"{part}-labels-idx1-ubyte": hashlib.sha256(label_file(CLASSES[name] * times)).hexdigest()
            for part, times in (("train", 2), ("t10k", 1))
        }
        monkeypatch.setitem(PUBLISHED, name, replace(PUBLISHED[name], archives=(Archive("labels", digests),)))


def labels_of(name: str, folder: Path) -> list[int]:
    train = open_dataset(name, DataOptions(folder)).train
    assert isinstance(train, MemorySource)
    return sorted(set(train.labels.tolist()))


@pytest.mark.parametrize("name", OTHER)
def test_each_set_has_its_own_folder(tmp_path: Path, name: str) -> None:
    for below in (HOME[name], f"{name}/{HOME[name]}", name):
        folder = tmp_path / below.replace("/", "-")
        write_idx(folder / below, CLASSES[name])
        assert labels_of(name, folder) == CLASSES[name]
        with pytest.raises(DataError, match=rf"no file train-images.*echelon data get {OTHER[name]}"):
            open_dataset(OTHER[name], DataOptions(folder))
    write_idx(folder / HOME[OTHER[name]], CLASSES[OTHER[name]])
    assert labels_of(OTHER[name], folder) == CLASSES[OTHER[name]]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", OTHER)
def test_sets_with_the_same_file_names_are_not_confused(tmp_path: Path, name: str, packed: bool) -> None:
    plain = write_idx(tmp_path / "plain", CLASSES[name], packed)
    named = write_idx(tmp_path / "named" / OTHER[name], CLASSES[name], packed).parent
    assert labels_of(name, plain) == CLASSES[name]
    for folder in (plain, named):
        with pytest.raises(DataError, match=rf"train-labels.*: this is {name}, .*echelon data get {OTHER[name]} "):
            open_dataset(OTHER[name], DataOptions(folder))
    write_idx(plain / HOME[OTHER[name]], CLASSES[OTHER[name]])
    assert labels_of(OTHER[name], plain) == CLASSES[OTHER[name]]


def test_validation_files_of_the_other_set_are_detected(tmp_path: Path) -> None:
    write_idx(tmp_path, CLASSES["mnist"])
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(label_file(CLASSES["fashion-mnist"]))
    with pytest.raises(DataError, match=r"t10k-labels-idx1-ubyte: this is fashion-mnist"):
        open_dataset("mnist", DataOptions(tmp_path))


def test_unknown_files_belong_to_mnist_unless_their_folder_is_named_after_another_set(tmp_path: Path) -> None:
    write_idx(tmp_path, CLASSES["mine"])
    assert labels_of("mnist", tmp_path) == [4]
    with pytest.raises(DataError, match=r"train-labels.* may belong to MNIST, .* your own files in .*/fashion-mnist"):
        open_dataset("fashion-mnist", DataOptions(tmp_path))
    write_idx(tmp_path / "fashion-mnist", CLASSES["mine"])
    assert labels_of("fashion-mnist", tmp_path) == [4]
    assert labels_of("fashion-mnist", tmp_path / "fashion-mnist") == [4]


def test_files_of_other_sets_in_the_same_folder_are_ignored(tmp_path: Path) -> None:
    write_idx(tmp_path, CLASSES["mnist"])
    (tmp_path / "cifar-10-batches-bin").mkdir()
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        (tmp_path / "cifar-10-batches-bin" / f"{name}.bin").write_bytes(bytes(3073))
    assert labels_of("mnist", tmp_path) == CLASSES["mnist"]
    assert labels_of("cifar10", tmp_path) == [0]


BATCHES = [*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"]


def write_zeros(folder: Path, counts: dict[str, int], record_bytes: int = 3073) -> Path:
    """Write CIFAR files of black images of class 0 as sparse files."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, count in counts.items():
        with open(folder / name, "wb") as file:
            file.truncate(count * record_bytes)
    return folder


@pytest.mark.parametrize("name", ["data_batch_3.bin", "test_batch.bin"])
def test_an_empty_cifar10_batch_is_an_error(tmp_path: Path, name: str) -> None:
    write_zeros(tmp_path, dict.fromkeys(BATCHES, 4) | {name: 0})
    with pytest.raises(DataError, match=rf"{name}: record 0 at byte 0: the file ends here: it has 0 bytes; download"):
        open_dataset("cifar10", DataOptions(tmp_path))


@pytest.mark.parametrize(
    ("file_format", "names", "record_bytes", "name", "have", "message"),
    [
        ("cifar10 (binary)", BATCHES, 3073, "data_batch_2.bin", 9_999, "30726927 bytes, .* 10000 records, 30730000"),
        ("cifar10 (binary)", BATCHES, 3073, "test_batch.bin", 1, "3073 bytes, and .* 10000 records, 30730000"),
        ("cifar100 (binary)", ["test.bin"], 3074, "train.bin", 3, "9222 bytes, and .* 50000 records, 153700000 bytes;"),
    ],
)
def test_cifar_truncated_between_records_is_detected_by_the_other_files(
    tmp_path: Path, file_format: str, names: list[str], record_bytes: int, name: str, have: int, message: str
) -> None:
    write_zeros(tmp_path, dict.fromkeys(names, 10_000) | {name: have}, record_bytes)
    of = FORMATS[file_format]
    at = rf"{name}: record {have} at byte {have * record_bytes}: the file ends here: it has "
    with pytest.raises(RecordError, match=at + message):
        list(of.read([tmp_path / name], of.num_classes, None))
    bad: list[DataError] = []
    assert [len(block.labels) for block in of.read([tmp_path / name], of.num_classes, bad.append)] == [have]
    assert len(bad) == 1


def test_a_complete_batch_beside_complete_ones_is_good(tmp_path: Path) -> None:
    write_zeros(tmp_path, dict.fromkeys(["data_batch_1.bin", "test_batch.bin"], 10_000))
    of = FORMATS["cifar10 (binary)"]
    assert [len(block.labels) for block in of.read([tmp_path / "test_batch.bin"], 10, None)] == [10_000]


@pytest.mark.parametrize(
    ("sizes", "num_bytes"),
    [((0, 28, 28), 0), ((5, 0, 28), 80), ((5, 28, 0), 80), ((5, 28, 0xFFFFFFFF), 80), ((5, 28, 28), 783)],
)
def test_an_idx_file_with_a_damaged_header_is_an_error(
    tmp_path: Path, sizes: tuple[int, int, int], num_bytes: int
) -> None:
    folder = write_idx(tmp_path / "mnist", CLASSES["mine"])
    images = folder / "t10k-images-idx3-ubyte"
    images.write_bytes(struct.pack(">IIII", 0x803, *sizes) + bytes(num_bytes))
    text = " x ".join(map(str, sizes))
    message = rf"t10k-images-.*: its header states {text} bytes, but {num_bytes} follow; download the file again"
    with pytest.raises(DataError, match=message):
        open_dataset("mnist", DataOptions(tmp_path))
    of = FORMATS["mnist (idx)"]
    with pytest.raises(DataError, match=message):
        list(of.read([images, folder / "t10k-labels-idx1-ubyte"], 10, lambda fault: None))


@pytest.mark.parametrize("file_format", ["cifar10 (binary)", "cifar10 (python)", "mnist (idx)"])
def test_empty_files_write_no_record_file(tmp_path: Path, file_format: str) -> None:
    of = FORMATS[file_format]
    files = [tmp_path / name for name in of.val]
    for file in files:
        file.touch()
    if file_format == "cifar10 (python)":
        files[0].write_bytes(pickle.dumps({b"data": np.empty((0, 3072), np.uint8), b"labels": []}))
    for on_bad in (None, lambda fault: None):
        with pytest.raises(DataError, match=r"batch|idx"):
            convert_split(of, files, tmp_path / "x.rec", on_bad=on_bad)
    assert sorted(tmp_path.iterdir()) == sorted(files)


def test_an_incomplete_set_does_not_hide_a_complete_one(tmp_path: Path) -> None:
    write_zeros(tmp_path, {"data_batch_2.bin": 1, "test_batch.bin": 1})
    write_zeros(tmp_path / "cifar-10-batches-bin", dict.fromkeys(BATCHES, 2))
    train = open_dataset("cifar10", DataOptions(tmp_path)).train
    assert isinstance(train, MemorySource)
    assert len(train) == 10
