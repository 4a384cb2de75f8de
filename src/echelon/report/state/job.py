"""What a job is, in a line and in numbers: from its settings, or from the events of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from echelon.errors import UsageError
from echelon.report.state.run import JobInfo, RunState
from echelon.schemes.stores import store_kind


def job_title(settings: Mapping[str, Any], num_workers: int, num_servers: int) -> str:
    """Return a training job in one line. `settings` are the fields of TrainOptions."""
    store = settings["kv_store"]
    if settings["staleness"] is not None:
        store = f"{store} --staleness {settings['staleness']}"
    data = "synthetic data" if settings["benchmark"] else settings["data"]
    return f"{settings['network']} on {data}, {store}, -n {num_workers} -s {num_servers}"


def job_info_of(state: RunState) -> JobInfo:
    """Return what the events of a run say about its job. A command other than `echelon train` is its own title."""
    job, store = state.job or {}, (state.stores or {0: {}})[min(state.stores, default=0)]
    num_workers = job.get("num_workers") or max(_ranks(state, "worker"), default=-1) + 1
    num_servers = job.get("num_servers", max(_ranks(state, "server"), default=-1) + 1)
    if (
        state.settings is not None
        and {"kv_store", "staleness", "benchmark", "data", "network"} <= state.settings.keys()
    ):
        title = job_title(state.settings, num_workers, num_servers)
    else:
        title = ", ".join(filter(None, [store.get("name"), job.get("command")]))
    return JobInfo(
        title,
        num_workers,
        num_servers,
        lock_step=_is_lock_step(store.get("name", "")),
        bounded=store.get("staleness") is not None,
    )


def _ranks(state: RunState, role: str) -> set[int]:
    begun = set(state.workers if role == "worker" else state.servers)
    return begun | {int(name.split()[1]) for name in state.processes if name.startswith(f"{role} ")}


def _is_lock_step(store: str) -> bool:
    try:
        return store_kind(store).lock_step
    except UsageError:  # the event is missing
        return False
