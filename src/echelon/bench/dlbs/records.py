"""Log lines `__key__=json`, which DLBS's tools read, and the records that a log holds. Pure.

A log also has the output of the processes. Each of those lines begins with the name of its process, so that none of
them can be taken for a record. The last line of a key counts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

_LINE = re.compile(r"[ \t]*__(.+?(?=__[ \t]*[=]))__[ \t]*=(.+)")  # the grammar of DLBS


def record_line(key: str, value: Any) -> str:
    """Return one line, without its end. JSON escapes line ends inside of texts."""
    if not key or key != key.strip() or re.search(r"__[ \t]*=|[\r\n]", key):
        raise ValueError(f"{key!r} cannot be the key of a log line")
    return f"__{key}__={json.dumps(value, allow_nan=False)}"


def read_records(lines: Iterable[str]) -> dict[str, Any]:
    """Return the records of a log, by key. Lines that are no records are ignored."""
    found: dict[str, Any] = {}
    for line in lines:
        match = _LINE.match(line)
        if match is None:
            continue
        try:
            found[match[1]] = json.loads(match[2])
        except ValueError:
            continue  # such as a line that was cut off when the disk was full
    return found


def benchmark_data(records: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return experiments in the form that DLBS's tools exchange."""
    return {"data": [dict(one) for one in records]}
