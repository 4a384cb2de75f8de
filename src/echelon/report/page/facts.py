"""The figures of a run: its result, and what distinguishes it from other runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from echelon.report.charts.recorded import FAILED, RecordedRun
from echelon.report.charts.scales import byte_count, duration, number
from echelon.report.charts.staleness import histograms
from echelon.report.charts.work import phase_totals
from echelon.report.state.worker import mean_and_max
from echelon.train.recipe.options import TrainOptions

WAIT = 2  # the number of this phase in PHASES


def results(run: RecordedRun) -> dict[str, str]:
    """Return the figures of the result by name. Every run has the same names; "–" is not known."""
    missed, ahead = histograms(run)
    return {
        "status": run.status(),
        "accuracy": _accuracy(run),
        "time": duration(run.seconds),
        "epochs": _epochs(run),
        "samples/s": number(run.samples_per_s),
        "waiting": _waiting(run),
        "devices busy": _busy(run),
        "updates missed": _mean_max(missed),
        "rounds ahead": _mean_max(ahead),
        "tensor bytes": _bytes(run, "pushed", "pulled"),
        "bytes on the wire": _bytes(run, "sent", "received"),
        "workers that failed": str(sum(worker.phase in FAILED for worker in run.state.ranked)),
    }


def _accuracy(run: RecordedRun) -> str:
    last = run.state.final or (run.state.validations[-1] if run.state.validations else None)
    if last is None or last.get("accuracy") is None:
        return "–"
    return f"{last['accuracy']:.4f}"


def _epochs(run: RecordedRun) -> str:
    done = [worker.epochs_done for worker in run.state.ranked if worker.batches_per_epoch]
    if not done:
        return "–"
    low, high = min(done), max(done)
    return number(high, 3) if high - low < 0.05 else f"{number(low, 3)} – {number(high, 3)}"


def _waiting(run: RecordedRun) -> str:
    totals = phase_totals(run).values()
    whole = sum(map(sum, totals))
    return f"{sum(one[WAIT] for one in totals) / whole:.0%}" if whole else "–"


def _busy(run: RecordedRun) -> str:
    """Return how busy the cores, or the GPUs, of the launcher's machine were while the run trained."""
    utilisation = run.state.utilisation(run.settings.get("devices") or ("cpu",))
    return "–" if utilisation is None else f"{utilisation:.0%}"


def _mean_max(histogram: dict[int, int]) -> str:
    if not histogram:
        return "–"
    mean, largest = mean_and_max({str(value): count for value, count in histogram.items()})
    return f"{mean:.1f}, max {largest}" if largest else "none"


def _bytes(run: RecordedRun, *names: str) -> str:
    workers = [worker.traffic for worker in run.history.workers.values() if worker.traffic]
    return byte_count(sum(one.get(name, 0) for one in workers for name in names)) if workers else "–"


def configuration(run: RecordedRun) -> dict[str, str]:
    """Return the settings of a run, as text."""
    return {name: _shown(value) for name, value in _plain(run.settings).items()}


def chosen(run: RecordedRun) -> dict[str, str]:
    """Return the settings that differ from the defaults of `echelon train`."""
    defaults = _plain(msgspec.to_builtins(TrainOptions()))
    given = _plain(run.settings)
    return {name: _shown(value) for name, value in given.items() if name not in defaults or value != defaults[name]}


def differences(runs: Sequence[RecordedRun]) -> list[tuple[str, list[str]]]:
    """Return the settings in which runs differ: the name, and the value in each run."""
    tables = [configuration(run) | run.environment for run in runs]
    names = dict.fromkeys(name for table in tables for name in table)
    rows = [(name, [table.get(name, "–") for table in tables]) for name in names]
    return [(name, values) for name, values in rows if len(set(values)) > 1]


def _plain(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings as they are after a way through JSON; nested ones become `outer.inner`."""
    flat: dict[str, Any] = {}
    for name, value in msgspec.json.decode(msgspec.json.encode(settings)).items():
        if isinstance(value, dict):
            flat |= {f"{name}.{inner}": one for inner, one in value.items()}
        else:
            flat[name] = value
    return flat


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, dict):
        value = [f"{name}:{_shown(one)}" for name, one in value.items()]
    if isinstance(value, list):
        value = " ".join(map(str, value))
    return "none" if value in (None, "") else str(value)
