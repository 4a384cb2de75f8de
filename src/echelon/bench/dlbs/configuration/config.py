"""A configuration: the parameters, variables and extensions of a file and of the flags -P, -V and -E.

Flags take precedence over the file, and the file over the defaults.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echelon.bench.dlbs.configuration.parameters import Parameter, defaults, shown
from echelon.bench.dlbs.configuration.source import Document, Setting, parse_flag, read_file
from echelon.errors import UsageError, unknown_name

_SECTIONS = ("parameters", "variables", "extensions")
_PARTS = ("condition", "parameters", "cases")
_KEY = re.compile(r"[^\s=${}]+")
_OWN = {"val", "type", "desc", "val_domain", "val_regex"}  # of a parameter that a user defines, as DLBS's defaults do


@dataclass(frozen=True)
class Extension:
    """Changes of the experiments that match a condition: `parameters`, then one experiment per case."""

    condition: Mapping[str, Any]
    parameters: Mapping[str, Setting]
    cases: tuple[Mapping[str, Setting], ...]
    where: str


@dataclass(frozen=True)
class Config:
    """`own` has the parameters that the user defines with a type and a description."""

    parameters: dict[str, Setting]
    variables: dict[str, Setting]
    extensions: tuple[Extension, ...]
    own: Mapping[str, Parameter]
    folder: Path  # of the file, or the current one

    @property
    def given(self) -> set[str]:
        """The keys that are not only defaults."""
        cases = [one for each in self.extensions for one in (each.parameters, *each.cases)]
        return {key for key, one in self.parameters.items() if one.where != DEFAULT} | {
            *self.variables,
            *(key for case in cases for key in case),
        }


DEFAULT = "the default"


def load_config(
    path: Path | None,
    parameters: Iterable[str] = (),
    variables: Iterable[str] = (),
    extensions: Iterable[str] = (),
    *,
    with_defaults: bool = True,
) -> Config:
    """Return the configuration of a file and of the texts of -P, -V and -E."""
    document = read_file(path) if path else Document("", {})
    sections = _sections(document)
    own: dict[str, Parameter] = {}
    given = _settings(document, sections["parameters"], ("parameters",), own)
    given |= dict(_assignment("-P", text) for text in parameters)
    swept = _settings(document, sections["variables"], ("variables",), own)
    swept |= dict(_assignment("-V", text) for text in variables)
    more = [_extension(document, one, ("extensions", index), own) for index, one in enumerate(sections["extensions"])]
    more += [_extension(_extension_flag(text), None, (), own) for text in extensions]
    base = {key: Setting(value, DEFAULT) for key, value in defaults().items()} if with_defaults else {}
    return Config(
        base | given,
        {key: _values(key, setting) for key, setting in swept.items()},
        tuple(more),
        own,
        path.absolute().parent if path else Path.cwd(),
    )


def single_config(given: Mapping[str, Setting]) -> Config:
    """Return the configuration of one experiment with these parameters."""
    base = {key: Setting(value, DEFAULT) for key, value in defaults().items()}
    return Config({**base, **given}, {}, (), {}, Path.cwd())


def _sections(document: Document) -> dict[str, Any]:
    content = document.value
    example = '{"parameters": {"exp.num_batches": 100}, "variables": {"exp.replica_batch": [32, 64]}}'
    if not isinstance(content, dict):
        raise UsageError(f"{document.name}: a configuration is an object such as {example}, not {shown(content)}")
    for key in content:
        if key not in _SECTIONS:
            raise _unknown(document.where(key), "section", key, _SECTIONS)
    found = {"parameters": {}, "variables": {}, "extensions": [], **content}
    for key in _SECTIONS:
        kind, word = (list, "a list") if key == "extensions" else (dict, "an object")
        if not isinstance(found[key], kind):
            raise UsageError(f"{document.where(key)}: {key} must be {word}, not {shown(found[key])}")
    return found


def _unknown(where: str, kind: str, given: str, known: Iterable[str]) -> UsageError:
    return UsageError(f"{where}: {unknown_name(kind, given, known)}")


def _settings(
    document: Document, values: Mapping[str, Any], path: tuple[str | int, ...], own: dict[str, Parameter]
) -> dict[str, Setting]:
    found: dict[str, Setting] = {}
    for key, value in values.items():
        where = document.where(*path, key)
        if not _KEY.fullmatch(key):
            raise UsageError(f"{where}: {key!r} is not a valid name of a parameter")
        if isinstance(value, dict) and "val" in value:
            own[key] = _own(key, value, where)
            value = value["val"]
        found[key] = Setting(value, where)
    return found


def _own(key: str, value: Mapping[str, Any], where: str) -> Parameter:
    kind = value.get("type", "str")
    if extra := sorted(value.keys() - _OWN):
        raise _unknown(where, f"field of {key}", extra[0], sorted(_OWN))
    if kind not in ("str", "int", "float", "bool"):
        raise UsageError(f"{where}: {key}: type is {shown(kind)}; it must be one of str, int, float, bool")
    pattern = value.get("val_regex") or ""
    try:
        re.compile(pattern)
    except (re.error, TypeError):
        raise UsageError(f"{where}: {key}: val_regex is not a regular expression: {shown(pattern)}") from None
    domain = value.get("val_domain") or []
    if not isinstance(domain, list):
        raise UsageError(f"{where}: {key}: val_domain must be a list, not {shown(domain)}")
    return Parameter(kind, None, str(value.get("desc", "")), domain=tuple(domain), pattern=pattern)


def _assignment(flag: str, text: str) -> tuple[str, Setting]:
    """Parse `KEY=JSON` of -P or -V."""
    key, equals, value = text.partition("=")
    example = "-P exp.num_batches=100" if flag == "-P" else "-V 'exp.replica_batch=[32,64]'"
    if not equals or not _KEY.fullmatch(key):
        raise UsageError(f"{flag} {text}: write KEY=VALUE, for example {example}")
    name = f"{flag} {key}"
    if not value:
        raise UsageError(f"{name}: there is no value; write for example {example}, or {flag} '{key}=\"\"' for no text")
    advice = f"a text needs quotes inside those of the shell: {flag} '{key}={_as_json(flag, value)}'"
    return key, Setting(parse_flag(value, name, advice).value, name)


def _as_json(flag: str, value: str) -> str:
    """Return what the user of -P or -V may have meant, as JSON."""

    def quoted(word: str) -> str:
        return word if re.fullmatch(r"-?[0-9.]+|true|false|null", word) else json.dumps(word)

    plain = value.replace('"', "").replace("'", "").strip("[] ")
    return quoted(plain) if flag == "-P" else f"[{','.join(quoted(word.strip()) for word in plain.split(','))}]"


def _values(key: str, setting: Setting) -> Setting:
    """Check the values of a variable. A single one counts as a list, as in DLBS."""
    values = setting.value if isinstance(setting.value, list) else [setting.value]
    if not values:
        raise UsageError(f"{setting.where}: {key} has no values, so the sweep is empty; write for example [32, 64]")
    texts = [json.dumps(one) for one in values]
    repeated = [text for index, text in enumerate(texts) if text in texts[:index]]
    if repeated:
        raise UsageError(f"{setting.where}: {key} has the value {repeated[0]} twice; remove one of them")
    return Setting(values, setting.where)


def _extension_flag(text: str) -> Document:
    example = """-E '{"condition": {"exp.model": "vgg"}, "parameters": {"exp.replica_batch": 8}}'"""
    return parse_flag(text, "-E", f"write for example {example}")


def _extension(document: Document, value: Any, path: tuple[str | int, ...], own: dict[str, Parameter]) -> Extension:
    value = document.value if not path else value
    where = document.where(*path)
    if not isinstance(value, dict):
        raise UsageError(f"{where}: an extension must be an object, not {shown(value)}")
    for key in value:
        if key not in _PARTS:
            raise _unknown(document.where(*path, key), "part of an extension", key, _PARTS)
    parts = {"condition": {}, "parameters": {}, "cases": [], **value}
    for key, kind, word in (("condition", dict, "object"), ("parameters", dict, "object"), ("cases", list, "list")):
        if not isinstance(parts[key], kind):
            raise UsageError(f"{document.where(*path, key)}: {key} must be a JSON {word}, not {shown(parts[key])}")
    for index, case in enumerate(parts["cases"]):
        if not isinstance(case, dict):
            raise UsageError(f"{document.where(*path, 'cases', index)}: a case must be an object, not {shown(case)}")
    for key, wanted in parts["condition"].items():
        _check_condition(key, wanted, document.where(*path, "condition", key))
    return Extension(
        parts["condition"],
        _settings(document, parts["parameters"], (*path, "parameters"), own),
        tuple(_settings(document, case, (*path, "cases", index), own) for index, case in enumerate(parts["cases"])),
        where,
    )


def _check_condition(key: str, wanted: Any, where: str) -> None:
    if isinstance(wanted, dict):
        raise UsageError(f"{where}: the condition on {key} must be a value, a regular expression or a list of values")
    if isinstance(wanted, str):
        try:
            re.compile(wanted)
        except re.error as error:
            raise UsageError(
                f"{where}: the condition on {key}, {wanted!r}, is not a regular expression: {error}"
            ) from None
