"""The parser of every command line: errors of one line that name the nearest flag, and help that shows every default.

`Parser` raises UsageError instead of printing the usage and exiting. It records which flags were given, so that a
default can be told from a value that the user chose. argparse accepts an unambiguous prefix of a flag, and MXNet's
documents use that (`--gpu 0`, `--num-epoch 10`). Echelon's own flags would make some of those prefixes ambiguous. A
prefix that fits exactly one of MXNet's flags therefore means MXNet's flag.
"""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from echelon.errors import UsageError, nearest_names, unknown_name

Add = Callable[..., Any]

_SHOWS_DEFAULT = re.compile(r"default:|%\(default\)")
_TWO_COLUMNS = re.compile(r"(\s*\S+(?: \S+)*\s{2,})(\S.*)")
_FLAGS_IN_USAGE = 6
_METAVARS: dict[Any, str] = {int: "N", float: "X"}


class StoreAndRecord(argparse.Action):
    """Stores a value as usual, and records that the flag was given. `unset` says in the help what no value means."""

    def __init__(self, *arguments: Any, unset: str = "none", **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.unset = unset

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        setattr(namespace, self.dest, values)
        namespace.recorded = {*getattr(namespace, "recorded", ()), self.dest}


def was_given(given: argparse.Namespace, name: str) -> bool:
    """Return whether the flag with this `dest` was on the command line."""
    return name in getattr(given, "recorded", ())


class HelpFormatter(argparse.HelpFormatter):
    """Shows the default of every flag, and wraps tables of two columns to the width of the terminal."""

    def add_usage(self, usage: str | None, actions: Any, groups: Any, prefix: str | None = None) -> None:
        """Name only what is required: the list of all flags would fill a screen before the first explanation."""
        optional = [action for action in actions if action.option_strings and not action.required]
        if usage is None and len(optional) > _FLAGS_IN_USAGE:
            required = [
                f"{one.option_strings[-1]} {self._metavar(one)}"
                for one in actions
                if one.option_strings and one.required
            ]
            positional = [self._metavar(one) for one in actions if not one.option_strings]
            words = " ".join([self._prog, *required, "[flags]", *positional])
            prefix = "usage: "
            lines = _wrap(words, self._width - len(prefix), rest=" " * len(f"{prefix}{self._prog} "))
            usage = "\n".join(lines).replace("%", "%%")
        super().add_usage(usage, actions, groups, prefix)

    def _metavar(self, action: argparse.Action) -> str:
        name = str(action.metavar or self._get_default_metavar_for_optional(action))
        return f"{name}…" if action.nargs == "+" else name

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        if not action.option_strings or action.required or _SHOWS_DEFAULT.search(text):
            return text
        if isinstance(action, argparse._StoreTrueAction):
            return f"{text} (default: off)"
        if action.nargs == 0:  # help and version
            return text
        if action.default in (None, "", []):
            return f"{text} (default: {getattr(action, 'unset', 'none')})"
        shown = " ".join(map(str, action.default)) if isinstance(action.default, list) else "%(default)s"
        return f"{text} (default: {shown})".lstrip()

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        return _METAVARS.get(action.type) or super()._get_default_metavar_for_optional(action)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        """Write `-n, --num-workers N` instead of repeating the value after each name."""
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        values = self._format_args(action, self._get_default_metavar_for_optional(action))
        return f"{', '.join(action.option_strings)} {values}"

    def _split_lines(self, text: str, width: int) -> list[str]:
        return _wrap(" ".join(text.split()), width)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Wrap paragraphs; keep indented lines, and wrap the second column of those that have two."""
        filled: list[str] = []
        for block in textwrap.dedent(text).strip().split("\n\n"):
            lines = block.splitlines()
            if any(line.startswith(" ") or _TWO_COLUMNS.fullmatch(line) for line in lines):
                filled += [part for line in lines for part in _wrap_columns(line, width, indent)]
            else:
                filled += _wrap(" ".join(lines), width, indent, indent)
            filled.append("")
        return "\n".join(filled[:-1])


def _wrap(text: str, width: int, first: str = "", rest: str = "") -> list[str]:
    """Wrap a text, but never inside a flag such as --batch-size."""
    return textwrap.wrap(text, width, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False)


def _wrap_columns(line: str, width: int, indent: str) -> list[str]:
    columns = _TWO_COLUMNS.fullmatch(line)
    if columns is None or len(indent + line) <= width:
        return [indent + line]
    if len(columns[1]) > width // 2:  # too wide for two columns: the second one starts a line of its own
        under = indent + " " * (len(line) - len(line.lstrip()) + 4)
        return [indent + columns[1].rstrip(), *_wrap(columns[2], width, under, under)]
    return _wrap(columns[2], width, indent + columns[1], indent + " " * len(columns[1]))


class Parser(argparse.ArgumentParser):
    """Raises UsageError instead of exiting, records given flags, and prefers MXNet's where a prefix is ambiguous.

    `advice` is appended to the error about an unknown flag. `other_names` has names of flags in other programs.
    """

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **{"formatter_class": HelpFormatter} | settings)
        self.ours: set[str] = set()
        self.advice = ""
        self.other_names: dict[str, str] = {}
        for name in (None, "store"):
            self.register("action", name, StoreAndRecord)

    def own(self, *names: str, **settings: Any) -> None:
        """Add a flag that MXNet does not have."""
        self.ours.add(self.add_argument(*names, **settings).dest)

    def groups(self, title: str) -> tuple[Add, Add]:
        """Add a section of the help; returns the functions that add MXNet's flags and Echelon's own flags to it."""
        add = self.add_argument_group(title).add_argument

        def own(*names: str, **settings: Any) -> None:
            self.ours.add(add(*names, **settings).dest)

        return add, own

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse, and reject unknown arguments: here and not in a parent parser, which does not know these flags."""
        given, unknown = super().parse_known_args(args, namespace)
        if unknown:
            raise self._unknown(unknown)
        return given, unknown

    def _unknown(self, arguments: Sequence[str]) -> UsageError:
        names = [word.partition("=")[0] for word in arguments if word.startswith("-") and word.strip("-")]
        if not names:
            return UsageError(f"unexpected argument {arguments[0]!r}; {self.prog} --help lists the arguments")
        known = [name for action in self._actions if action.help != argparse.SUPPRESS for name in action.option_strings]
        found = [name for name in [self.other_names.get(names[0])] if name in known] or nearest_names(names[0], known)
        meant = f"; did you mean {' or '.join(found)}?" if found else ";"
        return UsageError(f"unknown flag {names[0]}{meant} {self.advice or f'{self.prog} --help lists the flags'}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            kind = "/".join(action.option_strings) or (action.metavar or action.dest)
            raise unknown_name(str(kind).lower(), str(value), map(str, action.choices))

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        found = super()._get_option_tuples(option_string)
        theirs = [match for match in found if match[0] is not None and match[0].dest not in self.ours]
        return theirs if len({match[0].dest for match in theirs}) == 1 else found

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; {self.prog} --help lists the flags")
