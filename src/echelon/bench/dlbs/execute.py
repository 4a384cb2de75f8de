"""Runs one experiment: starts its job, writes its log, status file and resources, and computes its results."""

from __future__ import annotations

import io
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

import msgspec

from echelon.bench.dlbs.command import Run
from echelon.bench.dlbs.configuration.experiment import Experiment
from echelon.bench.dlbs.files import prepared_folder, time_now, write_records, write_status
from echelon.bench.dlbs.rerun import FAILURE, OK, RUNNING
from echelon.bench.dlbs.run_events import RunEvents
from echelon.bench.dlbs.system_info import check_sources, system_info
from echelon.bench.dlbs.window import WorkerTimes, results
from echelon.environment import BATCH_TIMES, Job
from echelon.errors import DataError, EchelonError
from echelon.launch.interface import Output
from echelon.launch.local.launcher import LocalLauncher
from echelon.launch.node import node_job, node_plan, run_node
from echelon.launch.plan import Request
from echelon.launch.run import protect
from echelon.observe.events import EventReader
from echelon.observe.machine import commit
from echelon.observe.resources import ResourceMonitor, as_series

INTERRUPTED = "interrupted"
_SIGNALS = (130, 143)  # 128 + SIGINT and SIGTERM
_ERROR = re.compile(r"(?:\S+: )?error: (.+)")  # of Echelon's commands and scripts
_USE = {  # results.use.* of DLBS, and the fields of a sample
    "time": "time",
    "cpu": "cpu_percent",
    "mem": "memory_percent",
    "mem_virt": "virtual_mib",
    "mem_res": "resident_mib",
    "mem_shrd": "shared_mib",
    "net_sent": "sent_mib",
    "net_received": "received_mib",
    "gpus": "gpu_utilisation_percent",
    "gpu_mem": "gpu_memory_mib",
    "power": "gpu_power_w",
}
Show = Callable[[str], None]


@dataclass(frozen=True)
class Outcome:
    """How an experiment ended: `ok`, `failure`, `interrupted` or, without a run, what its log or status says."""

    experiment: Experiment
    status: str
    message: str = ""
    records: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    def as_record(self) -> dict[str, Any]:
        """Return the parameters, the results and the status as one record."""
        status = {"exp.status": self.status, "exp.status_msg": self.message}
        return {**self.experiment.parameters, **self.records, **status}


def execute(run: Run, on_progress: Callable[[int], None], show: Show, show_line: Show) -> Outcome:
    """Run an experiment to its end. `on_progress` gets the batches that the slowest worker has done."""
    experiment, start = run.experiment, time.monotonic()
    folder = prepared_folder(experiment.log_file)
    with experiment.log_file.open("w", encoding="utf-8", buffering=1) as log:
        header = {**experiment.parameters, "exp.status": RUNNING, "exp.framework_commit": commit(), **_own_system(run)}
        header |= {"results.start_time": time_now(), "results.proc_pid": os.getpid()}
        write_records(log, header)
        write_status(experiment, RUNNING)
        status, message, measured = _run_job(run, folder, log, on_progress, show, show_line)
        seconds = time.monotonic() - start
        if status == INTERRUPTED:  # the log keeps "running", so that the next run repeats the experiment
            write_status(experiment, INTERRUPTED, message, seconds)
            return Outcome(experiment, status, message, {}, seconds)
        measured |= {"results.end_time": time_now(), "results.status": status, "exp.status": status}
        write_records(log, {**measured, "exp.status_msg": message})
    write_status(experiment, status, message, seconds)
    return Outcome(experiment, status, message, {**header, **measured, "exp.status_msg": message}, seconds)


def _own_system(run: Run) -> dict[str, Any]:
    parameters, where = run.experiment.parameters, run.experiment.where
    return system_info(check_sources(parameters.get("exp.sys_info") or "", where.get("exp.sys_info", "")))


class _Lines:
    """The lines of a job: all of them go to the log, and the first error is kept as the cause of a failure."""

    def __init__(self, log: TextIO, show: Show, show_line: Show) -> None:
        self._log = log
        self._show = show
        self._show_line = show_line
        self._error = ""  # the first of a process
        self._ended = ""  # the last line of the launcher

    def of_process(self, name: str, text: str) -> None:
        line = f"[{name}] {text}"  # begins with the name, so that it is not a record
        self._log.write(f"{line}\n")
        self._show_line(line)
        if not self._error and (found := _ERROR.match(text)) is not None:
            self._error = found[1]

    def of_launcher(self, line: str) -> None:
        self._log.write(f"{line}\n")
        self._ended = line.removeprefix("echelon: ")
        (self._show_line if self._ended.startswith("worker") else self._show)(line)  # the result line has the cause

    def cause(self, status: int) -> str:
        return self._error or self._ended or f"exit status {status}"


def _run_job(
    run: Run, folder: Path, log: TextIO, on_progress: Callable[[int], None], show: Show, show_line: Show
) -> tuple[str, str, dict[str, Any]]:
    """Return the status, the message and the results of the job."""
    lines, reader, events = _Lines(log, show, show_line), EventReader(folder), RunEvents()

    def on_tick() -> None:
        events.take(reader.poll())
        on_progress(events.batches)

    every_s = float(run.experiment.parameters.get("monitor.frequency") or 0)
    measured: dict[str, Any] = {}
    try:
        with ResourceMonitor(every_s) if every_s else nullcontext() as monitor, _errors_to(lines.of_launcher):
            status = _start(run, folder, Output(lines.of_process, on_tick, shown=True))
        on_tick()
        measured = {**events.records(), **(_use(monitor) if monitor else {})}
        if status in _SIGNALS:
            return INTERRUPTED, "stopped by a signal", measured
        if status:
            return FAILURE, lines.cause(status), measured
        measured |= _measure(run, folder)
    except EchelonError as error:
        log.write(f"echelon: {error}\n")
        return FAILURE, str(error), measured
    finally:
        _remove_checkpoint(folder)
    return OK, "", measured


def _measure(run: Run, folder: Path) -> dict[str, object]:
    """Return the times and rates of a job that has ended."""
    times, parameters = read_batch_times(folder), run.experiment.parameters
    alive = sum(one.device == 0 for one in times)
    if alive < run.experiment.num_workers:
        raise DataError(
            f"{alive} of {run.experiment.num_workers} workers reached the end; the log has why the others did not"
        )
    return results(times, parameters["exp.num_warmup_batches"], parameters["exp.num_batches"])


def _start(run: Run, folder: Path, output: Output) -> int:
    experiment = run.experiment
    variables = {**experiment.variables, BATCH_TIMES: str(folder)}
    if run.rendezvous is not None:
        job = node_job(experiment.num_workers, run.num_servers, str(folder))
        if (transport := experiment.parameters.get("echelon.transport")) not in (None, "auto"):
            job = replace(job, transport=transport)
        request = Request(job, run.command, variables=variables)
        return run_node(node_plan(request, experiment.parameters["mxnet.rank"], run.rendezvous), run.rendezvous, output)
    job = Job(
        num_workers=experiment.num_workers,
        num_servers=run.num_servers,
        run_dir=str(folder),
        transport=experiment.parameters.get("echelon.transport") or "auto",
        interface=experiment.parameters.get("exp.node_nic") or None,
    )
    launcher = LocalLauncher()
    return launcher.run(protect(launcher.plan(Request(job, run.command, variables=variables))), output)


def read_batch_times(folder: Path) -> list[WorkerTimes]:
    """Return the times that the workers wrote. Every worker's file has those of all workers."""
    paths = sorted(folder.glob("batch_times_*.json"))
    if not paths:
        raise DataError(f"the workers wrote no batch times to {folder}")
    found = msgspec.json.decode(paths[0].read_bytes())
    return [WorkerTimes(one["rank"], one["batch_size"], tuple(one["ends"]), one["device"]) for one in found]


def _use(monitor: ResourceMonitor) -> dict[str, Any]:
    series = as_series(monitor.samples)
    return {f"results.use.{name}": series[source] for name, source in _USE.items() if source in series}


def _remove_checkpoint(folder: Path) -> None:
    """Remove the weights that a run saves at its end: nobody reads those of a benchmark."""
    for path in folder.glob("*.safetensors"):
        path.unlink(missing_ok=True)


@contextmanager
def _errors_to(on_line: Show) -> Iterator[None]:
    """Pass what this process writes to standard error to a function, line by line."""

    class Lines(io.TextIOBase):
        def write(self, text: str) -> int:
            for line in text.splitlines():
                if line.strip():
                    on_line(line)
            return len(text)

    with redirect_stderr(Lines()):
        yield
