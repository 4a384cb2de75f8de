"""The blocks of docs/results.md: tables of result files, each with its commands, commits, dates and machines."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.compare.one_rate_table import one_rate_table
from benchmarks.compare.results import Result, short_commit
from benchmarks.compare.rows import Row
from benchmarks.compare.run import Outcome
from benchmarks.compare.schemes_table import schemes_table
from benchmarks.document import table, yes
from echelon.bench.pushpull.shapes import num_elements, shapes

TIMES = ("measured", "contender", "median", "10th – 90th percentile", "Echelon is faster", "over rounds", "target")
COSTS = ("cost", "median", "spread")


@dataclass(frozen=True, slots=True)
class Unit:
    """How the time of a step is shown: in milliseconds, or as `per_step` things per second."""

    name: str
    per_step: Callable[[Mapping[str, Any]], float] | None = None
    digits: int = 0

    def shown(self, settings: Mapping[str, Any], *step_ms: float) -> str:
        """Return times of a step as text, the slowest first for a rate."""
        if self.per_step is None:
            return f"{' – '.join(f'{ms:.1f}' for ms in step_ms)} {self.name}"
        count = self.per_step(settings)
        return f"{' – '.join(f'{count / ms * 1e3:,.{self.digits}f}' for ms in reversed(step_ms))} {self.name}"


MILLISECONDS = Unit("ms")
SAMPLES = Unit("samples/s", lambda settings: settings["batch_size"] * settings["num_workers"])
IMAGES = Unit("images/s", lambda settings: settings["batch_size"] * settings["step_batches"])
GIGABYTES = Unit("GB/s", lambda settings: 2 * 4 * num_elements(shapes(settings["model"])) / 1e9, digits=3)


def make_block(rows: Sequence[Row], results: Sequence[Result], outcomes: Sequence[Outcome] = ()) -> str:
    """Return the text of one block: its table, then where the figures come from, then what is missing."""
    parts = [TABLES[rows[0].block](results), origins(results), gaps(rows, results, outcomes)]
    return "\n\n".join(part for part in parts if part)


def times_table(results: Sequence[Result], unit_of: Callable[[Result], Unit]) -> str:
    """Return one line per contender of every result: its steps, and how many times faster Echelon is."""
    cells = [line for result in results for line in _contenders(result, unit_of(result))]
    return table(TIMES, "llrrrrl", cells)


def _contenders(result: Result, unit: Unit) -> list[tuple[str, ...]]:
    lines = []
    for index, case in enumerate(result.body["cases"]):
        name, first = case["name"], index == 0
        figures = [
            unit.shown(result.body["settings"], case["median_ms"]),
            unit.shown(result.body["settings"], case["p10_ms"], case["p90_ms"]),
        ]
        compared = ["", "", ""] if first else _compared(result, name)
        lines.append((result.row.title if first else "", name, *figures, *compared))
    return lines


def _compared(result: Result, peer: str) -> list[str]:
    ratio, spread = ratio_of(result, peer)
    target = next((target.ratio for target in result.row.targets if target.peer == peer), None)
    met = "" if target is None else f"{target:g} ×: {yes(ratio >= target)}"
    return [f"**{ratio:.2f} ×**", f"{spread[0]:.2f} – {spread[1]:.2f}", met]


def ratio_of(result: Result, peer: str) -> tuple[float, tuple[float, float]]:
    """Return how many times faster Echelon is than a peer, and the lowest and highest of all rounds."""
    name = f"{result.body['cases'][0]['name']}_vs_{peer}"
    spread = result.body["ratio_spread"][name]
    return result.body["ratios"][name], (spread["low"], spread["high"])


def io_table(results: Sequence[Result]) -> str:
    """Return the table of images per second, and the figures of --cached and --memory."""
    parts = [times_table(results, lambda result: IMAGES)]
    for result in results:
        settings = result.body["settings"]
        if "cached_cifar_images_per_s" in settings:
            parts.append(
                f"- CIFAR-sized images that are kept decoded: {settings['cached_cifar_images_per_s']:,.0f} images/s "
                "(target: 50,000)."
            )
        if "memory_growth_mb" in settings:
            growth = settings["memory_growth_mb"]
            parts.append(f"- Memory of the loader's processes over a run ten times as long: {growth:+.0f} MB.")
    return "\n\n".join([parts[0], "\n".join(parts[1:])]) if parts[1:] else parts[0]


def costs_table(results: Sequence[Result]) -> str:
    """Return the table of what a job costs, whatever it trains."""
    return table(COSTS, "lrr", [line for result in results for line in _costs(result.body)])


def _costs(body: Mapping[str, Any]) -> list[tuple[str, ...]]:
    starts = sorted(body["first_step_s"])
    launch = "start: `echelon launch -n 2 -s 2` to the first finished step"
    cells: list[tuple[str, ...]] = [
        (launch, f"**{statistics.median(starts):.2f} s**", f"{starts[0]:.2f} – {starts[-1]:.2f} s")
    ]
    for row in body["keys_of_1_kb"]:
        keys = f"push-pull of {row['keys']:,} key{'s' * (row['keys'] > 1)} of 1 kB"
        cells.append((keys, f"{row['median_ms']:.2f} ms", f"{row['p10_ms']:.2f} – {row['p90_ms']:.2f} ms"))
    model = body["memory_mb"]["model"]["bytes"]
    for who, parts in sorted(body["memory_mb"].items()):
        if who != "model":
            words = " + ".join(f"{value:.1f} MB {kind}" for kind, value in parts.items())
            cells.append((f"memory of {who} for a model of {model:.1f} MB", words, ""))
    return cells


def origins(results: Sequence[Result]) -> str:
    """Return the command, the file, the commit and the date of every result, and the machines."""
    lines = [
        f"- `{one.command}`: `{one.row.file}`, commit {short_commit(one.commit)}, {one.date[:10]}" for one in results
    ]
    machines = list(dict.fromkeys(described(one.machine) for one in results))
    return "\n".join([*lines, *(f"- machine: {machine}" for machine in machines)])


def described(machine: Mapping[str, Any]) -> str:
    """Return a machine in words."""
    return (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']:g} GiB, {machine['kernel']}, "
        f"Python {machine['python']}, torch {machine['torch']}"
    )


def gaps(rows: Sequence[Row], results: Sequence[Result], outcomes: Sequence[Outcome]) -> str:
    """Return which rows have no figures or old ones, and why."""
    measured = {result.row.name for result in results}
    why = {
        outcome.row.name: outcome.error.replace("\n", " ") or f"not run, because {outcome.skipped}"
        for outcome in outcomes
        if outcome.error or outcome.skipped
    }
    lines = []
    for row in rows:
        figures = "the figures above are of an earlier run" if row.name in measured else "there are no figures"
        if row.name in why:
            lines.append(f"- **{row.name}: {why[row.name]}**; {figures}")
        elif row.name not in measured:
            lines.append(f"- {row.name}: not measured yet: `{row.command}`")
    return "\n".join(lines)


TABLES: dict[str, Callable[[Sequence[Result]], str]] = {
    "pushpull": lambda results: times_table(results, lambda result: MILLISECONDS),
    "io": io_table,
    "train": lambda results: times_table(results, lambda result: SAMPLES),
    "costs": costs_table,
    "schemes": schemes_table,
    "one-rate": one_rate_table,
    "hosts": lambda results: times_table(
        results, lambda result: SAMPLES if "samples_per_s" in result.body else GIGABYTES
    ),
}
