"""What one log line says. This module is the only reader of MXNet's log lines; `train/log_lines.py` writes them.

The speed lines of MXNet's versions differ:

    Epoch[0] Batch [50]     Speed: 100.00 samples/sec  Train-accuracy=0.5     up to 0.9.5, one line per metric
    Epoch[0] Batch [20]     Speed: 100.00 samples/sec  accuracy=0.5           0.10 to 1.3
    Epoch[0] Batch [0-20]   Speed: 100.00 samples/sec  accuracy=0.5           since 1.4, and Echelon

Without a metric the line begins with `Iter[0]`. Any text may precede a line: the level of the logging module, a time, a
rank, or the name of a process. Two lines of different processes that run together in one line are both read. Colours of
a terminal are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Literal

from echelon.errors import DataError

Kind = Literal["train", "validation", "time"]

_ESCAPE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")  # a colour or another command of a terminal
_WORKER = re.compile(
    r"""\[worker\ ([0-9]{1,9})\]                        # Echelon's launchers
      | \bNode\[([0-9]{1,9})\]                          # MXNet 0.7
      | ^\[[0-9]+,([0-9]{1,9})\]<std(?:out|err)>:       # mpirun --tag-output
      | ^\s*([0-9]{1,9}):\                              # srun --label
    """,
    re.VERBOSE,
)
_LINE = re.compile(
    r"""(?:Epoch|Iter)\[(?P<epoch>[0-9]{1,9})\]
        (?:\ Batch\ ?\[(?:(?P<first>[0-9]{1,9})-)?(?P<last>[0-9]{1,9})\])?
        \s+
        (?:
            (?P<kind>Train|Validation)-(?P<name>(?:(?!Epoch\[)[^=\n])+)=(?P<value>(?:(?!Epoch\[)\S)*)
          | Time\ cost=(?P<seconds>(?:(?!Epoch\[)\S)*)
          | Speed:\ (?P<speed>\S*)\ samples/sec
        )
    """,
    re.VERBOSE,
)
_METRIC = re.compile(r"\s+(?P<train>Train-)?(?P<name>[^=\t\n]+)=(?P<value>\S*)")
_NUMBER = re.compile(r"[-+]?(?:\d+(?:\.(\d*))?(?:e[-+]?\d+)?|nan|inf)(?=$|[A-Z\[])")  # another line may begin after it
_KINDS: dict[str, Kind] = {"Train": "train", "Validation": "validation"}


@dataclass(frozen=True, slots=True)
class EpochFigure:
    """A metric or the duration of an epoch, as one worker logged it. Epochs count from 0."""

    kind: Kind
    epoch: int
    name: str  # of the metric; empty for a duration
    value: float
    worker: int | None = None  # its rank, if the line has one
    batch: int | None = None  # the figure was measured after this batch, not at the end of the epoch
    decimals: int = field(default=0, compare=False)  # of the value, as written


@dataclass(frozen=True, slots=True)
class SpeedFigure:
    """The speed of one worker until the batch `last` of an epoch, and the readable metrics of the same line."""

    epoch: int
    first: int | None
    last: int
    samples_per_s: float
    metrics: tuple[tuple[str, float], ...] = ()
    worker: int | None = None
    is_per_metric: bool = False  # such a line is repeated for every metric


Figure = EpochFigure | SpeedFigure


def figures_of(line: str) -> Iterator[Figure]:
    """Return the figures of a line, usually one or none. A number that cannot be read is a DataError."""
    if "\x1b" in line:
        line = _ESCAPE.sub("", line)
    if "Epoch[" not in line and "Iter[" not in line:
        return
    matches = list(_LINE.finditer(line))
    for match, following in zip_longest(matches, matches[1:]):
        end = len(line) if following is None else following.start()
        ranks = [next(filter(None, one.groups())) for one in _WORKER.finditer(line, 0, match.start())]
        worker = int(ranks[-1]) if ranks else None
        if match["speed"] is not None:
            yield _speed(match, line[match.end() : end], worker)
        else:
            yield _epoch_figure(match, worker)


def _epoch_figure(match: re.Match[str], worker: int | None) -> EpochFigure:
    epoch, batch = int(match["epoch"]), None if match["last"] is None else int(match["last"])
    if match["kind"] is None:
        value, decimals = _number(match["seconds"], "Time cost", epoch)
        return EpochFigure("time", epoch, "", value, worker, batch, decimals)
    value, decimals = _number(match["value"], f"{match['kind']}-{match['name']}", epoch)
    return EpochFigure(_KINDS[match["kind"]], epoch, match["name"], value, worker, batch, decimals)


def _speed(match: re.Match[str], rest: str, worker: int | None) -> SpeedFigure:
    epoch = int(match["epoch"])
    found = [metric for metric in _METRIC.finditer(rest) if _NUMBER.match(metric["value"])]
    return SpeedFigure(
        epoch,
        None if match["first"] is None else int(match["first"]),
        int(match["last"] or 0),
        _number(match["speed"], "Speed", epoch)[0],
        tuple((metric["name"], _number(metric["value"], metric["name"], epoch)[0]) for metric in found),
        worker,
        is_per_metric=any(metric["train"] for metric in found),
    )


def _number(text: str, name: str, epoch: int) -> tuple[float, int]:
    """Return a number and how many decimals it is written with."""
    found = _NUMBER.match(text)
    if found is None:
        raise DataError(f"{name} of epoch {epoch} is {text!r}, which is not a number")
    return float(found[0]), len(found[1] or "")
