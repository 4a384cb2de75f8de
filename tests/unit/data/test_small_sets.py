"""The small sets as published: which files are taken for which set, and what is said of those that are not whole."""

from __future__ import annotations

import gzip
import hashlib
import struct
from dataclasses import replace
from pathlib import Path

import pytest

from echelon.data.datasets import DataOptions, open_dataset
from echelon.data.memory import MemorySource
from echelon.data.published import PUBLISHED, Archive
from echelon.errors import DataError

CLASSES = {"mnist": [0, 1, 2], "fashion-mnist": [7, 8, 9], "mine": [4, 4, 4]}
HOME = {"mnist": "MNIST/raw", "fashion-mnist": "FashionMNIST/raw"}
OTHER = {"mnist": "fashion-mnist", "fashion-mnist": "mnist"}


def label_file(labels: list[int]) -> bytes:
    return struct.pack(">II", 0x801, len(labels)) + bytes(labels)


def write_idx(folder: Path, labels: list[int], packed: bool = False) -> Path:
    """Both parts of a set; training has the labels twice, so that the parts differ."""
    folder.mkdir(parents=True, exist_ok=True)
    for part, those in (("train", labels * 2), ("t10k", labels)):
        images = struct.pack(">IIII", 0x803, len(those), 28, 28) + bytes(len(those) * 784)
        for name, data in ((f"{part}-images-idx3-ubyte", images), (f"{part}-labels-idx1-ubyte", label_file(those))):
            (folder / (f"{name}.gz" if packed else name)).write_bytes(gzip.compress(data) if packed else data)
    return folder


@pytest.fixture(autouse=True)
def published(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets of a few images stand for the published ones."""
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
def test_the_folder_of_one_set_is_none_of_the_other(tmp_path: Path, name: str) -> None:
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
def test_one_set_is_not_taken_for_the_other_where_names_do_not_tell(tmp_path: Path, name: str, packed: bool) -> None:
    plain = write_idx(tmp_path / "plain", CLASSES[name], packed)
    named = write_idx(tmp_path / "named" / OTHER[name], CLASSES[name], packed).parent
    assert labels_of(name, plain) == CLASSES[name]
    for folder in (plain, named):
        with pytest.raises(DataError, match=rf"train-labels.*: this is {name}, .*echelon data get {OTHER[name]} "):
            open_dataset(OTHER[name], DataOptions(folder))
    write_idx(plain / HOME[OTHER[name]], CLASSES[OTHER[name]])
    assert labels_of(OTHER[name], plain) == CLASSES[OTHER[name]]


def test_a_validation_part_of_the_other_set_is_seen(tmp_path: Path) -> None:
    write_idx(tmp_path, CLASSES["mnist"])
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(label_file(CLASSES["fashion-mnist"]))
    with pytest.raises(DataError, match=r"t10k-labels-idx1-ubyte: this is fashion-mnist"):
        open_dataset("mnist", DataOptions(tmp_path))


def test_files_of_ones_own_are_mnist_unless_their_folder_says_else(tmp_path: Path) -> None:
    write_idx(tmp_path, CLASSES["mine"])
    assert labels_of("mnist", tmp_path) == [4]
    with pytest.raises(DataError, match=r"train-labels.* may be MNIST's, .*files of your own go to .*/fashion-mnist"):
        open_dataset("fashion-mnist", DataOptions(tmp_path))
    write_idx(tmp_path / "fashion-mnist", CLASSES["mine"])
    assert labels_of("fashion-mnist", tmp_path) == [4]
    assert labels_of("fashion-mnist", tmp_path / "fashion-mnist") == [4]


def test_files_of_other_sets_beside_are_no_matter(tmp_path: Path) -> None:
    write_idx(tmp_path, CLASSES["mnist"])
    (tmp_path / "cifar-10-batches-bin").mkdir()
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        (tmp_path / "cifar-10-batches-bin" / f"{name}.bin").write_bytes(bytes(3073))
    assert labels_of("mnist", tmp_path) == CLASSES["mnist"]
    assert labels_of("cifar10", tmp_path) == [0]
