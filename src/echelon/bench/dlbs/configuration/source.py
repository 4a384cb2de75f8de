"""JSON from a file or a flag, with the line of every key, so that each error can name file, key and line. Pure."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from echelon.errors import UsageError

Step = str | int  # a key of an object, or an index of an array
_SPACE = " \t\r\n"
_MAX_BYTES = 16 << 20
_MAX_DEPTH = 32  # of objects and lists in each other; what reads them is recursive


class Setting(NamedTuple):
    """A value, and where it was written: `config.json, line 4` or `-P`."""

    value: Any
    where: str


@dataclass(frozen=True)
class Document:
    """A JSON value. `lines` has the line of every key and element, by its path from the root; empty for a flag."""

    name: str
    value: Any
    lines: dict[tuple[Step, ...], int] = field(default_factory=dict)

    def where(self, *path: Step) -> str:
        """Return the name and the line of a key, or of the nearest one around it."""
        for end in range(len(path), 0, -1):
            if (line := self.lines.get(path[:end])) is not None:
                return f"{self.name}, line {line}"
        return self.name


def read_file(path: Path) -> Document:
    """Read a JSON file. Raises UsageError with the line for text that is not JSON, and for a repeated key."""
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)  # a pipe or a device does not say its size
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    if len(data) > _MAX_BYTES:
        raise UsageError(f"{path} is larger than {_MAX_BYTES >> 20} MB; a configuration is a small JSON file")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise UsageError(f"{path}, line {line}: not valid UTF-8 (byte {error.start}); save the file as UTF-8") from None
    return parse(text, str(path))


def parse(text: str, name: str) -> Document:
    """Parse the text of a file."""
    try:
        return Document(name, *_parse(text, name))
    except json.JSONDecodeError as error:
        raise UsageError(f"{name}, line {error.lineno}, column {error.colno}: not valid JSON: {error.msg}") from None


def parse_flag(text: str, name: str, advice: str) -> Document:
    """Parse the JSON of a flag, which has no lines. `advice` says how to write it."""
    try:
        return Document(name, _parse(text, name)[0])
    except json.JSONDecodeError as error:
        raise UsageError(f"{name}: {text!r} is not JSON ({error.msg}); {advice}") from None


def _parse(text: str, name: str) -> tuple[Any, dict[tuple[Step, ...], int]]:
    try:
        value = json.loads(text, parse_constant=lambda word: None, parse_int=_small_int)
    except RecursionError:
        raise UsageError(f"{name}: {_TOO_DEEP}") from None
    return value, _Locator(text, name).lines


_TOO_DEEP = f"the JSON has more than {_MAX_DEPTH} objects and lists in each other"


def _small_int(digits: str) -> int | float:
    """Return a whole number; Python refuses to read one of thousands of digits, and no parameter is so large."""
    return int(digits) if len(digits) <= 400 else float("inf")


class _Locator:
    """Finds the line of every key and element of a valid JSON text."""

    def __init__(self, text: str, name: str) -> None:
        self._text = text
        self._name = name
        self._decoder = json.JSONDecoder(parse_int=_small_int)
        self._line, self._counted = 1, 0
        self.lines: dict[tuple[Step, ...], int] = {}
        self._walk(self._skip(0), ())

    def _walk(self, position: int, path: tuple[Step, ...]) -> int:
        """Record what is inside the value at a position; returns where it ends."""
        closing = {"{": "}", "[": "]"}.get(self._text[position])
        if closing is None:
            return self._scalar(position)
        if len(path) == _MAX_DEPTH:
            raise UsageError(f"{self._name}, line {self._line_at(position)}: {_TOO_DEEP}")
        seen: dict[str, int] = {}
        index = 0
        position = self._skip(position + 1)
        while self._text[position] != closing:
            line = self._line_at(position)
            step: Step = index
            if closing == "}":
                step, position = self._key(position, line, seen)
            self.lines[(*path, step)] = line
            position = self._skip(self._walk(position, (*path, step)))
            if self._text[position] == ",":
                position = self._skip(position + 1)
            index += 1
        return position + 1

    def _scalar(self, position: int) -> int:
        """Check a value that is neither an object nor a list; returns where it ends."""
        value, end = self._decoder.raw_decode(self._text, position)
        if isinstance(value, str):
            self._check_text(value, position)
        if isinstance(value, float) and not math.isfinite(value):
            word = self._text[position : min(end, position + 20)]
            raise UsageError(
                f"{self._name}, line {self._line_at(position)}: {word} is not a finite JSON number; write a number"
            )
        return end

    def _check_text(self, text: str, position: int) -> None:
        """Reject what neither a file name nor an environment variable nor a log can hold."""
        if bad := re.search("[\0\ud800-\udfff]", text):
            code = f"\\u{ord(bad[0]):04x}"
            raise UsageError(
                f"{self._name}, line {self._line_at(position)}: {code} is not allowed in a text; remove it"
            )

    def _key(self, position: int, line: int, seen: dict[str, int]) -> tuple[str, int]:
        """Return a key and where its value begins."""
        key, end = self._decoder.raw_decode(self._text, position)
        self._check_text(key, position)
        if key in seen:
            raise UsageError(
                f"{self._name}, line {line}: the key {key!r} is already on line {seen[key]}; remove one of them"
            )
        seen[key] = line
        return key, self._skip(self._skip(end) + 1)  # after the colon

    def _skip(self, position: int) -> int:
        while position < len(self._text) and self._text[position] in _SPACE:
            position += 1
        return position

    def _line_at(self, position: int) -> int:
        """Return the line of a position, which is never before that of the last call."""
        self._line += self._text.count("\n", self._counted, position)
        self._counted = position
        return self._line
