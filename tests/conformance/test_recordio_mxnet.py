"""RecordIO and lists compared with MXNet 1.9.1: each reads what the other writes.

Needs MXNet's environment: .peers/mxnet, or another interpreter named by ECHELON_MXNET_PYTHON.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from echelon.data.pack import lists
from echelon.data.pack.im2rec import Encoding, pack_list
from echelon.data.records import Header, IndexedReader, IndexedWriter, pack, unpack
from mxnet_peer import run_mxnet

pytestmark = pytest.mark.peer

MAGIC = bytes.fromhex("0a23d7ce")
LABELS: list[tuple[float | list[float], int]] = [(3.0, 7), (0.5, 2**40), ([1.0, 2.0], 7), ([9.0], 0)]


def mxnet(do: str, **request: Any) -> Any:
    return run_mxnet("recordio_mxnet_side.py", {"do": do, **request})


def payloads() -> list[tuple[int, bytes]]:
    rng = random.Random(9)
    pieces = [MAGIC, MAGIC[:1], MAGIC[1:], b"word", b"\0"]
    made = [b"", b"abc", MAGIC, MAGIC * 3, b"x" + MAGIC + b"yz", b"0123" + MAGIC + b"45", rng.randbytes(100_003)]
    made += [b"".join(rng.choices(pieces, k=rng.randrange(30))) for _ in range(200)]
    return [(5 * number + 2, payload) for number, payload in enumerate(made)]


def test_both_write_identical_bytes(tmp_path: Path) -> None:
    theirs, ours = tmp_path / "theirs.rec", tmp_path / "ours.rec"
    packed = mxnet(
        "write",
        rec=str(theirs),
        idx=str(theirs.with_suffix(".idx")),
        payloads=[(key, payload.hex()) for key, payload in payloads()],
        headers=LABELS,
    )
    with IndexedWriter(ours) as writer:
        for key, payload in payloads():
            writer.write(key, payload)
    assert ours.read_bytes() == theirs.read_bytes()
    assert ours.with_suffix(".idx").read_bytes() == theirs.with_suffix(".idx").read_bytes()
    assert packed == [pack(Header(label, key), b"image").hex() for label, key in LABELS]
    with IndexedReader(theirs) as reader:
        assert [(key, bytes(reader.read(key))) for key in reader.keys.tolist()] == payloads()


def test_mxnet_reads_files_written_by_echelon(tmp_path: Path) -> None:
    ours = tmp_path / "ours.rec"
    with IndexedWriter(ours) as writer:
        for key, payload in payloads():
            writer.write(key, payload)
    answer = mxnet("read", rec=str(ours), idx=str(ours.with_suffix(".idx")))
    assert answer["in_order"] == [payload.hex() for _, payload in payloads()]
    assert answer["by_key"] == {str(key): payload.hex() for key, payload in payloads()}
    records = [pack(Header(label, key), b"image").hex() for label, key in LABELS]
    assert mxnet("unpack", records=records) == [[label, key, b"image".hex()] for label, key in LABELS]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for number in range(24):
        folder = tmp_path / "photos" / ("b", "a", "c/d")[number % 3]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((16, 16, 3), 10 * number, np.uint8)).save(folder / f"{number}.png")
    return tmp_path / "photos"


def test_image_record_iter_reads_files_packed_by_echelon(photos: Path, tmp_path: Path) -> None:
    entries = lists.list_folder(photos)
    rec = tmp_path / "x.rec"
    pack_list(entries, photos, rec, Encoding(".png", 6))
    expected = [[entry.labels[0], 10.0 * int(Path(entry.path).stem)] for entry in entries]
    answer = mxnet("iterate", rec=str(rec), idx=str(rec.with_suffix(".idx")))
    assert answer == expected
    with IndexedReader(rec) as reader:
        assert [unpack(reader[k])[0].label for k in range(len(reader))] == [label for label, _ in expected]


def test_image_record_iter_reads_restart_markers(photos: Path, tmp_path: Path) -> None:
    wide = np.random.default_rng(0).integers(0, 256, (40, 400, 3), np.uint8)
    Image.fromarray(wide).save(photos / "a" / "wide.png")
    entry = lists.Entry(0, (1.0,), "a/wide.png")
    answers = []
    for interval in (0, 4):
        rec = tmp_path / f"{interval}.rec"
        pack_list([entry], photos, rec, Encoding(restart_interval=interval))
        answers.append(mxnet("iterate", rec=str(rec), idx=str(rec.with_suffix(".idx"))))
    assert b"\xff\xd7" in rec.read_bytes()
    assert answers[0] == answers[1] != [[1.0, 0.0]]


@pytest.mark.parametrize(
    ("flags", "options"),
    [
        ([], {}),
        (["--train-ratio", ".75", "--test-ratio", ".125"], {"train_ratio": 0.75, "test_ratio": 0.125}),
        (["--chunks", "5", "--train-ratio", ".6"], {"chunks": 5, "train_ratio": 0.6}),
    ],
)
def test_both_write_identical_lists(photos: Path, tmp_path: Path, flags: list[str], options: dict[str, Any]) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir()
    mxnet("lists", arguments=[*flags, str(folder / "x"), str(photos)])
    for part in lists.split_entries(lists.shuffled(lists.list_folder(photos)), **options):
        lists.write_list(tmp_path / f"x{part.suffix}.lst", part.entries)
    ours = {path.name: path.read_bytes() for path in tmp_path.glob("*.lst")}
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == ours
