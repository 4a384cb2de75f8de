"""Record files: reading in order, at random, by many threads, several files as one; and the files after an error."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from echelon.data.records import IndexedReader, IndexedWriter, Reader, RecordError, Writer, index_path
from echelon.errors import DataError, UsageError


def payload(number: int) -> bytes:
    return b"%d:" % number + bytes([number % 256]) * (number % 37)


def write(path: Path, count: int, first_key: int = 0, first: int = 0) -> Path:
    with IndexedWriter(path) as writer:
        for number in range(count):
            writer.write(first_key + 3 * number, payload(first + number))
    return path


def test_read_reset_and_end(tmp_path: Path) -> None:
    path = write(tmp_path / "a.rec", 3)
    with Reader(path) as reader:
        first = reader.read()
        assert first is not None
        assert bytes(first) == payload(0)
        assert [reader.read(), reader.read(), reader.read()] == [payload(1), payload(2), None]
        reader.reset()
        assert bytes(reader.read() or b"") == payload(0)
        assert len(list(reader)) == 3
    assert bytes(first) == payload(0)  # a view stays valid after its reader is closed


def test_index_file_contents(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "a.rec", tmp_path / "b.idx") as writer:
        writer.write(7, b"8 bytes!")
        writer.write(2, b"")
    assert (tmp_path / "b.idx").read_bytes() == b"7\t0\n2\t16\n"


def test_read_by_key_and_by_position(tmp_path: Path) -> None:
    with IndexedReader(write(tmp_path / "a.rec", 5, first_key=100)) as reader:
        assert (len(reader), reader.keys.tolist()) == (5, [100, 103, 106, 109, 112])
        assert reader.read(109) == reader[3] == payload(3)
        with pytest.raises(UsageError, match=r"unknown key 3: .* has 5 others"):
            reader.read(3)
        with pytest.raises(IndexError):
            reader[5]


def test_read_without_an_index(tmp_path: Path) -> None:
    path = write(tmp_path / "a.rec", 9)
    with IndexedReader(path) as indexed, IndexedReader.from_scan(path) as scanned:
        assert scanned.offsets.tolist() == indexed.offsets.tolist()
        assert [scanned.read(key) for key in range(9)] == [payload(number) for number in range(9)]
    index_path(path).unlink()
    with pytest.raises(DataError, match=r"no index .*a\.idx; create it: echelon data rec2idx .*a\.rec"):
        IndexedReader(path)


def test_several_files_read_as_one(tmp_path: Path) -> None:
    names = f"{write(tmp_path / 'a.rec', 4)};{write(tmp_path / 'b.rec', 2, first=30)}"
    expected = [payload(number) for number in (0, 1, 2, 3, 30, 31)]
    with Reader(names) as reader:
        assert [bytes(each) for each in reader] == expected
    with IndexedReader.from_scan(names) as reader:
        assert [reader.read(key) for key in (5, 0, 3, 4)] == [expected[key] for key in (5, 0, 3, 4)]
    with IndexedReader(names) as reader:
        assert [reader[position] for position in range(6)] == expected
        with pytest.raises(DataError, match="key 0 more than once"):
            reader.read(0)


def test_a_file_without_records(tmp_path: Path) -> None:
    path = write(tmp_path / "none.rec", 0)
    assert path.read_bytes() == b""
    with Reader(path) as reader, IndexedReader(path) as indexed, IndexedReader.from_scan(path) as scanned:
        assert (list(reader), len(indexed), len(scanned)) == ([], 0, 0)


def test_threads_share_one_reader(tmp_path: Path) -> None:
    count = 400
    with IndexedReader(write(tmp_path / "a.rec", count)) as reader, ThreadPoolExecutor(8) as pool:
        keys = [3 * (number * 7919 % count) for number in range(4 * count)]
        assert [bytes(each) for each in pool.map(reader.read, keys)] == [payload(key // 3) for key in keys]


def test_pickled_reader_opens_the_files_again(tmp_path: Path) -> None:
    with IndexedReader(write(tmp_path / "a.rec", 5)) as reader:
        data = pickle.dumps(reader)
    with pickle.loads(data) as again:
        assert again.read(6) == payload(2)


def test_index_of_another_file(tmp_path: Path) -> None:
    short, long = write(tmp_path / "short.rec", 2), write(tmp_path / "long.rec", 9)
    with pytest.raises(DataError, match=r"long\.idx does not belong to .*short\.rec.*rec2idx"):
        IndexedReader(short, index_path(long))
    other = tmp_path / "other.idx"
    other.write_text("".join(f"{number}\t{4 * number}\n" for number in range(5)))
    message = r"other\.idx does not belong to .*long\.rec: it lists a record at byte 4, but none begins there; .*idx"
    with pytest.raises(DataError, match=message):
        IndexedReader(long, other)
    with pytest.raises(DataError, match=rf"no index .*none\.idx; create it: echelon data rec2idx {long} .*none\.idx"):
        IndexedReader(long, tmp_path / "none.idx")
    index_path(short).write_text("0\t0\n1\t4\n")
    with IndexedReader(short) as reader, pytest.raises(RecordError, match="record 1 at byte 4: expected the magic"):
        reader[1]


@pytest.mark.parametrize("line", ["x\t4", "1\t-4.5", "5", "1 2 3"])
def test_a_bad_index_line_is_named(tmp_path: Path, line: str) -> None:
    path = write(tmp_path / "a.rec", 2)
    index_path(path).write_text(f"0\t0\n{line}\n")
    with pytest.raises(DataError, match=r"a\.idx, line 2: expected `key<TAB>byte offset`"):
        IndexedReader(path)


@pytest.mark.parametrize("name", ["missing.rec", "no/folder.rec"])
def test_a_missing_file_error_says_where_and_how(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match=f"no record file .*{name}.*searched .*create one: echelon data im2rec"):
        Reader(tmp_path / name)


def test_a_folder_or_an_empty_name_instead_of_a_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is a folder"):
        Reader(tmp_path)
    with pytest.raises(UsageError, match="expected a record file"):
        Reader(" ; ")
    with pytest.raises(UsageError, match=r"mkdir -p .*none"):
        Writer(tmp_path / "none" / "a.rec")
    with pytest.raises(UsageError, match="another name"):
        IndexedWriter(tmp_path / "a.rec", tmp_path / "a.rec")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_interrupted_writer_leaves_the_old_files(tmp_path: Path, error: type[BaseException]) -> None:
    path = write(tmp_path / "a.rec", 3)
    before = {each.name: each.read_bytes() for each in tmp_path.iterdir()}

    def interrupted() -> None:
        with IndexedWriter(path) as writer:
            writer.write(0, b"half")
            raise error

    with pytest.raises(error):
        interrupted()
    assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == before


def test_rewriting_a_file_in_use_does_not_disturb_its_reader(tmp_path: Path) -> None:
    path = write(tmp_path / "a.rec", 50)
    with IndexedReader(path) as reader:
        write(path, 1)
        assert [bytes(reader[k]) for k in range(50)] == [payload(k) for k in range(50)]


def test_an_old_index_is_never_beside_new_records(tmp_path: Path) -> None:
    path = write(tmp_path / "a.rec", 3)
    writer = IndexedWriter(path)
    writer.write(0, b"new")
    next(tmp_path.glob(".a.idx*")).unlink()  # so that the index cannot be renamed into place
    with pytest.raises(FileNotFoundError):
        writer.close()
    assert [each.name for each in tmp_path.iterdir()] == ["a.rec"]
    with IndexedReader.from_scan(path) as reader:
        assert [bytes(each) for each in map(reader.read, range(len(reader)))] == [b"new"]
