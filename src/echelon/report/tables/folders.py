"""Records of run folders: `events.jsonl`, and `summary.json` where the run has one.

`echelon train` writes both. A job of `echelon launch` writes only events, and so does a run that was killed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from echelon.errors import DataError
from echelon.observe.events import FILE_NAME
from echelon.report.follow import RunFollower
from echelon.report.state.epochs import EpochRow, epoch_rows
from echelon.report.state.run import Event, RunState
from echelon.report.summary import FILE_NAME as SUMMARY
from echelon.report.summary import exit_words
from echelon.report.tables.record import RunRecord, model_name
from echelon.report.tables.summary_types import check_summary

_ADVICE = "the file is damaged, delete it to use only the events"


def find_runs(folder: Path) -> list[Path]:
    """Return the run folders at or below a folder, and logs of `echelon bench run`, each once and by name.

    An experiment of `echelon bench run` has a log, a status file and a run folder; its log tells warm-up from the rest.
    """
    if (folder / FILE_NAME).exists() or (folder / SUMMARY).exists():
        return [folder]
    logs = {path for path in folder.rglob("*.log") if path.with_suffix(".status.json").exists()}
    found = {path.parent for name in (FILE_NAME, SUMMARY) for path in folder.rglob(name)}
    runs = {path for path in found if not path.is_symlink() and path.with_suffix(".log") not in logs}
    return sorted(logs | runs)


def read_run(folder: Path) -> RunRecord:
    """Return the record of a run folder."""
    follower = RunFollower(folder)
    try:
        follower.read_all()
        summary = _read_summary(folder / SUMMARY)
        if follower.files.last_event is None and not summary:
            raise DataError(f"{folder / FILE_NAME} contains no event of a run")
        return record_of(folder.resolve().name, follower.state, summary)
    except OSError as error:
        raise DataError(f"{error.filename or folder}: {error.strerror}; give a run folder that you may read") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{folder} is not a run folder of this version of Echelon: {error!r}") from error


def _read_summary(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        body = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: {error}; {_ADVICE}") from error
    if (problem := check_summary(body)) is not None:
        raise DataError(f"{path}: {problem}; {_ADVICE}")
    return body


def record_of(name: str, state: RunState, summary: Mapping[str, Any]) -> RunRecord:
    """Return the record of a run from what its events say and from its summary, of which one may be empty."""
    settings = summary.get("settings") or state.settings or {}
    workers = state.ranked
    num_workers = max(len(workers), len(summary.get("workers", ())), (state.job or {}).get("num_workers", 0), 1)
    devices: list[str] = list(settings.get("devices") or ["cpu"])
    num_machines = state.num_machines
    uses_gpu = devices[0].startswith("cuda")
    shares_gpus = num_machines == 1 and uses_gpu
    store = state.stores.get(0, {})
    measured: dict[str, Any] = state.final or (state.validations[-1] if state.validations else {})
    return RunRecord(
        name=name,
        infrastructure=_infrastructure(state, uses_gpu),
        num_machines=num_machines,
        num_workers=num_workers,
        num_devices=num_workers * len(devices),
        num_gpus=(len(set(devices)) if shares_gpus else num_workers * len(set(devices))) if uses_gpu else 0,
        model=model_name(settings.get("network", ""), settings.get("num_layers"), settings.get("dtype")),
        data="synthetic" if settings.get("benchmark") else settings.get("data", ""),
        batch_size=settings.get("batch_size", 0),
        lr=settings.get("lr"),
        store=store.get("name") or summary.get("store") or settings.get("kv_store", ""),
        scheme=store.get("scheme") or "",
        variant=_variant(settings),
        seed=settings.get("seed"),
        num_epochs=settings.get("num_epochs", 0),
        epochs=tuple(epoch_rows(state) or _old_epochs(summary)),
        curve=tuple(_curve(state.validations or summary.get("validations", ()))),
        accuracy=summary.get("accuracy", measured.get("accuracy")),
        samples_per_s=summary.get("samples_per_s") or (state.samples / state.seconds if state.seconds else None),
        utilisation=state.utilisation(devices),
        target_accuracy=settings.get("target_accuracy"),
        status=_status(state, summary, num_workers),
    )


def _infrastructure(state: RunState, uses_gpu: bool) -> str:
    """Return the model of the GPU, or of the CPU with its cores."""
    devices = {worker.device for worker in state.workers.values()} - {"", "cpu"}
    if uses_gpu and devices:
        return ", ".join(sorted(devices))
    machine = (state.job or {}).get("machine", {})
    return f"{machine['cpu']} ({machine['cores']} cores)" if "cpu" in machine else "unknown"


def _variant(settings: Mapping[str, Any]) -> str:
    """Return what distinguishes runs with the same store."""
    pace = settings.get("pace") or {}
    parts = [f"{name} {settings[name]}" for name in ("staleness", "groups") if settings.get(name) is not None]
    parts += (
        [f"slow {','.join(f'{rank}:{factor:g}' for rank, factor in pace['slow'].items())}"] if pace.get("slow") else []
    )
    parts += [f"stall {pace['stall'][0]:g}:{pace['stall'][1]:g}"] if pace.get("stall") else []
    return ", ".join(parts)


def _curve(validations: Iterable[Event]) -> Iterator[tuple[float, float]]:
    """Yield seconds and accuracy; JSON has null for an accuracy that is not a number."""
    return ((one["seconds"], one["accuracy"]) for one in validations if one["accuracy"] is not None)


def _old_epochs(summary: Mapping[str, Any]) -> list[EpochRow]:
    """Return the epochs of a folder that has only a summary."""
    return msgspec.convert(summary.get("epochs", []), list[EpochRow])


def _status(state: RunState, summary: Mapping[str, Any], num_workers: int) -> str:
    """Return how a run ended, if not as planned."""
    exit_status = summary.get("exit_status")
    gone = [worker for worker in state.ranked if worker.is_gone]
    if exit_status:
        word, name = exit_words(exit_status)
        cause = f" by {name}" if word == "stopped" else f": exit status {exit_status}{name and f', {name}'}"
        return f"{word}{cause}{_progress(state)}"
    if gone:
        return f"{len(gone)} of {num_workers} workers left early"
    if exit_status is None and not (state.has_trained and all(worker.finished for worker in state.ranked)):
        return f"not finished{_progress(state)}"
    return ""


def _progress(state: RunState) -> str:
    done = max((worker.epochs_done for worker in state.ranked), default=0.0)
    planned = max((worker.num_epochs for worker in state.ranked), default=0)
    return f" after {done:.1f} of {planned} epochs" if planned and done < planned else ""
