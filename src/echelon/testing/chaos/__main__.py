"""`python -m echelon.testing.chaos`: run jobs with random faults, check their histories, print a table."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from echelon.atomic_file import write_json
from echelon.testing.chaos.campaign import STORES, TRANSPORTS, Outcome, Plan, run
from echelon.testing.chaos.injections import INJECTIONS
from echelon.testing.chaos.summary import as_row, table, totals


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 if all jobs ended well."""
    parser = argparse.ArgumentParser(prog="python -m echelon.testing.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="no job starts later; default: 10")
    parser.add_argument("--seed", type=int, default=1, help="of the faults and their times; default: 1")
    parser.add_argument("--scheme", choices=STORES, action="append", help="default: all four, in turn")
    parser.add_argument("--transport", choices=TRANSPORTS, action="append", help="default: both, at random")
    parser.add_argument("--kind", choices=sorted(INJECTIONS), action="append", help="of fault; default: all")
    parser.add_argument("--replicas", type=int, choices=(0, 1), help="default: 1 in three of four jobs")
    parser.add_argument("--jobs", type=int, help="at most; default: as many as the time allows")
    parser.add_argument("--epochs", type=int, default=600, help="of each job; default: 600")
    parser.add_argument("--out", type=Path, help="write the results to this JSON file")
    parser.add_argument("--keep", type=Path, help="keep events and output of all jobs in this folder")
    options = parser.parse_args(arguments)
    plan = Plan(
        options.minutes,
        options.seed,
        options.scheme or STORES,
        options.transport or TRANSPORTS,
        options.kind or tuple(INJECTIONS),
        options.epochs,
        options.replicas,
        jobs=options.jobs,
        keep=options.keep,
    )
    outcomes: list[Outcome] = []
    for outcome in run(plan):
        outcomes.append(outcome)
        _print(len(outcomes), outcome)
    print(table(outcomes))
    if options.out:
        write_json(
            options.out, {"seed": plan.seed, "totals": totals(outcomes), "jobs": [as_row(one) for one in outcomes]}
        )
    return 0 if all(outcome.is_good for outcome in outcomes) else 1


def _print(number: int, outcome: Outcome) -> None:
    faults = ", ".join(f"{count} {kind}" for kind, count in sorted(outcome.faults.items()))
    report = outcome.report
    end = outcome.hang or outcome.failure or f"status {outcome.status}"
    print(
        f"job {number}: {outcome.setting}: {end} after {outcome.seconds:.0f} s; {faults or 'no faults'}; "
        f"{report.steps} steps, {report.partial_steps} partial, {len(report.problems)} problems, "
        f"longest pause {report.longest_pause_s:.2f} s",
        flush=True,
    )
    if outcome.pauses:
        print("  longest pauses: " + ", ".join(f"{kind} {s:.2f} s" for kind, s in outcome.pauses.items()), flush=True)
    for problem in report.problems[:5]:
        print(f"  {problem.kind}: {problem.text}", flush=True)
    if outcome.folder is not None and not outcome.is_good:
        print(f"  {outcome.folder}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
