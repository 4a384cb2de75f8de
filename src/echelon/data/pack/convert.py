"""Converts CIFAR and MNIST, as they are published, to record files: PREFIX_train and PREFIX_val.

Ids and keys count from 0 in the published order. Images are stored as PNG by default, which is lossless.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from PIL import Image

from echelon.atomic_file import check_writable
from echelon.data.pack.im2rec import Encoding, PackResult, ordered_map, save
from echelon.data.records import Header, IndexedWriter, RecordError, pack
from echelon.data.records.file import report
from echelon.data.sets.formats import FileFormat, ImageBlock, OnBad
from echelon.errors import DataError

PNG = Encoding(".png", 6)
_BLOCK_IMAGES = 200


def record_path(prefix: Path, split: str) -> Path:
    """Return the name of the record file of a split: PREFIX_train.rec."""
    return prefix.with_name(f"{prefix.name}_{split}.rec")


def convert_split(
    file_format: FileFormat,
    files: list[Path],
    rec: Path,
    *,
    encoding: Encoding = PNG,
    threads: int = 1,
    on_bad: OnBad = None,
    on_done: Callable[[int], None] = lambda amount: None,
) -> PackResult:
    """Write the images of some files to `rec` and its .idx."""
    check_writable(rec)
    num_records = 0
    with IndexedWriter(rec) as writer:
        blocks = _good_blocks(file_format, files, on_bad)
        for block, payloads in ordered_map(lambda block: _encode(block, encoding), blocks, threads):
            for label, payload in zip(block.labels.tolist(), payloads, strict=True):
                writer.write(num_records, pack(Header(label, num_records), payload))
                num_records += 1
            on_done(len(payloads))
        if not num_records:
            names = " ".join(map(str, files))
            raise DataError(f"{rec} was not written: no good image in {names}; download them again")
        return PackResult(num_records, writer.tell())


def _encode(block: ImageBlock, encoding: Encoding) -> list[bytes]:
    return [save(Image.fromarray(image), encoding) for image in block.images]


def _good_blocks(file_format: FileFormat, files: list[Path], on_bad: OnBad) -> Iterator[ImageBlock]:
    """Yield small blocks; report and leave out images with an invalid label."""
    for block in file_format.read(files, file_format.num_classes, on_bad):
        good = (block.labels >= 0) & (block.labels < file_format.num_classes)
        for number in (~good).nonzero()[0].tolist():
            allowed = f"0 ... {file_format.num_classes - 1} of {file_format.name}"
            reason = f"its label is {block.labels[number]}, expected {allowed}"
            fault = RecordError(block.path, block.head_bytes + number * block.record_bytes, number, reason)
            report(fault, on_bad)
        images, labels = (block.images, block.labels) if good.all() else (block.images[good], block.labels[good])
        for start in range(0, len(labels), _BLOCK_IMAGES):
            stop = start + _BLOCK_IMAGES
            yield ImageBlock(images[start:stop], labels[start:stop], block.path)
