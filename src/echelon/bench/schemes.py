"""`echelon bench schemes`: the time to an accuracy under the four schemes, for equal, slow and stalling workers.

Each step takes a given time, as if an accelerator computed it, so two cores are enough for four workers. All schemes
run with one --lr. For each seed, all cases and schemes run one after another.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from echelon.bench.harness.results import write_result
from echelon.environment import Job
from echelon.errors import JobError
from echelon.launch.local.launcher import run as run_local
from echelon.observe.events import EventReader
from echelon.report.plots.bands import draw_bands
from echelon.report.state.run import RunState
from echelon.schemes import SCHEMES, store_kind
from echelon.schemes.stores import Use
from echelon.train.recipe.options import TrainOptions
from echelon.train.recipe.pace import Pace

WORKERS, SERVERS = 4, 2
CASES = {
    "equal": Pace(),
    "one slow": Pace(slow={3: 3.0}),
    "stalls": Pace(stall=(0.1, 5.0)),
}
GROUPS = {"equal": "0 1/2 3", "one slow": "0 1 2/3", "stalls": "0 1/2 3"}
BASELINE = "dist_sync"
STALENESS = 3


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run: the seconds to the target (infinite if it was not reached), the samples/s, and the accuracy curve."""

    case: str
    store: str
    seed: int
    seconds: float
    samples_per_s: float
    curve: list[tuple[float, float]]


def run(args: argparse.Namespace) -> int:
    """Measure every case, scheme and seed, print the table and write the files."""
    console = Console()
    outcomes: list[Outcome] = []
    total = len(CASES) * len(SCHEMES) * args.seeds
    with console.status("") as status:
        for outcome in measure_all(args):
            outcomes.append(outcome)
            shown = f"{outcome.case}, {outcome.store}, seed {outcome.seed}: {outcome.seconds:.2f} s"
            status.update(f"{len(outcomes)}/{total}  last: {shown}")
            console.print(shown, highlight=False)
    facts = table_facts(outcomes)
    console.print(_table(facts, args.target))
    if args.json is not None:
        settings = {name: value for name, value in vars(args).items() if isinstance(value, int | float)}
        runs = [asdict(outcome) | {"seconds": _finite(outcome.seconds)} for outcome in outcomes]
        write_result(args.json, {"settings": settings, "table": facts, "runs": runs})
    if args.plot is not None:
        draw(outcomes, args.target, args.plot)
    return 0


def measure_all(args: argparse.Namespace) -> Iterator[Outcome]:
    """Run every case and scheme for each seed."""
    for seed in range(args.seeds):
        for case in CASES:
            for store in SCHEMES:
                yield measure(args, case, store, seed)


def measure(args: argparse.Namespace, case: str, store: str, seed: int) -> Outcome:
    """Run one job and measure from its common start to the first validation at or above the target."""
    kind = store_kind(store)
    options = TrainOptions(
        kv_store=store,
        staleness=STALENESS if kind.staleness is Use.REQUIRED else None,
        groups=GROUPS[case] if kind.takes_groups else None,
        batch_size=args.batch_size,
        num_epochs=args.limit_epochs,
        lr=args.lr,
        seed=seed,
        eval_every=2,
        target_accuracy=args.target,
        pace=replace(CASES[case], seconds=args.pace, seed=seed),
    )
    with tempfile.TemporaryDirectory(prefix="echelon-schemes-") as folder:
        job = Job(num_workers=WORKERS, num_servers=SERVERS, run_dir=folder)
        command = [sys.executable, "-m", "echelon.train", msgspec.json.encode(options).decode()]
        lines: list[str] = []
        status = run_local(job, command, on_line=lambda name, text: lines.append(f"[{name}] {text}"))
        if status:
            raise JobError(f"{case}, {store}, seed {seed}: exit status {status}\n" + "\n".join(lines[-20:]))
        state = RunState()
        state.take(EventReader(Path(folder)).poll())
    curve = [(event["seconds"], event["accuracy"]) for event in state.validations]
    reached = next((seconds for seconds, accuracy in curve if accuracy >= args.target), float("inf"))
    return Outcome(case, store, seed, reached, state.samples / max(state.seconds, 1e-9), curve)


def table_facts(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Return one row per case and scheme: medians over seeds, and BSP's median divided by this one.

    Runs that did not reach the target count as infinite; JSON has no infinity, so such a figure is None.
    """
    rows = []
    for case in CASES:
        baseline = [o.seconds for o in outcomes if o.case == case and o.store == BASELINE]
        for store in SCHEMES:
            chosen = [o for o in outcomes if o.case == case and o.store == store]
            if not chosen:
                continue
            seconds = sorted(o.seconds for o in chosen)
            median = statistics.median(seconds)
            speedup = statistics.median(baseline) / median if baseline else math.nan
            rows.append(
                {
                    "case": case,
                    "store": store,
                    "median_s": _finite(median),
                    "min_s": _finite(seconds[0]),
                    "max_s": _finite(seconds[-1]),
                    "samples_per_s": round(statistics.median(o.samples_per_s for o in chosen), 1),
                    "speedup_over_bsp": _finite(speedup),
                }
            )
    return rows


def _table(rows: Sequence[dict[str, Any]], target: float) -> Table:
    table = Table(title=f"seconds to {target:g} on digits, {WORKERS} paced workers", title_justify="left")
    for heading in ("case", "store", "median s", "spread", "samples/s", "× BSP"):
        table.add_column(heading, justify="left" if heading in ("case", "store") else "right")
    for row in rows:
        spread = f"{_shown(row['min_s'])} – {_shown(row['max_s'])}"
        figures = (_shown(row["median_s"]), spread, f"{row['samples_per_s']:.0f}", _shown(row["speedup_over_bsp"]))
        table.add_row(row["case"], row["store"], *figures)
    return table


def _finite(value: float) -> float | None:
    return round(value, 3) if math.isfinite(value) else None


def _shown(value: float | None) -> str:
    return "never" if value is None else f"{value:.2f}"


def draw(outcomes: Sequence[Outcome], target: float, path: Path) -> None:
    """Draw the accuracy over time: one panel per case, one line and band per store."""
    panels = {
        case: {store: [o.curve for o in outcomes if (o.case, o.store) == (case, store)] for store in SCHEMES}
        for case in CASES
    }
    draw_bands(panels, target, path)
