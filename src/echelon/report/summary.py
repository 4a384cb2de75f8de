"""`summary.json`: the result of a run and its settings."""

from __future__ import annotations

import signal
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from echelon.atomic_file import AtomicFile
from echelon.report.state.epochs import epoch_rows
from echelon.report.state.run import JOINED_AGAIN, LOST, Fault, RunState
from echelon.report.state.worker import WorkerState

FILE_NAME = "summary.json"


def summary(state: RunState, store: str, options: dict[str, Any], exit_status: int) -> dict[str, Any]:
    """Return the contents of `summary.json`; `accuracy` is that of the final weights, or None without validation.

    If a run was stopped before its final weights were measured, `accuracy` is that of its last validation, and
    `accuracy_is_final` is false. `metrics` are those that --top-k, --loss and --metrics added, of the same weights.
    `not_whole` says why the result is not whole, or is None. Steps and samples of a worker include those of earlier
    processes of its rank, up to the last report of each; `samples` are those of the job, which its ledger counts.
    `partial_steps` are steps of lost workers that were applied in part, and whose samples were trained again.
    """
    last = state.final or (state.validations[-1] if state.validations else None)
    return {
        "store": store,
        "accuracy": last["accuracy"] if last else None,
        "accuracy_at_epoch": last.get("epoch") if last else None,
        "accuracy_is_final": state.final is not None,
        "metrics": last.get("metrics", {}) if last else {},
        "samples_per_s": round(state.samples / state.seconds, 3) if state.seconds else 0.0,
        "seconds": round(state.seconds, 3),
        "samples": state.samples,
        "partial_steps": sum(state.partial.values()),
        "lost_workers": [_lost(fault) for fault in state.faults if fault.kind in LOST],
        "not_whole": state.not_whole or None,
        "restarts": sum(fault.kind == JOINED_AGAIN for fault in state.faults),
        "utilisation": state.utilisation(options.get("devices", ())),
        "exit_status": exit_status,
        "validations": [
            {name: event[name] for name in ("seconds", "epoch", "accuracy", "loss")} for event in state.validations
        ],
        "epochs": [asdict(row) for row in epoch_rows(state)],
        "training": state.training.points(),
        "staleness_bound": options.get("staleness"),
        "workers": [_worker(worker, state.began or 0.0) for worker in state.ranked],
        "warnings": state.warnings,
        "news": [news.text for news in state.news],
        "settings": options,
    }


def _lost(fault: Fault) -> dict[str, str]:
    return {"who": fault.who, "how": fault.kind, "reason": fault.text}


def _worker(worker: WorkerState, began: float) -> dict[str, Any]:
    return {
        "rank": worker.rank,
        "clock": worker.all_steps,
        "samples": worker.all_samples,
        "deaths": worker.deaths,
        "restarts": worker.restarts,
        "compute_s": worker.compute_s,
        "push_s": worker.push_s,
        "wait_s": worker.wait_s,
        "pull_s": worker.pull_s,
        "bytes": worker.bytes,
        "staleness": worker.staleness,
        "rounds_ahead": worker.rounds_ahead,
        "phase": worker.phase,
        "finished": worker.finished,
        "seconds": worker.seconds or round(worker.reported_at - began, 6),
    }


def write_summary(directory: Path, values: dict[str, Any]) -> Path:
    """Write `summary.json` atomically."""
    path = directory / FILE_NAME
    with AtomicFile(path) as file:
        file.stream.write(msgspec.json.format(msgspec.json.encode(values), indent=2) + b"\n")
    return path


def exit_words(status: int) -> tuple[str, str]:
    """Return whether an exit status means `finished`, `stopped` or `failed`, and the name of its signal.

    A status above 128 names a signal: that of the user, or the one that killed a process.
    """
    if not status:
        return "finished", ""
    number = status - 128
    name = signal.Signals(number).name if number in signal.valid_signals() else ""
    return "stopped" if name in ("SIGINT", "SIGTERM") else "failed", name
