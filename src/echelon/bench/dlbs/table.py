"""The table at the end of a sweep: one row per experiment, with what varied, its batch time and its throughput.

In a sweep over numbers of workers, GPUs or machines it also has speedup and efficiency: weak scaling if the batch of a
replica stays, strong scaling if that of all replicas does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from echelon.bench.dlbs.configuration.parameters import shown
from echelon.bench.dlbs.execute import Outcome
from echelon.bench.dlbs.rerun import OK
from echelon.report.tables.scaling import Point, Scaled, scaling

_KEY_WIDTH = 16
_COUNTS = ("echelon.num_workers", "exp.gpus", "exp.num_nodes")
_REPLICA, _ALL = "exp.replica_batch", "exp.effective_batch"


def make_table(outcomes: Sequence[Outcome]) -> Table:
    """Return the results of a sweep. `cause_lines` has why experiments have none."""
    varied = varied_keys(outcomes) or ["exp.model"]
    scaled = scaled_outcomes(outcomes)
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    rows = [_names(outcome, varied) for outcome in outcomes]
    for heading, *column in zip(_short_names(varied), *rows, strict=True):
        table.add_column(heading, overflow="fold", min_width=min(max(map(len, (heading, *column))), _KEY_WIDTH))
    kinds = "/".join(sorted({kind for kind, _ in scaled.values()}))
    for heading in ("batch ms", "± std", "samples/s", *(("speedup", f"{kinds} %") if scaled else ())):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("status", no_wrap=True)
    for index, outcome in enumerate(outcomes):
        more = _scaling_cells(scaled.get(index)) if scaled else []
        table.add_row(*map(Text, (*rows[index], *_figures(outcome), *more, outcome.status)))
    return table


def cause_lines(outcomes: Sequence[Outcome]) -> list[str]:
    """Return one line per experiment that failed: what distinguishes it, and the cause."""
    return [f"{one.experiment.title}: {_cause(one)}" for one in outcomes if one.message]


def _names(outcome: Outcome, keys: Sequence[str]) -> list[str]:
    values = [outcome.experiment.parameters.get(key) for key in keys]
    return [value if isinstance(value, str) else "" if value is None else shown(value) for value in values]


def _short_names(keys: Sequence[str]) -> list[str]:
    """Return the last part of each key, if that is clear."""
    parts = [key.rpartition(".")[2] for key in keys]
    return [part if parts.count(part) == 1 else key for part, key in zip(parts, keys, strict=True)]


def varied_keys(outcomes: Sequence[Outcome]) -> list[str]:
    """Return the parameters that distinguish the experiments, in the order of the sweep."""
    return list(dict.fromkeys(key for outcome in outcomes for key in outcome.experiment.varied))


def scaled_outcomes(outcomes: Sequence[Outcome]) -> dict[int, tuple[str, Scaled]]:
    """Return weak or strong scaling of the experiments that differ only in their number of replicas, by index."""
    keys = varied_keys(outcomes)
    if not any(key in _COUNTS for key in keys):
        return {}
    series: dict[str, list[int]] = defaultdict(list)
    for index, outcome in enumerate(outcomes):
        if _has_result(outcome):
            parameters = outcome.experiment.parameters
            series[shown([parameters.get(key) for key in keys if key not in _COUNTS])].append(index)
    found: dict[int, tuple[str, Scaled]] = {}
    for indices in series.values():
        kind = _kind([outcomes[index] for index in indices])
        points = [_point(outcomes[index]) for index in indices]
        if kind is not None:
            rows = scaling(points, weak=kind == "weak")
            found |= {index: (kind, row) for index, row in zip(indices, rows, strict=True)}
    return found


def _kind(outcomes: Sequence[Outcome]) -> str | None:
    """Return weak or strong, or None if the number of replicas or both batches are not what differs."""

    def values(key: str) -> list[int]:
        return [outcome.experiment.parameters[key] for outcome in outcomes]

    counts = values("exp.num_replicas")
    if len(set(counts)) < 2 or len(set(counts)) < len(counts):
        return None
    return "weak" if len(set(values(_REPLICA))) == 1 else "strong" if len(set(values(_ALL))) == 1 else None


def _point(outcome: Outcome) -> Point:
    records = outcome.records
    count = outcome.experiment.parameters["exp.num_replicas"]
    return Point(count, records["results.time"], records["results.throughput"])


def _scaling_cells(found: tuple[str, Scaled] | None) -> list[str]:
    if found is None:
        return ["", ""]
    return [f"{found[1].speedup:.2f}", f"{found[1].efficiency_percent:.0f}"]


def _has_result(outcome: Outcome) -> bool:
    return outcome.status == OK and "results.throughput" in outcome.records


def _figures(outcome: Outcome) -> list[str]:
    if not _has_result(outcome):
        return [""] * 3
    records = outcome.records
    times = [f"{records[f'results.{name}']:.2f}" for name in ("time", "time_std")]
    return [*times, f"{records['results.throughput']:.1f}"]


def result_line(outcome: Outcome) -> str:
    """Return the result of an experiment in a few words."""
    if _has_result(outcome):
        time, rate = outcome.records["results.time"], outcome.records["results.throughput"]
        return f"{time:.2f} ms per batch, {rate:.1f} samples/s"
    return _cause(outcome)


def _cause(outcome: Outcome) -> str:
    return f"{outcome.status}: {outcome.message}" if outcome.message else outcome.status
