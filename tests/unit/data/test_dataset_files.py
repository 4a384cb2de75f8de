"""Which files a data set is opened from, and the errors if flags and files do not match."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from sample_images import encoded, jpeg, picture, write_records

from echelon.data.loading.memory import MemorySource
from echelon.data.loading.sources import FolderSource, RecordSource
from echelon.data.records import Header, IndexedWriter, pack
from echelon.data.records.class_file import write_class_names
from echelon.data.sets.datasets import DataOptions, default_augment, open_dataset
from echelon.errors import DataError, UsageError


def classes(root: Path, *names: str) -> Path:
    for number, name in enumerate(names):
        (root / name).mkdir(parents=True)
        (root / name / "one.png").write_bytes(encoded(picture(number), "PNG"))
    return root


@pytest.fixture
def records(tmp_path: Path) -> Path:
    return write_records(tmp_path / "three.rec", [jpeg(picture(number)) for number in range(3)])


def test_training_and_validation_may_have_different_kinds_of_files(tmp_path: Path, records: Path) -> None:
    folder = classes(tmp_path / "classes", "ape", "bee", "cat")
    for train, validation in ((records, folder), (folder, records)):
        opened = open_dataset("folder", DataOptions(tmp_path, data_train=str(train), data_val=str(validation)))
        kinds = [RecordSource if path is records else FolderSource for path in (train, validation)]
        assert [type(opened.train), type(opened.validation)] == kinds
        assert opened.num_classes == 3


def test_class_names_of_folders_records_and_published_sets(tmp_path: Path, records: Path) -> None:
    folder = classes(tmp_path / "classes", "ape", "bee", "cat")
    assert open_dataset("folder", DataOptions(data_train=str(folder))).classes == ("ape", "bee", "cat")
    assert open_dataset("folder", DataOptions(data_train=str(records))).classes == ()
    write_class_names(records, ["ape", "bee", "cat", "dog"])
    opened = open_dataset("folder", DataOptions(data_train=str(records)))
    assert (opened.classes, opened.num_classes) == (("ape", "bee", "cat", "dog"), 4), "a class may have no image"
    fewer = open_dataset("imagenet", DataOptions(data_train=str(records), num_classes=3))
    assert (fewer.classes, fewer.num_classes) == (("ape", "bee", "cat"), 3)
    assert open_dataset("digits").classes == tuple("0123456789")


def test_validation_folders_are_numbered_by_the_names_of_the_training_records(tmp_path: Path, records: Path) -> None:
    write_class_names(records, ["cat", "ape", "bee"])
    folder = classes(tmp_path / "classes", "ape", "cat")
    opened = open_dataset("folder", DataOptions(data_train=str(records), data_val=str(folder)))
    assert isinstance(opened.validation, FolderSource)
    assert opened.validation.labels == [1, 0]
    numbers = classes(tmp_path / "numbers", "0000", "0001")
    opened = open_dataset("folder", DataOptions(data_train=str(records), data_val=str(numbers)))
    assert isinstance(opened.validation, FolderSource)
    assert opened.validation.labels == [0, 1], "without a common name, in the order of the folders"


def test_training_and_validation_records_with_other_classes_are_an_error(tmp_path: Path, records: Path) -> None:
    other = write_records(tmp_path / "val.rec", [jpeg(picture(number)) for number in range(2)])
    write_class_names(records, ["ape", "bee", "cat"])
    write_class_names(other, ["ape", "cat"])
    with pytest.raises(DataError, match=r"class 1 is 'bee' in .*three\.rec, but 'cat' in .*val\.rec: a label does not"):
        open_dataset("folder", DataOptions(data_train=str(records), data_val=str(other)))
    with pytest.raises(DataError, match=r"class 1 is 'bee' in .*three\.classes, but 'cat' in .*val\.classes"):
        open_dataset("folder", DataOptions(data_train=f"{records};{other}"))
    write_class_names(other, ["ape", "", "", "dog"])
    opened = open_dataset("folder", DataOptions(data_train=f"{records};{other}"))
    assert opened.classes == ("ape", "bee", "cat", "dog")


def test_missing_validation_files_are_an_error(tmp_path: Path) -> None:
    folder = classes(tmp_path / "classes", "ape", "bee")
    with pytest.raises(DataError, match=r"no record file .*nowhere"):
        open_dataset("folder", DataOptions(data_train=str(folder), data_val=str(tmp_path / "nowhere")))


def test_an_index_for_a_folder_is_an_error(tmp_path: Path) -> None:
    folder = classes(tmp_path / "classes", "ape", "bee")
    with pytest.raises(UsageError, match=r"the index a\.idx is for a \.rec, but .*classes is a folder of class"):
        open_dataset("folder", DataOptions(data_train=str(folder), data_train_idx="a.idx"))


def test_sets_with_fixed_files_reject_other_files() -> None:
    for name in ("digits", "mnist", "fashion-mnist"):
        with pytest.raises(UsageError, match=rf"--data-val x\.rec cannot be used with {name}.*--data folder"):
            open_dataset(name, DataOptions(data_val="x.rec"))


def test_a_label_that_is_too_large_is_reported_with_its_place(tmp_path: Path, records: Path) -> None:
    opened = open_dataset("imagenet", DataOptions(data_train=str(records), num_classes=2))
    assert isinstance(opened.train, RecordSource)
    assert opened.train.read(1).label == 1
    with pytest.raises(
        DataError, match=r"three\.rec: record 2 at byte \d+: its label is 2, but --num-classes 2 allows 0"
    ):
        opened.train.read(2)
    folder = classes(tmp_path / "classes", "ape", "bee", "cat")
    with pytest.raises(UsageError, match=r"cat/one\.png .*: its label is 2, but --num-classes 2 allows 0 \.\.\. 1"):
        open_dataset("folder", DataOptions(data_train=str(folder), num_classes=2))
    with pytest.raises(UsageError, match=r"digits .*: its label is 9, but --num-classes 9 allows"):
        open_dataset("digits", DataOptions(num_classes=9))


def labelled(path: Path, *labels: float | list[float]) -> str:
    with IndexedWriter(path) as writer:
        for number, label in enumerate(labels):
            writer.write(number, pack(Header(label), jpeg(picture(number, 32, 32))))
    return str(path)


@pytest.mark.parametrize("name", ["cifar10", "folder"])
@pytest.mark.parametrize("label", [1.5, float("nan"), float("inf"), 3e9, [1.0, 2.0]])
def test_a_label_that_is_not_a_class_number_is_reported(tmp_path: Path, name: str, label: float | list[float]) -> None:
    path = labelled(tmp_path / "some.rec", 0, 1, label, 3)
    with pytest.raises(
        DataError, match=r"some\.rec: record 2 at byte \d+: (its label .* is not a class|it has 2 labels)"
    ):
        open_dataset(name, DataOptions(data_train=path))
    assert open_dataset(name, DataOptions(data_train=path, skip_bad_records=True)).num_classes in (4, 10)


def test_labels_are_checked_before_images_are_decoded_into_memory(tmp_path: Path) -> None:
    path = labelled(tmp_path / "some.rec", 0, -1, 20, 3)
    with pytest.raises(
        DataError, match=r"record 1 at byte \d+: its label is -1, but --num-classes 10 allows 0 \.\.\. 9"
    ):
        open_dataset("cifar10", DataOptions(data_train=path))
    kept = open_dataset("cifar10", DataOptions(data_train=path, skip_bad_records=True)).train
    assert isinstance(kept, MemorySource)
    assert kept.labels.tolist() == [0, 3]


def test_images_that_do_not_decode_are_left_out_of_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    payloads = [b"no image", *(jpeg(picture(number, 32, 32)) for number in range(1, 6)), b"none"]
    path = str(write_records(tmp_path / "cifar10_train.rec", payloads))
    with pytest.raises(DataError, match=r"record 0 at byte 0: 8 bytes .* are not an image"):
        open_dataset("cifar10", DataOptions(data_train=path))
    with caplog.at_level(logging.WARNING):
        train = open_dataset("cifar10", DataOptions(data_train=path, skip_bad_records=True)).train
    assert isinstance(train, MemorySource)
    assert train.labels.tolist() == [1, 2, 3, 4, 5]
    assert (train.images[0] != train.images[1]).any()
    assert caplog.messages[0].startswith("bad records skipped while opening: 2, the first: ")


def test_damage_found_by_a_scan_is_counted(records: Path, caplog: pytest.LogCaptureFixture) -> None:
    records.with_suffix(".idx").unlink()
    records.write_bytes(records.read_bytes()[:-40])
    with caplog.at_level(logging.WARNING):
        opened = open_dataset("folder", DataOptions(data_train=str(records), skip_bad_records=True))
    assert (len(opened.train), opened.num_classes) == (2, 2)
    assert "bad records skipped while opening: 1, the first: " in caplog.text


def test_a_file_without_a_good_image_is_an_error(tmp_path: Path) -> None:
    path = str(write_records(tmp_path / "bad.rec", [b"no", b"nothing"]))
    with pytest.raises(DataError, match=r"bad\.rec: record 0 .*neither this image nor any other"):
        open_dataset("cifar10", DataOptions(data_train=path, skip_bad_records=True))


def test_default_augmentation_needs_no_files() -> None:
    assert default_augment("cifar10").random_crop
    assert default_augment("imagenet", (3, 32, 32), brightness=0.4).shape == (3, 32, 32)
    with pytest.raises(UsageError, match="cannot be combined with random_crop; use --random-crop 0"):
        default_augment("cifar10", random_resized_crop=True)
    with pytest.raises(UsageError, match=r"needs 3 means .*change --image-shape, or give --rgb-mean"):
        default_augment("imagenet", rgb_mean=(1.0,))
    with pytest.raises(UsageError, match=r"mnist has images of 1 channel, .*3,28,28 has 3; use 1,28,28"):
        default_augment("mnist", (3, 28, 28))


@pytest.mark.parametrize("has_index", [False, True])
def test_a_list_instead_of_a_record_file_is_an_error(tmp_path: Path, has_index: bool) -> None:
    path = tmp_path / "x.lst"
    path.write_text("0\t1.000000\tape/one.png\n1\t1.000000\tape/two.png\n")
    if has_index:
        path.with_suffix(".idx").write_text("0\t0\n1\t20\n")
    message = r"x\.lst is a list of images, not a record file; pack it: echelon data im2rec .*x\.lst FOLDER .*x\.rec$"
    images = str(classes(tmp_path / "images", "ape"))
    for options in (DataOptions(data_train=str(path)), DataOptions(data_train=images, data_val=str(path))):
        with pytest.raises(UsageError, match=message):
            open_dataset("folder", options)
