"""The command: one job per scheme, started by `echelon launch`, watched until it ends or makes no progress."""

from __future__ import annotations

import argparse
import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from echelon.bench.commands import LOAD_STORES
from echelon.bench.harness.checks import check_numbers
from echelon.bench.harness.results import write_result
from echelon.bench.load.watch import MAX_GROWTH, Memory, Watch
from echelon.cluster.shares import groups_text
from echelon.observe.events import EventReader
from echelon.schemes import store_kind
from echelon.schemes.stores import Use
from echelon.system import machine_memory

POLL_S = 1.0
MEMORY_S = 5.0
END_S = 120.0  # that a job has to end after its workers' time is up, and after a signal
STALENESS = 4
NUM_GROUPS = 8
SHOWN_LINES = 30


@dataclass(frozen=True, slots=True)
class Outcome:
    """A job under load. `failure` is empty if it went well."""

    store: str
    failure: str
    workers_finished: int
    steps_per_s: float  # of all workers
    fewest_steps: int  # of one worker
    most_steps: int
    updates_per_s: float  # of all servers
    longest_pause_s: float
    settled_bytes: int
    end_bytes: int
    growth: float


def run(args: argparse.Namespace) -> int:
    """Run a job per scheme, print what was measured and write the result file. Return 1 if a job failed."""
    check_numbers(args, num_workers=1, num_servers=1, width=1)
    console = Console()
    outcomes = []
    for store in args.kv_store or LOAD_STORES:
        console.print(f"{store}: {args.num_workers} workers, {args.num_servers} servers, {args.minutes:g} minutes")
        outcome = measure(args, store)
        outcomes.append(outcome)
        if outcome.failure:
            console.print(f"{store} failed: {outcome.failure}", soft_wrap=True, markup=False)
    console.print(table(outcomes))
    if args.json is not None:
        write_result(args.json, {"jobs": [asdict(outcome) for outcome in outcomes]})
    return int(any(outcome.failure for outcome in outcomes))


def table(outcomes: Sequence[Outcome]) -> Table:
    """Return the outcomes as a table. Steps are of all workers, then the fewest and the most of one worker."""
    shown = Table(title="load", title_justify="left")
    for heading in ("store", "steps/s", "of a worker", "updates/s", "pause", "memory", "growth"):
        shown.add_column(heading, justify="left" if heading == "store" else "right")
    for one in outcomes:
        shown.add_row(
            one.store,
            f"{one.steps_per_s:,.0f}",
            f"{one.fewest_steps}–{one.most_steps}",
            f"{one.updates_per_s:,.0f}",
            f"{one.longest_pause_s:.1f} s",
            f"{one.end_bytes / 1e9:.2f} GB",
            f"{one.growth:+.1%}",
        )
    return shown


def measure(args: argparse.Namespace, store: str) -> Outcome:
    """Run one job and watch it."""
    with tempfile.TemporaryDirectory(prefix="echelon-load-") as folder:
        log = Path(folder) / "output"
        with log.open("wb") as output:
            job = subprocess.Popen(
                command(args, store, Path(folder)), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )
            try:
                watch, failure = watch_until_end(job, Path(folder), args.minutes * 60.0)
            finally:
                end(job)
        text = log.read_text(errors="replace")
    return judge(store, watch, failure, text, args.num_workers)


def command(args: argparse.Namespace, store: str, folder: Path) -> list[str]:
    """Return the command line that launches a job."""
    kind = store_kind(store)
    words = [sys.executable, "-m", "echelon", "launch", "-n", str(args.num_workers), "-s", str(args.num_servers)]
    words += ["--run-dir", str(folder), "--transport", args.transport]
    if kind.staleness is Use.REQUIRED:
        words += ["--staleness", str(STALENESS)]
    if kind.takes_groups:
        groups = [range(first, args.num_workers, NUM_GROUPS) for first in range(min(NUM_GROUPS, args.num_workers))]
        words += ["--groups", groups_text(groups)]
    worker = [sys.executable, "-m", "echelon.bench.load.worker", store, str(args.minutes * 60.0), str(args.width)]
    return [*words, "--", *worker]


def watch_until_end(job: subprocess.Popen[bytes], folder: Path, seconds: float) -> tuple[Watch, str]:
    """Watch a job until it ends; return what was seen, and why it failed if it did."""
    watch, events, updates = Watch(time.time(), seconds), EventReader(folder), dict[tuple[str, int], int]()
    memory_at = 0.0
    while True:
        with suppress(subprocess.TimeoutExpired):
            status = job.wait(POLL_S)
            return watch, f"exit status {status}" if status else ""
        for event in events.poll():
            if event["event"] == "server":
                updates[event["who"], event["store"]] = event.get("updates", 0)
                watch.add_updates(event["at"], sum(updates.values()))
        now = time.time()
        if now - memory_at >= MEMORY_S:
            memory_at = now
            processes = psutil.Process(job.pid).children(recursive=True)
            sizes = [size for process in processes if (size := proportional_bytes(process.pid))]
            watch.add_memory(Memory(now, sum(sizes), len(sizes)))
        if failure := watch.deadlock(now):
            return watch, failure
        if watch.began_at is not None and now - watch.began_at > seconds + END_S:
            return watch, f"the job has not ended {END_S:.0f} s after its time"


def proportional_bytes(pid: int) -> int:
    """Return the memory of a process; a page that n processes share counts 1/n for each (PSS). 0 once it has ended."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    found = re.search(r"^Pss:\s+(\d+) kB", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def end(job: subprocess.Popen[bytes]) -> None:
    """End a job that still runs, first politely."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if job.poll() is None:
            job.send_signal(number)
            with suppress(subprocess.TimeoutExpired):
                job.wait(END_S)


def judge(store: str, watch: Watch, failure: str, text: str, num_workers: int) -> Outcome:
    """Return the outcome of a job from its samples and its output."""
    results = [json.loads(found) for found in re.findall(r'\{"rank".*\}', text)]
    steps = [result["steps"] for result in results] or [0]
    settled, last = watch.settled_and_last_bytes()
    if not failure and len(results) < num_workers:
        failure = f"only {len(results)} of {num_workers} workers finished"
    if not failure and watch.growth() > MAX_GROWTH:
        failure = f"memory grew by {watch.growth():.0%}, of {machine_memory() / 1e9:.0f} GB of this machine"
    if failure:
        failure = "\n".join([failure, *text.splitlines()[-SHOWN_LINES:]])
    return Outcome(
        store,
        failure,
        workers_finished=len(results),
        steps_per_s=sum(result["steps"] / result["seconds"] for result in results),
        fewest_steps=min(steps),
        most_steps=max(steps),
        updates_per_s=watch.updates_per_s(),
        longest_pause_s=watch.longest_pause_s,
        settled_bytes=settled,
        end_bytes=last,
        growth=watch.growth(),
    )
