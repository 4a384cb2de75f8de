"""Class files: the names of classes beside a record file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from echelon.data.records.class_file import merge_class_names, read_class_names, write_class_names
from echelon.errors import DataError


def test_names_are_read_as_they_were_written(tmp_path: Path) -> None:
    rec = tmp_path / "x.rec"
    assert read_class_names(rec) == ()
    write_class_names(rec, ["cat", "", "Zebra und Pferd", "été"])
    assert (tmp_path / "x.classes").read_text(encoding="utf-8") == "cat\n\nZebra und Pferd\nété\n"
    assert read_class_names(rec) == read_class_names(tmp_path / "x.lst") == ("cat", "", "Zebra und Pferd", "été")
    write_class_names(rec, [])
    assert list(tmp_path.iterdir()) == []


def test_an_edited_file_may_have_other_line_ends(tmp_path: Path) -> None:
    (tmp_path / "x.classes").write_bytes(b"cat\r\n\r\ndog")
    assert read_class_names(tmp_path / "x.rec") == ("cat", "", "dog")
    (tmp_path / "x.classes").write_bytes(b"\n\n")
    assert read_class_names(tmp_path / "x.rec") == ()


def test_every_folder_name_can_be_written(tmp_path: Path) -> None:
    write_class_names(tmp_path / "x.rec", [os.fsdecode(b"caf\xe9"), "two\nlines"])
    assert read_class_names(tmp_path / "x.rec") == ("caf\N{REPLACEMENT CHARACTER}", "two lines")


def test_a_file_in_another_encoding_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "x.classes").write_bytes("café".encode("latin-1"))
    with pytest.raises(DataError, match=r"x\.classes is not valid UTF-8 \(byte 3\); save the file as UTF-8"):
        read_class_names(tmp_path / "x.rec")


def test_merging_names() -> None:
    assert merge_class_names([("a", ("x", "")), ("b", ("", "y", "z")), ("c", ())]) == ("x", "y", "z")
    with pytest.raises(DataError, match="class 0 is 'x' in a, but 'y' in b"):
        merge_class_names([("a", ("x",)), ("b", ("y",))])
