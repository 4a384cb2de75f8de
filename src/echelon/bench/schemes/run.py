"""The command `echelon bench schemes`. For each seed, all cases and schemes run one after another."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from echelon.bench.harness.checks import check_numbers
from echelon.bench.harness.results import write_result
from echelon.bench.schemes.cases import CASES
from echelon.bench.schemes.link import SlowLink, slow_link, why_impossible
from echelon.bench.schemes.measure import Outcome, lr_of, measure
from echelon.bench.schemes.table import finite, make_table, table_facts
from echelon.errors import UsageError
from echelon.report.plots.bands import draw_bands
from echelon.schemes import SCHEMES

SETTINGS = ("target", "seeds", "pace", "lr", "batch_size", "limit_epochs", "slow_link")


def run(args: argparse.Namespace) -> int:
    """Measure every case, scheme and seed, print the table and write the files."""
    check(args)
    console = Console()
    cases, not_run = possible_cases(args.case or list(CASES))
    if not cases:
        raise UsageError("; ".join(f"case {case!r} cannot run, because {reason}" for case, reason in not_run.items()))
    for case, reason in not_run.items():
        console.print(f"{case}: not run, because {reason}", highlight=False)
    outcomes: list[Outcome] = []
    total = len(cases) * len(SCHEMES) * args.seeds
    with console.status("") as status:
        for outcome in measure_all(args, cases):
            outcomes.append(outcome)
            shown = f"{outcome.case}, {outcome.store}, seed {outcome.seed}: {outcome.seconds:.2f} s"
            status.update(f"{len(outcomes)}/{total}  last: {shown}")
            console.print(f"{len(outcomes)}/{total}  {shown}", highlight=False)
    facts = table_facts(outcomes)
    console.print(make_table(facts, args.target))
    if args.json is not None:
        settings = {name: getattr(args, name) for name in SETTINGS}
        runs = [asdict(one) | {"seconds": finite(one.seconds), "lr": lr_of(args, CASES[one.case])} for one in outcomes]
        write_result(args.json, {"settings": settings, "not_run": not_run, "table": facts, "runs": runs})
    if args.plot is not None:
        draw(outcomes, args.target, args.plot)
    return 0


def check(args: argparse.Namespace) -> None:
    """Raise UsageError for settings that measure nothing."""
    check_numbers(args, seeds=1, batch_size=1, limit_epochs=1)
    if not 0 < args.target <= 1:
        raise UsageError(f"--target is {args.target:g}; it is an accuracy, above 0 and at most 1")
    if not args.pace >= 0 or not args.lr > 0:
        raise UsageError(f"--pace must be 0 or more and --lr above 0; got {args.pace:g} and {args.lr:g}")


def possible_cases(wanted: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return the cases that can run here, and for each other one the reason why it cannot."""
    reason = why_impossible() if any(CASES[case].slow_link for case in wanted) else ""
    not_run = {case: reason for case in wanted if reason and CASES[case].slow_link}
    return [case for case in CASES if case in wanted and case not in not_run], not_run


def measure_all(args: argparse.Namespace, cases: Sequence[str]) -> Iterator[Outcome]:
    """Run every case and scheme for each seed."""
    with ExitStack() as stack:
        link: SlowLink | None = None
        if any(CASES[case].slow_link for case in cases):
            link = stack.enter_context(slow_link(args.slow_link))
        for seed in range(args.seeds):
            for case in cases:
                for store in SCHEMES:
                    yield measure(args, case, store, seed, link)


def draw(outcomes: Sequence[Outcome], target: float, path: Path) -> None:
    """Draw the accuracy over time: one panel per case, one line and band per store."""
    panels: dict[str, dict[str, list[list[tuple[float, float]]]]] = {}
    for outcome in outcomes:
        panel = panels.setdefault(CASES[outcome.case].title, {store: [] for store in SCHEMES})
        panel[outcome.store].append(outcome.curve)
    draw_bands(panels, target, path)
