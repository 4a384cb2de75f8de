"""The lines of log files. A file that is not text is an error that says what it is and what to do."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from pathlib import Path

from echelon.errors import DataError

STDIN = "-"
_COMPRESSED = {  # the first bytes of a file, its format, and the command that writes the text
    b"\x1f\x8b": ("gzip", "zcat"),
    b"BZh": ("bzip2", "bzcat"),
    b"\xfd7zXZ\x00": ("xz", "xzcat"),
    b"\x28\xb5\x2f\xfd": ("zstd", "zstdcat"),
    b"PK\x03\x04": ("zip", "unzip -p"),
}
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")  # what PowerShell's > writes


def read_lines(path: str) -> Iterator[tuple[int, str, bool]]:
    """Return each line with its number and whether it is complete; only the last one may have no line end."""
    name = "standard input" if path == STDIN else path
    if path == STDIN and sys.stdin is None:  # descriptor 0 may be another file, then
        raise DataError("standard input is closed; give the path of a log file")
    try:
        with open(0, "rb", closefd=False) if path == STDIN else Path(path).open("rb") as file:
            yield from _lines(file, name)
    except IsADirectoryError:
        has_events = (Path(path) / "events.jsonl").exists()
        instead = f"echelon report tables {path} shows a run folder" if has_events else "give the log files in it"
        raise DataError(f"{path} is a folder, not a log file; {instead}") from None
    except OSError as error:
        raise DataError(f"{name}: {error.strerror}; give the path of a log file") from error


def _lines(file: io.BufferedReader, name: str) -> Iterator[tuple[int, str, bool]]:
    head = file.peek()
    _check_text(head, name)
    encoding = "utf-16" if head.startswith(_UTF_16) else "utf-8"
    with io.TextIOWrapper(file, encoding=encoding, errors="replace", newline="\n") as text:
        for number, line in enumerate(text, 1):
            yield number, line, line.endswith("\n")


def _check_text(head: bytes, name: str) -> None:
    if not head:
        raise DataError(f"{name} is empty; a log of a training has lines such as: Epoch[0] Time cost=12.345")
    for magic, (kind, command) in _COMPRESSED.items():
        if head.startswith(magic):
            how = f"{command} {name} | echelon report parse-log -"
            raise DataError(f"{name} is compressed by {kind}; decompress it first: {how}")
    if b"\x00" in head and not head.startswith(_UTF_16):
        raise DataError(f"{name} is not text: byte {head.index(0)} is 0; give the path of a log file")
