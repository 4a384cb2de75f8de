"""Converting CIFAR and MNIST files: every format gives the same pixels and labels, and damage is reported."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from echelon.data.pack.convert import convert_split, record_path
from echelon.data.records import IndexedReader, RecordError, unpack
from echelon.data.sets import find
from echelon.data.sets.class_names import CIFAR100, DIGITS, FASHION
from echelon.data.sets.find import published_classes
from echelon.data.sets.formats import find_format
from echelon.errors import DataError, UsageError

NUM = 23
RNG = np.random.default_rng(5)
PLANES = RNG.integers(0, 256, (NUM, 3, 32, 32), np.uint8)
GREY = RNG.integers(0, 256, (NUM, 28, 28), np.uint8)
LABELS = RNG.integers(0, 10, NUM).astype(np.uint8)
COARSE = np.full(NUM, 99, np.uint8)


def cifar_rows(*labels: np.ndarray) -> bytes:
    return np.concatenate([*(each[:, None] for each in labels), PLANES.reshape(NUM, -1)], 1).tobytes()


def cifar_pickle(key: bytes) -> bytes:
    return pickle.dumps({b"data": PLANES.reshape(NUM, -1), key: LABELS.tolist(), b"batch_label": b"x"}, protocol=2)


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">I{array.ndim}I", 0x800 + array.ndim, *array.shape) + array.tobytes()


BATCHES = [f"data_batch_{number}" for number in range(1, 6)]
FILES: dict[str, tuple[dict[str, bytes], int]] = {
    "cifar10 (binary)": ({f"{name}.bin": cifar_rows(LABELS) for name in [*BATCHES, "test_batch"]}, 5),
    "cifar10 (python)": ({name: cifar_pickle(b"labels") for name in [*BATCHES, "test_batch"]}, 5),
    "cifar100 (binary)": ({f"{name}.bin": cifar_rows(COARSE, LABELS) for name in ("train", "test")}, 1),
    "cifar100 (python)": ({name: cifar_pickle(b"fine_labels") for name in ("train", "test")}, 1),
    "mnist (idx)": (
        {
            "train-images-idx3-ubyte": idx(GREY),
            "train-labels-idx1-ubyte.gz": gzip.compress(idx(LABELS)),
            "t10k-images.idx3-ubyte": idx(GREY),
            "t10k-labels-idx1-ubyte": idx(LABELS),
        },
        1,
    ),
}


def write_files(folder: Path, name: str) -> Path:
    folder.mkdir(exist_ok=True)
    for file, data in FILES[name][0].items():
        (folder / file).write_bytes(data)
    return folder


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("threads", [1, 2])
def test_pixels_and_labels_are_converted_exactly(tmp_path: Path, name: str, threads: int) -> None:
    file_format, splits = find_format(write_files(tmp_path / "in", name))
    assert file_format.name == name
    expected = GREY if name.startswith("mnist") else PLANES.transpose(0, 2, 3, 1)
    for split, files in splits.items():
        rec = record_path(tmp_path / "out", split)
        repeats = FILES[name][1] if split == "train" else 1
        assert convert_split(file_format, files, rec, threads=threads).num_records == NUM * repeats
        with IndexedReader(rec) as reader:
            for position in range(NUM * repeats):
                header, payload = unpack(reader.read(position))
                assert (header.id, header.label) == (position, LABELS[position % NUM])
                assert np.array_equal(np.asarray(Image.open(io.BytesIO(payload))), expected[position % NUM])
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("in", "out_train.idx", "out_train.rec", "out_val.idx", "out_val.rec")
    ]


def test_the_classes_of_idx_files_are_those_of_the_set_with_these_labels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MNIST and Fashion-MNIST have the same file names; the published label files are recognised by their digests."""
    file_format, splits = find_format(write_files(tmp_path / "in", "mnist (idx)"))
    assert published_classes(file_format, splits["train"]) == DIGITS
    monkeypatch.setattr(find, "published_as", {idx(LABELS): "fashion-mnist"}.get)
    assert published_classes(file_format, splits["train"]) == FASHION
    file_format, splits = find_format(write_files(tmp_path / "other", "cifar100 (binary)"))
    assert published_classes(file_format, splits["val"]) == CIFAR100


def test_the_parent_folder_or_a_single_split_can_be_converted(tmp_path: Path) -> None:
    write_files(tmp_path / "cifar-100-binary", "cifar100 (binary)")
    (tmp_path / "cifar-100-binary" / "test.bin").unlink()
    assert list(find_format(tmp_path)[1]) == ["train"]


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no known data set .*looked for\n.*data_batch_1\.bin"):
        find_format(tmp_path)
    folder = write_files(tmp_path / "in", "cifar10 (binary)")
    (folder / "data_batch_3.bin").unlink()
    with pytest.raises(DataError, match=r"data_batch_3\.bin is missing;"):
        find_format(folder)
    with pytest.raises(UsageError, match="Unpack an archive first"):
        find_format(folder / "test_batch.bin")
    with pytest.raises(UsageError, match="no folder"):
        find_format(tmp_path / "none")


DAMAGE = [
    (
        "cifar10 (binary)",
        "test_batch.bin",
        slice(0, 3073 * 4 + 9),
        r"record 4 at byte 12292: .*9 of the record's 3073",
        4,
    ),
    ("mnist (idx)", "t10k-images.idx3-ubyte", slice(0, 16 + 784 * 5), r"record 5 at byte 3936: .*should have 23", 5),
    ("mnist (idx)", "t10k-labels-idx1-ubyte", slice(0, 8 + 6), r"record 6 at byte 14: .*should have 23", 6),
]


@pytest.mark.parametrize(("name", "file", "keep", "message", "num_left"), DAMAGE)
def test_a_truncated_file_is_reported(
    tmp_path: Path, name: str, file: str, keep: slice, message: str, num_left: int
) -> None:
    folder = write_files(tmp_path / "in", name)
    (folder / file).write_bytes((folder / file).read_bytes()[keep])
    file_format, splits = find_format(folder)
    rec = tmp_path / "x.rec"
    with pytest.raises(RecordError, match=f"{file}: {message}"):
        convert_split(file_format, splits["val"], rec)
    assert not rec.exists()
    bad: list[DataError] = []
    assert convert_split(file_format, splits["val"], rec, on_bad=bad.append).num_records == num_left
    assert len(bad) == 1


def test_an_invalid_label_is_reported(tmp_path: Path) -> None:
    folder = write_files(tmp_path / "in", "cifar10 (binary)")
    data = bytearray(cifar_rows(LABELS))
    data[3073 * 2] = 77
    (folder / "test_batch.bin").write_bytes(data)
    file_format, splits = find_format(folder)
    with pytest.raises(RecordError, match=r"record 2 at byte 6146: its label is 77, expected 0 \.\.\. 9"):
        convert_split(file_format, splits["val"], tmp_path / "x.rec")
    bad: list[DataError] = []
    done = convert_split(file_format, splits["val"], tmp_path / "x.rec", on_bad=bad.append)
    assert (done.num_records, len(bad)) == (NUM - 1, 1)


def test_files_of_another_format_are_errors(tmp_path: Path) -> None:
    folder = write_files(tmp_path / "in", "mnist (idx)")
    (folder / "t10k-labels-idx1-ubyte").write_bytes(idx(GREY))
    file_format, splits = find_format(folder)
    with pytest.raises(DataError, match="begins with 00000801, got 00000803"):
        convert_split(file_format, splits["val"], tmp_path / "x.rec")
    (folder / "t10k-labels-idx1-ubyte").write_bytes(idx(LABELS[:-1]))
    with pytest.raises(DataError, match=r"has 23 images.* has 22 labels"):
        convert_split(file_format, splits["val"], tmp_path / "x.rec")
    (folder / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(LABELS))[:-9])
    with pytest.raises(DataError, match=r"ubyte\.gz: cannot be read"):
        convert_split(file_format, splits["train"], tmp_path / "x.rec")


class Evil:
    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, ("owned",)


def test_a_pickle_cannot_run_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = write_files(tmp_path / "in", "cifar10 (python)")
    (folder / "test_batch").write_bytes(pickle.dumps({b"data": Evil()}))
    file_format, splits = find_format(folder)
    with pytest.raises(DataError, match=r"test_batch: not a CIFAR batch .*refers to \w+\.mkdir"):
        convert_split(file_format, splits["val"], tmp_path / "x.rec")
    assert not (tmp_path / "owned").exists()
