"""The table at the end of a campaign."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from echelon.testing.chaos.campaign import Outcome
from echelon.testing.history import LOST, MISSED, REPEATED, TWICE


def totals(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return the sums over all jobs."""
    faults: Counter[str] = sum((outcome.faults for outcome in outcomes), Counter())
    reports = [outcome.report for outcome in outcomes]
    pauses: dict[str, float] = {}
    for outcome in outcomes:
        for kind, pause in outcome.pauses.items():
            pauses[kind] = max(pause, pauses.get(kind, 0.0))
    kinds = Counter(problem.kind for report in reports for problem in report.problems)
    return {
        "jobs": len(outcomes),
        "seconds": round(sum(outcome.seconds for outcome in outcomes)),
        "faults": dict(sorted(faults.items())),
        "hangs": sum(outcome.hang is not None for outcome in outcomes),
        "failed_jobs": sum(outcome.hang is None and outcome.status != 0 for outcome in outcomes),
        "acknowledged_pushes": sum(report.acked for report in reports),
        "lost_acknowledged_updates": kinds[LOST],
        "double_applies": kinds[TWICE],
        "other_problems": sum(kinds.values()) - sum(kinds[kind] for kind in (LOST, TWICE, MISSED, REPEATED)),
        "epochs": sum(report.epochs for report in reports),
        "steps": sum(report.steps for report in reports),
        "samples_missed": kinds[MISSED],
        "samples_repeated": kinds[REPEATED],
        "partial_steps": sum(report.partial_steps for report in reports),
        "updates_in_part": sum(report.updates_in_part for report in reports),
        "largest_pause_s": round(max((report.longest_pause_s for report in reports), default=0.0), 2),
        **{f"largest pause s, {kind}": round(pause, 2) for kind, pause in sorted(pauses.items())},
    }


def as_row(outcome: Outcome) -> dict[str, Any]:
    """Return a job for the file of results."""
    return {
        "job": str(outcome.setting),
        "faults": dict(outcome.faults),
        "status": outcome.status,
        "hang": outcome.hang,
        "failure": outcome.failure,
        "seconds": round(outcome.seconds, 1),
        "pauses": {kind: round(pause, 3) for kind, pause in outcome.pauses.items()},
        "problems": [list(problem) for problem in outcome.report.problems],
        "steps": outcome.report.steps,
        "partial_steps": outcome.report.partial_steps,
        "updates_in_part": outcome.report.updates_in_part,
        "longest_pause_s": round(outcome.report.longest_pause_s, 3),
    }


def table(outcomes: Sequence[Outcome]) -> str:
    """Return the totals of each scheme as a Markdown table."""
    stores = sorted({outcome.setting.store for outcome in outcomes})
    columns = [totals([one for one in outcomes if one.setting.store == store]) for store in stores]
    columns.append(totals(outcomes))
    faults = sorted({kind for column in columns for kind in column["faults"]})
    lines = [["", *stores, "all"]]
    lines += [[kind, *(str(column["faults"].get(kind, 0)) for column in columns)] for kind in faults]
    names = [name for name in columns[-1] if name != "faults"]
    lines += [[name.replace("_", " "), *(str(column.get(name, "–")) for column in columns)] for name in names]
    rule = ["---", *("---:" for _ in columns)]
    return "\n".join("| " + " | ".join(line) + " |" for line in (lines[0], rule, *lines[1:]))
