"""Packing images: lists, encoding, order independent of threads, bad files, and no partial output."""

from __future__ import annotations

import io
import struct
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from echelon.data.images.jpeg_cut import cut
from echelon.data.pack import im2rec, lists
from echelon.data.pack.im2rec import Encoding, ImageError, encode_image, pack_list
from echelon.data.pack.lists import Entry
from echelon.data.records import IndexedReader, unpack
from echelon.errors import DataError, UsageError


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    root = tmp_path / "photos"
    rng = np.random.default_rng(0)
    for number in range(12):
        folder = root / ("cat", "dog", "eel/deep")[number % 3]
        folder.mkdir(parents=True, exist_ok=True)
        suffix = ".png" if number % 2 else ".JPG"
        pixels = rng.integers(0, 256, (20 + number, 30, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{number:02d}{suffix}")
    (root / "notes.txt").write_text("no image")
    return root


def decoded(payload: bytes | bytearray | memoryview) -> Image.Image:
    image = Image.open(io.BytesIO(payload))
    image.load()
    return image


def test_folders_are_classes_in_sorted_order(photos: Path) -> None:
    entries = lists.list_folder(photos)
    assert [entry.index for entry in entries] == list(range(12))
    assert lists.class_names(entries) == {0: "cat", 1: "dog", 2: "eel/deep"}
    assert entries[0] == Entry(0, (0.0,), "cat/00.JPG")
    assert [entry.path for entry in lists.list_folder(photos / "dog", [".png"])] == ["01.png", "07.png"]


def test_the_shuffle_depends_on_the_seed(photos: Path) -> None:
    entries = lists.list_folder(photos)
    assert lists.shuffled(entries, 1) == lists.shuffled(entries, 1)
    assert lists.shuffled(entries, 1) != lists.shuffled(entries, 2)
    assert sorted(entry.index for entry in lists.shuffled(entries, 1)) == list(range(12))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((1, 1.0, 0.0), {"": range(10)}),
        ((1, 0.8, 0.0), {"_train": range(8), "_val": range(8, 10)}),
        ((1, 0.6, 0.2), {"_test": range(2), "_train": range(2, 8), "_val": range(8, 10)}),
        ((1, 0.7, 0.3), {"_test": range(3), "_train": range(3, 10)}),
        ((2, 0.8, 0.0), {"_0_train": range(4), "_0_val": [4], "_1_train": range(5, 9), "_1_val": [9]}),
        ((3, 1.0, 0.0), {"_0": range(4), "_1": range(4, 8), "_2": range(8, 10)}),
    ],
)
def test_split_entries(arguments: tuple[int, float, float], expected: dict[str, range]) -> None:
    entries = [Entry(number, (0.0,), "x") for number in range(10)]
    parts = lists.split_entries(entries, *arguments)
    assert {part.suffix: [entry.index for entry in part.entries] for part in parts} == {
        suffix: list(indices) for suffix, indices in expected.items()
    }


@pytest.mark.parametrize("arguments", [(0, 1.0, 0.0), (11, 1.0, 0.0), (1, 0.0, 0.0), (1, 1.2, 0.0), (1, 0.8, 0.3)])
def test_invalid_splits_are_errors(arguments: tuple[int, float, float]) -> None:
    with pytest.raises(UsageError, match="expected"):
        lists.split_entries([Entry(number, (0.0,), "x") for number in range(10)], *arguments)


def test_list_text_round_trip(tmp_path: Path) -> None:
    entries = [Entry(4, (1.0, 0.25), "a b/c.jpg"), Entry(0, (3.0,), "ü.png")]
    lists.write_list(tmp_path / "x.lst", entries)
    assert (tmp_path / "x.lst").read_text() == "4\t1.000000\t0.250000\ta b/c.jpg\n0\t3.000000\tü.png\n"
    assert lists.read_list(tmp_path / "x.lst") == entries


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("1 2 b.jpg", "1 fields"),
        ("1\tb.jpg", "2 fields"),
        ("x\t2\tb.jpg", "'x' is not a whole number"),
        ("1\tcat\tb.jpg", "label is not a number"),
        ("0\t2\tb.jpg", "index 0 is also on an earlier line"),
    ],
)
def test_bad_list_lines(tmp_path: Path, line: str, reason: str) -> None:
    path = tmp_path / "x.lst"
    path.write_text(f"0\t1\ta.jpg\n\n{line}\n")
    with pytest.raises(DataError, match=rf"x\.lst, line 3: .*{reason}"):
        lists.read_list(path)
    bad: list[DataError] = []
    assert lists.read_list(path, bad.append) == [Entry(0, (1.0,), "a.jpg")]
    assert len(bad) == 1


@pytest.mark.parametrize("threads", [1, 3])
def test_records_are_in_list_order(photos: Path, tmp_path: Path, threads: int) -> None:
    entries = lists.shuffled(lists.list_folder(photos))
    rec = tmp_path / "x.rec"
    result = pack_list(entries, photos, rec, Encoding(pass_through=True), threads=threads)
    assert (result.num_records, result.num_bytes) == (12, rec.stat().st_size)
    with IndexedReader(rec) as reader:
        assert reader.keys.tolist() == [entry.index for entry in entries]
        for position, entry in enumerate(entries):
            header, payload = unpack(reader[position])
            assert (header.id, header.labels.tolist()) == (entry.index, list(entry.labels))
            assert payload == (photos / entry.path).read_bytes()


def test_all_labels_or_the_first(photos: Path, tmp_path: Path) -> None:
    entry = Entry(9, (4.0, 5.0), "cat/00.JPG")
    for all_labels, expected in ((False, [4.0]), (True, [4.0, 5.0])):
        pack_list([entry], photos, tmp_path / "x.rec", Encoding(), all_labels=all_labels)
        with IndexedReader(tmp_path / "x.rec") as reader:
            assert unpack(reader.read(9))[0].labels.tolist() == expected


def photo(size: tuple[int, int], mode: str = "RGB", kind: str = "PNG", **options: object) -> bytes:
    stream = io.BytesIO()
    Image.linear_gradient("L").resize(size).convert(mode).save(stream, kind, **options)
    return stream.getvalue()


@pytest.mark.parametrize(
    ("size", "encoding", "expected"),
    [
        ((60, 40), Encoding(), (60, 40)),
        ((60, 40), Encoding(resize=20), (30, 20)),
        ((41, 60), Encoding(resize=20), (20, 29)),
        ((60, 40), Encoding(resize=20, center_crop=True), (20, 20)),
        ((10, 10), Encoding(resize=20), (20, 20)),
    ],
)
def test_resize_and_center_crop(size: tuple[int, int], encoding: Encoding, expected: tuple[int, int]) -> None:
    for kind in ("PNG", "JPEG"):
        image = decoded(encode_image(photo(size, kind=kind), encoding))
        assert (image.size, image.format, image.mode) == (expected, "JPEG", "RGB")


def test_colours_and_encodings() -> None:
    assert decoded(encode_image(photo((9, 9)), Encoding(color=im2rec.GREY))).mode == "L"
    assert decoded(encode_image(photo((9, 9), "LA"), Encoding(color=im2rec.AS_IS))).mode == "RGB"
    png = Encoding(".png", 6, color=im2rec.AS_IS)
    assert decoded(encode_image(photo((9, 9), "RGBA"), png)).mode == "RGBA"
    data = photo((33, 9))
    assert list(decoded(encode_image(data, png)).tobytes()) == list(decoded(data).tobytes())
    low, high = (len(encode_image(data, Encoding(quality=quality))) for quality in (5, 100))
    assert low < high


@pytest.mark.parametrize(
    ("across", "wanted", "expected"),
    [(30, 4, 3), (25, 4, 5), (24, 4, 4), (23, 4, 1), (8, 4, 4), (7, 4, 0), (30, 15, 15), (30, 16, 0), (30, 0, 0)],
)
def test_a_restart_interval_divides_a_row(across: int, wanted: int, expected: int) -> None:
    assert im2rec.fit_interval(across, wanted) == expected


@pytest.mark.parametrize(("color", "expected"), [(im2rec.COLOUR, (160, 64)), (im2rec.GREY, (80, 56))])
def test_jpegs_with_restart_markers_have_the_same_pixels_and_can_be_cut(color: int, expected: tuple[int, int]) -> None:
    data = photo((400, 300))
    marked = encode_image(data, Encoding(color=color))
    plain = encode_image(data, Encoding(color=color, restart_interval=0))
    assert b"\xff\xdd\x00\x04\x00\x05" in marked
    assert b"\xff\xdd\x00\x04" not in plain
    assert decoded(marked).tobytes() == decoded(plain).tobytes()
    smaller = cut(marked, (200, 100, 250, 150))
    assert smaller is not None
    assert decoded(smaller.payload).size == expected


@pytest.mark.parametrize("color", [im2rec.COLOUR, im2rec.GREY, im2rec.AS_IS])
def test_sixteen_bit_images_are_packed_with_their_upper_bits(color: int) -> None:
    grey = (np.arange(64 * 64, dtype=np.uint16) * 16).reshape(64, 64)
    stream = io.BytesIO()
    Image.fromarray(grey).save(stream, "PNG")
    packed = decoded(encode_image(stream.getvalue(), Encoding(color=color, suffix=".png", quality=3)))
    assert np.array_equal(np.asarray(packed.convert("L")), grey >> 8)


def test_a_photograph_is_packed_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    data = photo((60, 41), kind="JPEG", exif=exif)
    assert decoded(encode_image(data, Encoding())).size == (41, 60)
    assert decoded(encode_image(data, Encoding(resize=20))).size == (20, 29)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_exif_orientation_is_applied(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    stream = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (21, 34, 3), np.uint8)).save(stream, "PNG", exif=exif)
    packed = decoded(encode_image(stream.getvalue(), Encoding(".png", 1)))
    assert np.array_equal(np.asarray(packed), np.asarray(ImageOps.exif_transpose(decoded(stream.getvalue()))))


SHORT, ASCII = 3, 2


def exif_of(*entries: tuple[int, int, int, bytes]) -> bytes:
    """Return EXIF with entries (tag, type, count, value), which may be invalid."""
    table = b"".join(struct.pack("<HHI4s", *entry) for entry in entries)
    return b"Exif\0\0II*\0\x08\0\0\0" + struct.pack("<H", len(entries)) + table + bytes(4)


@pytest.mark.parametrize(
    ("exif", "is_turned"),
    [
        (exif_of((0x0112, SHORT, 1, b"\6"), (0x0123, ASCII, 2, b"x")), True),  # a grey response curve that is text
        (exif_of((0x0112, ASCII, 2, b"6")), False),
        (exif_of((0x0112, SHORT, 2, b"\6\0\7")), True),  # the first of two values is used
        (exif_of((0x0112, SHORT, 1, b"\x09")), False),
        (exif_of((0x0112, SHORT, 9, b"\xff\xff\xff")), False),
        (b"Exif\0\0II*\0\xff\xff\xff\xff", False),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_images_with_unusual_exif_are_packed(exif: bytes, is_turned: bool) -> None:
    data = photo((60, 41), kind="JPEG", exif=exif)
    assert decoded(encode_image(data, Encoding())).size == ((41, 60) if is_turned else (60, 41))
    assert decoded(encode_image(data, Encoding(resize=20))).size == ((20, 29) if is_turned else (29, 20))


@pytest.mark.parametrize(
    "options",
    [
        {"suffix": ".gif"},
        {"quality": 0},
        {"quality": 101},
        {"suffix": ".png", "quality": 95},
        {"resize": -1},
        {"restart_interval": -1},
        {"color": 2},
        {"pass_through": True, "resize": 9},
    ],
)
def test_invalid_encodings_are_errors(options: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        Encoding(**options)  # type: ignore[arg-type]


def broken_set(root: Path) -> list[Entry]:
    (root / "cat" / "empty.jpg").write_bytes(b"")
    whole = (root / "cat" / "00.JPG").read_bytes()
    (root / "cat" / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    names = ["cat/00.JPG", "cat/empty.jpg", "cat/gone.jpg", "cat/cut.jpg", "dog/01.png"]
    return [Entry(number, (0.0,), name) for number, name in enumerate(names)]


def test_a_bad_image_is_raised_and_leaves_no_files(photos: Path, tmp_path: Path) -> None:
    with pytest.raises(ImageError, match=r"empty\.jpg: not a readable image \(cannot identify image file\)"):
        pack_list(broken_set(photos), photos, tmp_path / "x.rec", Encoding(), threads=2)
    assert [each.name for each in tmp_path.iterdir()] == ["photos"]


def test_bad_images_are_skipped_on_request(photos: Path, tmp_path: Path) -> None:
    bad: list[DataError] = []
    rec = tmp_path / "x.rec"
    assert pack_list(broken_set(photos), photos, rec, Encoding(), on_bad=bad.append).num_records == 2
    assert [str(fault).split(": ")[0].rpartition("/")[2] for fault in bad] == ["empty.jpg", "gone.jpg", "cut.jpg"]
    with IndexedReader(rec) as reader:
        assert reader.keys.tolist() == [0, 4]
    with pytest.raises(DataError, match="no good image"):
        pack_list(broken_set(photos)[1:4], photos, tmp_path / "y.rec", Encoding(), on_bad=bad.append)
    assert not (tmp_path / "y.rec").exists()


def test_an_interrupt_leaves_no_files(photos: Path, tmp_path: Path) -> None:
    done: list[int] = []

    def interrupt(amount: int) -> None:
        done.append(amount)
        if len(done) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack_list(lists.list_folder(photos), photos, tmp_path / "x.rec", Encoding(), threads=2, on_done=interrupt)
    assert len(done) == 3
    assert [each.name for each in tmp_path.iterdir()] == ["photos"]


def test_a_folder_without_images_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no image with suffix .*\.jpg.*--exts"):
        lists.list_folder(tmp_path)
    with pytest.raises(UsageError, match="is not a folder"):
        lists.list_folder(tmp_path / "none")
