"""The loader: batches independent of threads, resuming, no threads left behind, and errors that name the record."""

from __future__ import annotations

import gc
import logging
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from sample_images import NUM_RECORDS, encoded, jpeg, make_records, picture, write_records
from torch import Tensor

from echelon.data.images.config import AugmentConfig
from echelon.data.loading.loader import Loader, measure_io
from echelon.data.loading.order import ByPart, Sampling, State
from echelon.data.loading.sources import FolderSource, RecordSource
from echelon.data.records import Header, IndexedWriter, pack
from echelon.errors import DataError, UsageError

pytestmark = pytest.mark.numeric

CONFIG = AugmentConfig(
    shape=(3, 24, 32), random_crop=True, random_mirror=True, min_random_scale=0.6, max_random_rotate_angle=10,
    brightness=0.3, max_random_h=20, pca_noise=0.1, rgb_mean=(120.0, 115.0, 105.0), rgb_std=(50.0, 51.0, 52.0),
)  # fmt: skip


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> RecordSource:
    return RecordSource(make_records(tmp_path_factory.mktemp("records") / "some.rec"))


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    """Check that every test ends all threads it started, and does not change torch's own parallelism."""
    before, parallel = set(threading.enumerate()), torch.get_num_threads()
    yield
    assert set(threading.enumerate()) <= before
    assert torch.get_num_threads() == parallel


def loader(source: RecordSource | FolderSource, batch: int = 5, **options: Any) -> Loader:
    sampling = Sampling(len(source), batch, seed=3)
    return Loader(source, CONFIG, **{"sampling": sampling, "threads": 2, **options})


def take(source: RecordSource | FolderSource, count: int = 2, **options: Any) -> list[tuple[Tensor, Tensor]]:
    """Return the batches of some epochs."""
    with loader(source, **options) as batches:
        return [batch for _ in range(count) for batch in batches]


def same(some: list[tuple[Tensor, Tensor]], others: list[tuple[Tensor, Tensor]]) -> bool:
    pairs = zip(some, others, strict=True)
    return all(torch.equal(one, other) for mine, yours in pairs for one, other in zip(mine, yours, strict=True))


def test_a_batch_is_normalised_floats_and_class_numbers(records: RecordSource) -> None:
    images, labels = take(records, 1)[0]
    assert images.shape == (5, 3, 24, 32)
    assert images.dtype == torch.float32
    assert labels.dtype == torch.int64
    assert abs(float(images.mean())) < 1


@pytest.mark.parametrize("options", [{"threads": 1, "prefetch": 1}, {"threads": 5, "prefetch": 4}])
def test_the_number_of_threads_does_not_change_batches(records: RecordSource, options: dict[str, int]) -> None:
    assert same(take(records), take(records, **options))


def test_each_epoch_has_another_order(records: RecordSource) -> None:
    labels = [torch.cat([label for _, label in take(records, 2)[at : at + 5]]).tolist() for at in (0, 5)]
    assert sorted(labels[0]) == sorted(labels[1]) == list(range(NUM_RECORDS))
    assert labels[0] != labels[1]


def test_every_sample_once_over_all_workers(records: RecordSource) -> None:
    seen: list[int] = []
    for rank in range(3):
        sampling = Sampling(NUM_RECORDS, 4, seed=3, sharding=ByPart(rank, 3))
        seen += [int(label) for _, labels in take(records, 1, sampling=sampling) for label in labels]
    assert sorted(seen) == list(range(NUM_RECORDS))


def test_a_sample_is_the_same_on_every_worker(records: RecordSource) -> None:
    alone = {int(y): x for images, labels in take(records, 1) for x, y in zip(images, labels, strict=True)}
    part = take(records, 1, sampling=Sampling(NUM_RECORDS, 4, seed=3, sharding=ByPart(1, 2)))
    for images, labels in part:
        for image, label in zip(images, labels, strict=True):
            assert torch.equal(image, alone[int(label)])


@pytest.mark.parametrize("stop", [1, 3, 5, 7])
def test_resuming_in_mid_epoch_is_bit_identical(records: RecordSource, stop: int) -> None:
    whole = take(records, 3)
    with loader(records) as batches:
        first = list(islice(_forever(batches), stop))
        state = batches.state
    with loader(records, threads=3, state=state) as batches:
        rest = list(islice(_forever(batches), len(whole) - stop))
    assert same(whole, first + rest)


def _forever(batches: Loader) -> Iterator[tuple[Tensor, Tensor]]:
    while True:
        yield from batches


def test_the_state_counts_yielded_samples(records: RecordSource) -> None:
    with loader(records) as batches:
        states = []
        for _ in batches:
            states.append(batches.state)
        assert states == [State(0, 5), State(0, 10), State(0, 15), State(0, 20), State(1, 0)]
        assert len(batches) == 5


def test_uint8_batches_are_the_same_pixels(records: RecordSource) -> None:
    scale, mean = torch.tensor(CONFIG.rgb_std), torch.tensor(CONFIG.rgb_mean)
    for (pixels, _), (images, _) in zip(take(records, 1, output="uint8"), take(records, 1), strict=True):
        assert pixels.shape[1:] == (24, 32, 3)
        assert pixels.dtype == torch.uint8
        assert torch.allclose(((pixels - mean) / scale).permute(0, 3, 1, 2), images, atol=1e-5)


def test_a_kept_batch_of_the_loader_is_never_overwritten(records: RecordSource) -> None:
    with loader(records) as batches:
        kept = [(images, images.clone()) for _ in range(4) for images, _ in batches]
    assert all(torch.equal(now, then) for now, then in kept)


def test_memory_of_dropped_batches_is_reused(records: RecordSource) -> None:
    with loader(records) as batches:
        places = {images.data_ptr() for _ in range(10) for images, _ in batches}
    assert len(places) <= 5


def test_memory_does_not_grow_over_a_ten_times_longer_run(records: RecordSource) -> None:
    """Each batch has 5.5 MB, so keeping a fiftieth of them would be noticed."""
    config = AugmentConfig(shape=(3, 300, 300), random_crop=True)
    with Loader(records, config, Sampling(NUM_RECORDS, 5), threads=2) as batches:
        process = psutil.Process()
        for _ in range(3):
            for _ in batches:
                pass
        before = process.memory_info().rss
        for _ in range(30):
            for _ in batches:
                pass
        assert process.memory_info().rss - before < 16e6


def test_only_the_loaders_threads_disable_torchs_parallelism(records: RecordSource) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with loader(records) as batches, ThreadPoolExecutor(1) as fresh:
            assert not batches._decoders.is_closed
            assert batches._decoders.submit(torch.get_num_threads).result() == 1
            assert fresh.submit(torch.get_num_threads).result() == 3
    finally:
        torch.set_num_threads(before)


def test_close_in_mid_epoch_ends_the_threads(records: RecordSource) -> None:
    batches = loader(records)
    next(iter(batches))
    assert [thread for thread in threading.enumerate() if thread.name.startswith("echelon-data")]
    batches.close()
    batches.close()
    with pytest.raises(UsageError, match="closed"):
        next(iter(batches))


def test_a_dropped_loader_ends_its_threads(records: RecordSource) -> None:
    batches = loader(records)
    next(iter(batches))
    mine = [thread for thread in threading.enumerate() if thread.name.startswith("echelon-data")]
    assert len(mine) == 2
    del batches
    gc.collect()
    for thread in mine:
        thread.join(20)


def test_an_error_in_the_consumer_ends_the_threads(records: RecordSource) -> None:
    def consume() -> None:
        with loader(records) as batches:
            for images, _ in batches:
                raise ArithmeticError(len(images))

    with pytest.raises(ArithmeticError, match="5"):
        consume()


@pytest.fixture
def damaged(tmp_path: Path) -> RecordSource:
    """Records 4 and 9 are not images, and record 11 is truncated."""
    payloads = [jpeg(picture(number)) for number in range(14)]
    payloads[4], payloads[9], payloads[11] = b"no image", b"", payloads[11][:100]
    return RecordSource(write_records(tmp_path / "damaged.rec", payloads))


def test_an_error_names_file_record_and_byte(damaged: RecordSource) -> None:
    sampling = Sampling(14, 4, shuffle=False)
    batches = loader(damaged, sampling=sampling)
    assert next(iter(batches))[1].tolist() == [0, 1, 2, 3]
    with pytest.raises(DataError, match=r"damaged\.rec: record 4 at byte \d+: 8 bytes .* are not an image"):
        next(iter(batches))
    with pytest.raises(UsageError, match="closed"):
        next(iter(batches))


def test_bad_records_are_left_out_counted_and_reported(damaged: RecordSource, caplog: pytest.LogCaptureFixture) -> None:
    sampling = Sampling(14, 4, shuffle=False)
    with caplog.at_level(logging.WARNING), loader(damaged, sampling=sampling, skip_bad_records=True) as batches:
        seen = [labels.tolist() for _, labels in batches]
        assert batches.num_bad == 3
        assert [message.split(":")[1] for message in batches.bad_records] == [
            f" record {number} at byte {offset}" for number, offset in zip((4, 9, 11), _offsets(damaged), strict=True)
        ]
        list(batches)
    assert seen == [[0, 1, 2, 3], [5, 6, 7], [8, 10], [12, 13]]
    assert "skipped bad record 3" in caplog.text
    assert [line for line in caplog.messages if "in this epoch" in line] == ["bad records skipped in this epoch: 3"] * 2


def _offsets(source: RecordSource) -> list[int]:
    return [int(source.where(number).rsplit(" ", 1)[1]) for number in (4, 9, 11)]


def test_a_batch_of_bad_records_is_left_out(tmp_path: Path) -> None:
    source = RecordSource(write_records(tmp_path / "bad.rec", [b"no", b"no", jpeg(picture(1))]))
    sampling = Sampling(3, 2, shuffle=False)
    assert [labels.tolist() for _, labels in take(source, 1, sampling=sampling, skip_bad_records=True)] == [[2]]


@pytest.mark.parametrize("options", [{"num_batches": 4}, {"last_batch": "wrap"}])
def test_in_full_batches_the_next_good_record_replaces_a_bad_one(
    damaged: RecordSource, options: dict[str, Any]
) -> None:
    sampling = Sampling(14, 4, shuffle=False, **options)
    with loader(damaged, sampling=sampling, skip_bad_records=True) as batches:
        epoch = [(images.clone(), labels.tolist()) for images, labels in batches]
        assert batches.num_bad == 3
    assert [labels for _, labels in epoch] == [[0, 1, 2, 3], [5, 5, 6, 7], [8, 10, 10, 8], [12, 13, 0, 1]]
    assert all(len(images) == 4 for images, _ in epoch)
    for images, labels in epoch:
        for image, label in zip(images, labels, strict=True):
            assert torch.equal(image, images[labels.index(label)])
            assert all(not torch.equal(image, other) for other, its in zip(images, labels, strict=True) if its != label)


def test_a_replacement_is_mirrored_as_the_original(damaged: RecordSource) -> None:
    """Batches with replacements are the same as floats and as bytes that are mirrored later."""
    options: dict[str, Any] = {"sampling": Sampling(14, 7, seed=4, num_batches=2), "skip_bad_records": True}
    bytes_, floats = take(damaged, 3, output="uint8", **options), take(damaged, 3, **options)
    scale, mean = torch.tensor(CONFIG.rgb_std), torch.tensor(CONFIG.rgb_mean)
    for (pixels, numbers), (images, labels) in zip(bytes_, floats, strict=True):
        assert torch.equal(numbers, labels)
        assert torch.allclose(((pixels - mean) / scale).permute(0, 3, 1, 2), images, atol=1e-5)


@pytest.mark.parametrize("bad", [(0, 1), (2, 3), (4, 5)])
def test_a_batch_without_a_good_record_is_replaced_by_the_next(tmp_path: Path, bad: tuple[int, int]) -> None:
    payloads = [b"no" if number in bad else jpeg(picture(number)) for number in range(6)]
    source = RecordSource(write_records(tmp_path / "bad.rec", payloads))
    options: dict[str, Any] = {"sampling": Sampling(6, 2, shuffle=False, num_batches=3), "skip_bad_records": True}
    batches = take(source, 2, **options)
    assert len(batches) == 6
    lost = bad[0] // 2
    assert same([batches[lost]], [batches[lost + 1]])
    assert sorted({int(label) for _, labels in batches[:3] for label in labels}) == sorted({*range(6)} - {*bad})
    first_state = State(0, bad[0])
    assert same(batches[lost:4], take(source, 2, state=first_state, **options)[: 4 - lost]), (
        "the same happens after resuming"
    )


@pytest.mark.parametrize("full", [True, False])
def test_skipping_fails_if_no_record_can_be_read(tmp_path: Path, full: bool) -> None:
    source = RecordSource(write_records(tmp_path / "bad.rec", [b"no"] * 5))
    sampling = Sampling(5, 2, shuffle=False, num_batches=2 if full else None)
    with pytest.raises(DataError, match=r"no record .* can be read; one of them: .*bad\.rec: record 0 at byte 0: 2 b"):
        take(source, 1, sampling=sampling, skip_bad_records=True)


def test_a_truncated_file(tmp_path: Path) -> None:
    path = make_records(tmp_path / "short.rec", 6)
    path.with_suffix(".idx").unlink()
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(DataError, match=r"short\.rec: record 5 at byte \d+"):
        RecordSource(path)
    bad: list[DataError] = []
    assert len(RecordSource(path, on_bad=bad.append)) == 5
    assert len(bad) == 1


def test_several_files_are_one_source(tmp_path: Path) -> None:
    one, other = make_records(tmp_path / "a.rec", 3), make_records(tmp_path / "b.rec", 4)
    for rec in (f"{one};{other}", tmp_path):
        source = RecordSource(rec)
        assert [source.read(number).label for number in range(len(source))] == [0, 1, 2, 0, 1, 2, 3]
        assert "b.rec: record 1 at" in source.where(4)


def labelled(path: Path, labels: list[list[float]]) -> RecordSource:
    with IndexedWriter(path) as writer:
        for number, label in enumerate(labels):
            writer.write(number, pack(Header(label), jpeg(picture(number))))
    return RecordSource(path)


def test_several_labels_are_rows_and_a_list_of_one_is_a_class(tmp_path: Path) -> None:
    all_at_once = Sampling(4, 4, shuffle=False)
    pairs = labelled(tmp_path / "pairs.rec", [[number, 0.5] for number in range(4)])
    assert take(pairs, 1, sampling=all_at_once)[0][1].tolist() == [[0, 0.5], [1, 0.5], [2, 0.5], [3, 0.5]]
    ones = labelled(tmp_path / "ones.rec", [[number] for number in range(4)])
    assert take(ones, 1, sampling=all_at_once)[0][1].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("label", [0.5, 1e30, float("inf"), float("nan")])
def test_labels_that_are_not_class_numbers(tmp_path: Path, label: float) -> None:
    message = rf"wrong\.rec: record \d at byte \d+: its label {re.escape(f'{label:g}')} is not a class number"
    with pytest.raises(DataError, match=message):
        take(labelled(tmp_path / "wrong.rec", [[label]] * 4), 1)


@pytest.mark.parametrize("label", [[0.5], [-1], [4], [float("nan")], [1, 2]])
def test_labels_are_checked_if_num_classes_is_known(tmp_path: Path, label: list[float]) -> None:
    source = labelled(tmp_path / "some.rec", [[0], [1], label, [3]])
    source.num_classes = 4
    assert source.read(1).label == 1
    with pytest.raises(DataError, match=r"some\.rec: record 2 at byte \d+: (its label|it has 2 labels)"):
        source.read(2)


def test_different_numbers_of_labels_in_a_batch(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"different numbers of labels: \[1, 2\]"):
        take(labelled(tmp_path / "mixed.rec", [[1, 2], [1]]), 1)


def test_formats_may_be_mixed(tmp_path: Path) -> None:
    kinds = ["PNG", "WEBP", "JPEG", "GIF"]
    payloads = [encoded(picture(number), kind) for number, kind in enumerate(kinds)]
    batches = take(RecordSource(write_records(tmp_path / "mixed.rec", payloads)), 1)
    assert len(batches[0][0]) == 4
    assert np.isfinite(batches[0][0].numpy()).all()


def test_measure_io_yields_the_speed_every_few_batches_and_at_the_end(records: RecordSource) -> None:
    with loader(records, 3) as batches:
        measured = list(measure_io(batches, 2))
    assert [batch for batch, _ in measured] == [1, 3, 5, 7]
    assert all(samples_per_s > 0 for _, samples_per_s in measured)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threads": 0}, "threads 0, prefetch 2"),
        ({"output": "float64"}, "'float64'"),
        ({"sampling": Sampling(7, 2)}, "23 samples, but the sampling is for 7"),
    ],
)
def test_invalid_settings_are_rejected(records: RecordSource, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        loader(records, **options)
