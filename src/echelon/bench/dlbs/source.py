"""JSON from a file or a flag, with the line of every key, so that each error can name file, key and line. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from echelon.errors import UsageError

Step = str | int  # a key of an object, or an index of an array
_SPACE = " \t\r\n"
_MAX_BYTES = 16 << 20


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
        data = path.read_bytes() if path.stat().st_size <= _MAX_BYTES else None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    if data is None:
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
    def reject(word: str) -> NoReturn:
        line = text[: text.find(word)].count("\n") + 1
        raise UsageError(f"{name}, line {line}: {word} is not a JSON value; write a number")

    try:
        value = json.loads(text, parse_constant=reject)
        return value, _Locator(text, name).lines
    except RecursionError:
        raise UsageError(f"{name}: the JSON is nested too deeply") from None


class _Locator:
    """Finds the line of every key and element of a valid JSON text."""

    def __init__(self, text: str, name: str) -> None:
        self._text = text
        self._name = name
        self._decoder = json.JSONDecoder()
        self._line, self._counted = 1, 0
        self.lines: dict[tuple[Step, ...], int] = {}
        self._walk(self._skip(0), ())

    def _walk(self, position: int, path: tuple[Step, ...]) -> int:
        """Record what is inside the value at a position; returns where it ends."""
        closing = {"{": "}", "[": "]"}.get(self._text[position])
        if closing is None:
            return self._decoder.raw_decode(self._text, position)[1]
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

    def _key(self, position: int, line: int, seen: dict[str, int]) -> tuple[str, int]:
        """Return a key and where its value begins."""
        key, end = self._decoder.raw_decode(self._text, position)
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
