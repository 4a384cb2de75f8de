"""The commands of `echelon data`: what they print, what they write, and their exit status."""

from __future__ import annotations

import argparse
import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from echelon.cli.data import add_parser
from echelon.data.records import Header, IndexedWriter, Reader, Writer, index_path, pack, unpack
from echelon.errors import DataError, UsageError


def echelon_data(*words: str | Path) -> int:
    parser = argparse.ArgumentParser(prog="echelon")
    add_parser(parser.add_subparsers(required=True))
    args = parser.parse_args(["data", *map(str, words)])
    status = args.run(args)
    assert isinstance(status, int)
    return status


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    rng = np.random.default_rng(1)
    for number in range(10):
        folder = tmp_path / "photos" / ("ant", "bee")[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (16, 16, 3), np.uint8)).save(folder / f"{number}.png")
    return tmp_path / "photos"


def jpeg() -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (8, 8)).save(stream, "JPEG")
    return stream.getvalue()


@pytest.fixture
def packed(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    assert echelon_data("im2rec", tmp_path / "x", photos, "--encoding", "png") == 0
    capsys.readouterr()
    return tmp_path / "x.rec"


def test_im2rec_in_one_step(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert echelon_data("im2rec", tmp_path / "x", photos, "--train-ratio", "0.8", "--threads", "2") == 0
    out = capsys.readouterr().out
    assert "label 0: ant\nlabel 1: bee\n" in out
    assert "x_train.rec and .idx: 8 records" in out
    assert "x_val.rec and .idx: 2 records" in out
    names = {path.name for path in tmp_path.iterdir()}
    suffixes = ("rec", "idx", "classes")
    assert names == {"photos", *(f"x_{split}.{suffix}" for split in ("train", "val") for suffix in suffixes)}
    assert (tmp_path / "x_val.classes").read_text() == "ant\nbee\n"


def test_im2rec_reports_left_out_files(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (photos / "cat").mkdir()
    for number in range(3):
        Image.new("RGB", (8, 8)).save(photos / "cat" / f"{number}.webp")
    (photos / "README").touch()
    echelon_data("im2rec", tmp_path / "x", photos)
    assert capsys.readouterr().err == "left out: 3 .webp, 1 without suffix; use --exts to pack other suffixes\n"
    echelon_data("im2rec", tmp_path / "y", photos, "--exts", ".png", ".webp")
    output = capsys.readouterr()
    assert "label 2: cat" in output.out
    assert output.err == "left out: 1 without suffix; use --exts to pack other suffixes\n"


def test_im2rec_with_lists_gives_the_same_files(photos: Path, tmp_path: Path) -> None:
    direct, listed = tmp_path / "a", tmp_path / "b"
    echelon_data("im2rec", direct, photos, "--train-ratio", "0.8")
    echelon_data("im2rec", "--list", listed, photos, "--train-ratio", "0.8")
    assert (tmp_path / "b_val.lst").read_text().count("\n") == 2
    with pytest.raises(UsageError, match=r"--train-ratio.*b_train\.lst .*remove the lists"):
        echelon_data("im2rec", listed, photos, "--train-ratio", "0.8")
    echelon_data("im2rec", listed, photos)
    for name in ("train.rec", "train.idx", "val.rec", "val.idx"):
        assert (tmp_path / f"a_{name}").read_bytes() == (tmp_path / f"b_{name}").read_bytes()


@pytest.mark.parametrize(("words", "count"), [([], 4), (["--restart-interval", "0"], 0), (["--pass-through"], 0)])
def test_im2rec_writes_restart_markers_into_jpegs(tmp_path: Path, words: list[str], count: int) -> None:
    folder = tmp_path / "wide"
    folder.mkdir()
    for number in range(4):
        Image.new("RGB", (400, 20), (number, 0, 0)).save(folder / f"{number}.jpg")
    echelon_data("im2rec", tmp_path / "x", folder, *words)
    assert (tmp_path / "x.rec").read_bytes().count(b"\xff\xdd\x00\x04\x00\x05") == count


def test_im2rec_does_not_pack_lists_of_other_prefixes(photos: Path, tmp_path: Path) -> None:
    (tmp_path / "xylophone.lst").write_text("nonsense")
    echelon_data("im2rec", tmp_path / "x", photos)
    assert not (tmp_path / "xylophone.rec").exists()
    with pytest.raises(DataError, match=r"xylophone\.lst, line 1"):
        echelon_data("im2rec", tmp_path / "xylophone.lst", photos)


def test_im2rec_bad_image(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (photos / "ant" / "bad.png").write_bytes(b"no png")
    with pytest.raises(DataError, match=r"bad\.png: not a readable image.*--skip-bad-records"):
        echelon_data("im2rec", tmp_path / "x", photos)
    assert echelon_data("im2rec", tmp_path / "x", photos, "--skip-bad-records") == 0
    printed = capsys.readouterr()
    assert "10 records" in printed.out
    assert "1 bad skipped" in printed.out
    assert "bad.png" in printed.err


def test_info(packed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert echelon_data("info", packed) == 0
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()[1:]]
    table = dict(lines)
    assert table["records"] == "10"
    assert table["images"] == "10 .png; the first is 16 x 16 RGB PNG"
    assert table["labels"] == "2 different, 0 ... 1, 5 ... 5 records each; 1 per record"
    assert table["index"].endswith("x.idx, 10 keys")


def test_info_of_plain_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Writer(tmp_path / "plain.rec") as writer:
        writer.write(b"hello")
    assert echelon_data("info", tmp_path / "plain.rec") == 0
    out = capsys.readouterr().out
    assert "1 records too short for an image header" in out
    assert "none beside it; create it: echelon data rec2idx" in out


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([np.nan, 2, np.nan, 1, np.nan], "3 different, 1 ... 2 and NaN, 1 ... 3 records each; 1 per record"),
        ([np.nan, np.nan], "1 different, NaN, 2 ... 2 records each; 1 per record"),
    ],
)
def test_info_counts_nan_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], labels: list[float], message: str
) -> None:
    with Writer(tmp_path / "nan.rec") as writer:
        for label in labels:
            writer.write(pack(Header(label), jpeg()))
    echelon_data("info", tmp_path / "nan.rec")
    assert f"  labels  {message}\n" in capsys.readouterr().out


def test_verify(packed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert echelon_data("verify", packed, "--decode") == 0
    assert "10 good records, index" in capsys.readouterr().out


def damage(packed: Path, where: str) -> int:
    offset = int(index_path(packed).read_text().split()[5])
    data = bytearray(packed.read_bytes())
    if where == "magic":
        data[offset] ^= 1
    elif where == "length":
        data[offset + 5] ^= 8
    else:
        data[offset + 8 + 24] ^= 0xFF
    packed.write_bytes(data)
    return offset


@pytest.mark.parametrize(("where", "flags"), [("magic", []), ("length", []), ("image", ["--decode"])])
def test_verify_names_the_first_bad_record(
    packed: Path, capsys: pytest.CaptureFixture[str], where: str, flags: list[str]
) -> None:
    offset = damage(packed, where)
    assert echelon_data("verify", packed, *flags) == 1
    assert capsys.readouterr().err.startswith(f"bad: {packed}: record 2 at byte {offset}: ")
    assert echelon_data("verify", packed, *flags, "--skip-bad-records") == 0
    assert "9 good records" in (out := capsys.readouterr().out)
    assert out.endswith(", 1 bad skipped\n")


def test_verify_a_wrong_index(packed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = index_path(packed).read_text()
    index_path(packed).write_text(text + "77\t4\n")
    assert echelon_data("verify", packed) == 1
    assert "record 10 at byte 4: key 77 of" in (err := capsys.readouterr().err)
    assert "create the index again: echelon data rec2idx" in err
    index_path(packed).write_text(text[: text.index("\n") + 1])
    assert echelon_data("verify", packed) == 1
    assert "does not list it: it lists 1 of 10 records" in capsys.readouterr().err


def test_rec2idx(packed: Path, tmp_path: Path) -> None:
    offsets = index_path(packed).read_text().split()[1::2]
    index_path(packed).unlink()
    assert echelon_data("rec2idx", packed) == 0
    assert index_path(packed).read_text() == "".join(f"{k}\t{offset}\n" for k, offset in enumerate(offsets))
    damage(packed, "magic")
    with pytest.raises(DataError, match=r"record 2 at byte .*--skip-bad-records"):
        echelon_data("rec2idx", packed, tmp_path / "y.idx")
    assert not (tmp_path / "y.idx").exists()
    echelon_data("rec2idx", packed, tmp_path / "y.idx", "--skip-bad-records")
    assert (tmp_path / "y.idx").read_text().split()[1::2] == offsets[:2] + offsets[3:]


def test_rec2idx_does_not_overwrite_records(packed: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.rec"
    other.write_bytes(packed.read_bytes())
    for words in [(packed, other), (packed, packed)]:
        with pytest.raises(UsageError, match=r"cannot write .*\.rec: that is a record file; use .*x\.idx"):
            echelon_data("rec2idx", *words)
    with pytest.raises(UsageError, match="several record files, but an index is for one"):
        echelon_data("rec2idx", f"{packed};{other}")
    assert other.read_bytes() == packed.read_bytes()
    assert echelon_data("verify", packed) == 0


def test_extract_and_pack_again(packed: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert echelon_data("extract", packed, out) == 0
    assert sorted(path.name for path in out.iterdir()) == ["0000", "0001", "extract.classes", "extract.lst"]
    assert (out / "extract.classes").read_text() == "ant\nbee\n"
    echelon_data("im2rec", out / "extract.lst", out, "--pass-through")
    assert (out / "extract.rec").read_bytes() == packed.read_bytes()
    with pytest.raises(UsageError, match="not empty"):
        echelon_data("extract", packed, out)


def test_class_names_survive_listing_packing_and_extracting(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    echelon_data("im2rec", "--list", tmp_path / "y", photos)
    assert (tmp_path / "y.classes").read_text() == "ant\nbee\n"
    (tmp_path / "y.classes").write_text("Ameise\nBiene\n")
    echelon_data("im2rec", tmp_path / "y", photos)
    assert "y.classes: names of 2 classes" in capsys.readouterr().out
    echelon_data("info", tmp_path / "y.rec")
    assert "  classes Ameise, Biene\n" in capsys.readouterr().out
    echelon_data("extract", f"{tmp_path / 'y.rec'};{tmp_path / 'y.rec'}", tmp_path / "out", "--skip-bad-records")
    assert (tmp_path / "out" / "extract.classes").read_text() == "Ameise\nBiene\n"
    echelon_data("extract", tmp_path / "y.rec", tmp_path / "raw", "--raw")
    assert not list((tmp_path / "raw").glob("*.classes"))


def test_a_folder_without_class_folders_has_no_class_names(photos: Path, tmp_path: Path) -> None:
    (tmp_path / "z.classes").write_text("from\nbefore\n")
    echelon_data("im2rec", tmp_path / "z", photos / "ant")
    assert not (tmp_path / "z.classes").exists()


def rewritten(rec: Path, out: Path) -> list[tuple[int, list[float], bytes]]:
    """Return the contents of a record file after its images were extracted and packed again."""
    echelon_data("extract", rec, out)
    echelon_data("im2rec", out / "extract.lst", out, "--pass-through", "--pack-label")
    return contents(out / "extract.rec")


def contents(rec: Path) -> list[tuple[int, list[float], bytes]]:
    with Reader(rec) as reader:
        headers = [unpack(payload) for payload in reader]
        return [(header.id, header.labels.tolist(), bytes(image)) for header, image in headers]


def test_extract_keeps_every_bit_of_the_labels(tmp_path: Path) -> None:
    drawn = np.random.default_rng(5).integers(0, 2**32, 200, np.uint32).view(np.float32)
    odd = [1e-7, 0.123456789, 1 / 3, -0.0, 1e-45, 3.4e38, np.inf, 16777217.0, *drawn[~np.isnan(drawn)].tolist()]
    image = jpeg()
    with Writer(tmp_path / "m.rec") as writer:
        for number, label in enumerate(odd):
            writer.write(pack(Header([label, number] if number % 2 else label, 7 * number), image))
    assert rewritten(tmp_path / "m.rec", tmp_path / "out") == contents(tmp_path / "m.rec")
    assert (tmp_path / "out" / "extract.rec").read_bytes() == (tmp_path / "m.rec").read_bytes()


def test_extract_writes_labels_as_mxnet_does_if_that_is_exact(tmp_path: Path) -> None:
    with Writer(tmp_path / "m.rec") as writer:
        writer.write(pack(Header([3, -1, 0.1, 1e6, 0.25, 1e-7, 0.123456789], 5), jpeg()))
    echelon_data("extract", tmp_path / "m.rec", tmp_path / "out")
    _, *labels, _ = (tmp_path / "out" / "extract.lst").read_text().split("\t")
    assert labels == ["3.000000", "-1.000000", "0.100000", "1000000.000000", "0.250000", "1e-07", "0.12345679"]


def test_extract_gives_new_ids_if_records_share_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Writer(tmp_path / "m.rec") as writer:
        for label, key in ((4, 0), (5, 0), (6, 9)):
            writer.write(pack(Header(label, key), jpeg()))
    assert [(key, label) for key, label, _ in rewritten(tmp_path / "m.rec", tmp_path / "out")] == [
        (0, [4.0]),
        (1, [5.0]),
        (2, [6.0]),
    ]
    assert (
        "the records have only 2 different ids, but a list needs one per image: extract.lst uses 0 ... 2 instead"
        in (capsys.readouterr().err)
    )
    echelon_data("extract", tmp_path / "m.rec", tmp_path / "last", "--limit", "1")
    assert capsys.readouterr().err == ""


def test_extract_all_labels_raw_and_limit(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "m.rec") as writer:
        for number in range(3):
            writer.write(number, pack(Header([number, 0.5], number), b"\xff\xd8\xff"))
    echelon_data("extract", tmp_path / "m.rec", tmp_path / "a", "--limit", "2")
    assert (tmp_path / "a" / "extract.lst").read_text() == (
        "0\t0.000000\t0.500000\t0000/00000000.jpg\n1\t1.000000\t0.500000\t0001/00000001.jpg\n"
    )
    echelon_data("extract", tmp_path / "m.rec", tmp_path / "b", "--raw")
    assert (tmp_path / "b" / "00000002.bin").read_bytes() == pack(Header([2, 0.5], 2), b"\xff\xd8\xff")


def test_extract_leaves_nothing_after_an_error(packed: Path, tmp_path: Path) -> None:
    damage(packed, "magic")
    before = set(tmp_path.iterdir())
    with pytest.raises(DataError, match="record 2"):
        echelon_data("extract", packed, tmp_path / "out")
    assert set(tmp_path.iterdir()) == before


def test_convert(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "test_batch.bin").write_bytes(bytes(3073 * 3))
    assert echelon_data("convert", tmp_path, tmp_path / "cifar10") == 0
    assert "cifar10 (binary)" in (out := capsys.readouterr().out)
    assert "cifar10_val.rec and .idx: 3 records" in out
    assert echelon_data("verify", tmp_path / "cifar10_val.rec", "--decode") == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--quality", "101"], "quality 101"),
        (["--threads", "0"], "--num-thread 0"),
        (["--pass-through", "--resize", "9"], "cannot be combined with resize or center-crop"),
        (["--pass-through", "--quality", "50"], "--pass-through stores files unchanged, so --quality 50 would have no"),
        (["--pass-through", "--color", "1", "--encoding", ".jpg"], "so --encoding .jpg and --color 1 would have no"),
        (["--pass-through", "--restart-interval", "0"], "--restart-interval 0 would have no"),
        (["--list", "--quality", "101"], "--list only writes lists, so --quality 101 would have no effect; .* pack"),
        (["--list", "--resize", "0", "--center-crop"], "so --resize 0 and --center-crop would have no"),
        (["--list", "--encoding", "png", "--color", "0"], "so --encoding png and --color 0 would have no"),
        (["--list", "--pass-through", "--pack-label"], "so --pass-through and --pack-label would have no"),
        (["--list", "--restart-interval", "0"], "so --restart-interval 0 would have no"),
        (["--chunks", "99"], "--chunks 99"),
        (["--exts", ".tiff"], r"\.tiff"),
    ],
)
def test_invalid_flags_write_no_files(photos: Path, tmp_path: Path, words: list[str], message: str) -> None:
    with pytest.raises((UsageError, DataError), match=message):
        echelon_data("im2rec", tmp_path / "x", photos, *words)
    assert [path.name for path in tmp_path.iterdir()] == ["photos"]


def test_every_command_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("im2rec", "convert", "rec2idx", "info", "verify", "extract"):
        with pytest.raises(SystemExit) as caught:
            echelon_data(command, "--help")
        assert caught.value.code == 0
        assert "--skip-bad-records" in capsys.readouterr().out


def write_list(path: Path, photos: Path, label: float) -> None:
    images = sorted(photos.rglob("*.png"))[:2]
    lines = [f"{number}\t{label}\t{image.relative_to(photos)}\n" for number, image in enumerate(images)]
    path.write_text("".join(lines))


def test_im2rec_packs_and_prints_every_list_of_its_prefix(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, name in enumerate(("k.lst", "k_trainval.lst", "k_0_x.lst", "kitchen.lst", "k_.txt", "ak_train.lst")):
        write_list(tmp_path / name, photos, 10 + number)
    echelon_data("im2rec", tmp_path / "k", photos)
    assert {path.name for path in tmp_path.glob("*.rec")} == {"k.rec", "k_trainval.rec", "k_0_x.rec"}
    assert [labels for _, labels, _ in contents(tmp_path / "k_trainval.rec")] == [[11.0], [11.0]]
    listed = " ".join(str(tmp_path / name) for name in ("k.lst", "k_0_x.lst", "k_trainval.lst"))
    output = capsys.readouterr()
    assert output.out.startswith(f"packing {listed}\n")
    assert output.err == (
        f"not packed: {tmp_path / 'kitchen.lst'}; PREFIX stands for k.lst and k_*.lst; "
        "to pack another list, give its full name\n"
    )


def test_im2rec_of_a_folder_reports_lists_that_it_does_not_pack(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_list(tmp_path / "k1.lst", photos, 10)
    echelon_data("im2rec", tmp_path / "k", photos)
    output = capsys.readouterr()
    assert "k.rec and .idx: 10 records" in output.out
    assert output.err.startswith(f"not packed: {tmp_path / 'k1.lst'}; ")
    echelon_data("im2rec", tmp_path / "k1.lst", photos)
    output = capsys.readouterr()
    assert output.out.startswith(f"packing {tmp_path / 'k1.lst'}\n")
    assert output.err == ""


@pytest.mark.parametrize("prefix", ["out/", "out/.", "."])
def test_a_prefix_that_is_a_folder_is_an_error(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefix: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "test_batch.bin").write_bytes(bytes(3073))
    for words in (("im2rec", prefix, photos), ("im2rec", "--list", prefix, photos), ("convert", tmp_path, prefix)):
        with pytest.raises(UsageError, match=rf"PREFIX '{prefix}' is a folder; .* example {prefix.rstrip('/')}/data$"):
            echelon_data(*words)
    assert sorted(path.name for path in tmp_path.rglob("*") if path.suffix != ".png") == [
        *("ant", "bee", "out", "photos", "test_batch.bin")
    ]


def test_im2rec_keeps_the_spaces_of_a_path(tmp_path: Path) -> None:
    for name in (" ant", "bee ", " c d "):
        (tmp_path / "photos" / name).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / "photos" / name / " 1.png")
    echelon_data("im2rec", "--list", tmp_path / "x", tmp_path / "photos")
    echelon_data("im2rec", tmp_path / "x", tmp_path / "photos")
    assert sorted(labels for _, labels, _ in contents(tmp_path / "x.rec")) == [[0.0], [1.0], [2.0]]


def test_extract_and_pack_again_loses_what_a_list_cannot_express(tmp_path: Path) -> None:
    """As documented in prepare-data.md: images, labels and ids stay, a list of one label and a second id do not."""
    with Writer(tmp_path / "m.rec") as writer:
        for header in (Header([4.0], 0), Header(5.0, 1, 7), Header([6.0, 1.0], 2)):
            writer.write(pack(header, jpeg()))
    assert rewritten(tmp_path / "m.rec", tmp_path / "out") == contents(tmp_path / "m.rec")
    expected = [pack(header, jpeg()) for header in (Header(4.0, 0), Header(5.0, 1), Header([6.0, 1.0], 2))]
    with Reader(tmp_path / "out" / "extract.rec") as reader:
        assert [bytes(payload) for payload in reader] == expected


def write_records(path: Path, count: int) -> None:
    with IndexedWriter(path) as writer:
        for number in range(count):
            writer.write(number, pack(Header(number, number), jpeg() + bytes(count)))


def test_verify_several_files_and_their_indexes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, count in (("a", 2), ("b", 5)):
        write_records(tmp_path / f"{name}.rec", count)
    recs, idxs = (f"{tmp_path / f'a{suffix}'};{tmp_path / f'b{suffix}'}" for suffix in (".rec", ".idx"))
    for words in ((recs, "--idx", idxs), (recs,)):
        assert echelon_data("verify", *words) == 0
        assert capsys.readouterr().out == f"{recs}: 7 good records, index {idxs}\n"
    with pytest.raises(UsageError, match=rf"2 record files but 1 index files: {recs} and {tmp_path}/a\.idx"):
        echelon_data("verify", recs, "--idx", tmp_path / "a.idx")
    (tmp_path / "b.idx").write_bytes((tmp_path / "a.idx").read_bytes())
    assert echelon_data("verify", recs, "--idx", idxs) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"bad: {tmp_path / 'b.rec'}: record ")
    assert err.endswith(f"create the index again: echelon data rec2idx {tmp_path / 'b.rec'} {tmp_path / 'b.idx'}\n")
    (tmp_path / "b.idx").unlink()
    assert echelon_data("verify", recs) == 0
    assert capsys.readouterr().out == f"{recs}: 7 good records, index {tmp_path / 'a.idx'}\n"
    (tmp_path / "a.idx").unlink()
    assert echelon_data("verify", recs) == 0
    assert capsys.readouterr().out == f"{recs}: 7 good records, no index\n"
