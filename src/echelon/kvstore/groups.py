"""Groups and shares from where users keep them: a file, or an argument. What they say is `cluster.shares`' to read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from echelon.cluster.shares import inline_groups, parse_groups
from echelon.errors import UsageError


def read_groups(given: str | Path, hosts: Mapping[int, str]) -> list[list[int]]:
    """Groups of ranks, from a groups file or written out as an argument."""
    text = inline_groups(str(given))
    if text is not None:
        return [list(group) for group in parse_groups(text, hosts, f"groups {str(given)!r}")]
    path = Path(given)
    if not path.is_file():
        raise UsageError(f"there is no groups file {path}; write one group a line, hosts or ranks")
    return [list(group) for group in parse_groups(read_lines(path), hosts, str(path))]


def read_lines(path: Path) -> str:
    """The text of a groups or data_sharding file."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is no text in UTF-8: byte {error.start} is none of it; write the file anew") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
