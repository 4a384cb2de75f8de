"""`${name}` in values: replaced by another parameter, a computed one, or an environment variable. Pure.

References may be nested, as in `${${exp.framework}.data_dir}`. DLBS also evaluates `$( Python )$`, which is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from echelon.bench.dlbs.configuration.source import Setting
from echelon.errors import UsageError, nearest_names

_REFERENCE = re.compile(r"\$\{([^${}]*)\}")
_MAX_LENGTH = 1 << 16  # of a text: references that double it again and again would fill the memory
_MAX_REFERENCES = 10_000  # in one text

Get = Callable[[str], Any]
Convert = Callable[[str, Any, str], Any]


class Expander:
    """Expands the parameters of one experiment, each once. `convert(key, value, where)` gives a value its type."""

    def __init__(
        self,
        settings: Mapping[str, Setting],
        computed: Mapping[str, Callable[[Get], Any]],
        environment: Callable[[str], str | None],
        convert: Convert,
    ) -> None:
        self._settings = settings
        self._computed = computed
        self._environment = environment
        self._convert = convert
        self._done: dict[str, Any] = {}
        self._path: list[str] = []  # the keys that are being expanded, each for the one before it
        self.referenced: set[str] = set()

    def get(self, key: str) -> Any:
        """Return the expanded value of a parameter, or None if it has none."""
        if key not in self._done:
            if key in self._path:
                chain = " -> ".join([*self._path[self._path.index(key) :], key])
                raise UsageError(f"{self._where(self._path[-1])}: {key} refers to itself: {chain}")
            self._path.append(key)
            self._done[key] = self._value(key)
            self._path.pop()
        return self._done[key]

    def _value(self, key: str) -> Any:
        if key in self._settings:
            value, where = self._settings[key]
            return self._convert(key, self._expand(key, value, where), where)
        return self._computed[key](self.get) if key in self._computed else None

    def _where(self, key: str) -> str:
        return self._settings[key].where if key in self._settings else "computed"

    def _expand(self, key: str, value: Any, where: str) -> Any:
        if isinstance(value, list):
            return [self._expand(key, one, where) for one in value]
        if isinstance(value, dict):
            return {name: self._expand(key, one, where) for name, one in value.items()}
        return self._expand_text(key, value, where) if isinstance(value, str) else value

    def _expand_text(self, key: str, text: str, where: str) -> Any:
        if "$(" in text:
            raise UsageError(
                f"{where}: {key} has $(…)$, which DLBS evaluates as Python. Echelon evaluates no code of a "
                "configuration: write the value, or list the values as a variable"
            )
        budget = _MAX_REFERENCES
        while (match := _REFERENCE.search(text)) is not None:
            budget -= 1
            if not budget:  # the value of an environment variable may name the variable itself
                raise UsageError(f"{where}: {key} has no end: ${{{match[1]}}} leads to itself")
            value = self._referenced(key, match[1], where)
            if match.span() == (0, len(text)):
                return value  # alone, it keeps its type
            text = f"{text[: match.start()]}{_as_text(value)}{text[match.end() :]}"
            if len(text) > _MAX_LENGTH:
                raise UsageError(f"{where}: {key} is longer than {_MAX_LENGTH} characters after its references")
        if "${" in text:
            raise UsageError(f"{where}: {key} has '${{' without '}}': {text!r}")
        return text

    def _referenced(self, key: str, name: str, where: str) -> Any:
        self.referenced.add(name)
        if name in self._settings or name in self._computed:
            value = self.get(name)
            if value is None:
                raise UsageError(f"{where}: {key} uses ${{{name}}}, which has no value")
            return value
        found = self._environment(name)
        if found is None:
            near = nearest_names(name, {*self._settings, *self._computed})
            meant = f"; did you mean ${{{near[0]}}}?" if near else ""
            raise UsageError(
                f"{where}: {key} uses ${{{name}}}, which is neither a parameter nor an environment variable{meant}"
            )
        return found


def references(value: Any) -> Iterable[str]:
    """Yield the names to which the texts of a value refer directly."""
    if isinstance(value, str):
        yield from _REFERENCE.findall(value)
    elif isinstance(value, list | dict):
        for one in value.values() if isinstance(value, dict) else value:
            yield from references(one)


def is_constant(value: Any) -> bool:
    """Return whether a value refers to nothing."""
    return not isinstance(value, str) or ("${" not in value and "$(" not in value)


def _as_text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return " ".join(map(_as_text, value))
    return str(value)
