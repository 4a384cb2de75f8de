"""`echelon bench costs`: the costs of a job that do not depend on the bytes it moves.

- first step: the time from the start of `echelon launch` (2 workers, 2 servers) to a worker's first push-pull;
- latency: the time of a push-pull of one key of 1 kB;
- keys: the time of a step of N keys of 1 kB each, N from 1 to 10,000;
- memory: how much a server and a worker grow when a model is put into the store.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from echelon.bench.harness.checks import check_numbers
from echelon.bench.harness.results import write_result
from echelon.bench.harness.turns import measure
from echelon.bench.pushpull.contenders import PushPullPlan, echelon
from echelon.bench.pushpull.shapes import num_elements, shapes
from echelon.errors import JobError

NUM_KEYS = (1, 10, 100, 1000, 10_000)
WARMUP_STEPS = 3
MEGABYTE = 1e6
LAUNCH = [sys.executable, "-m", "echelon.cli.main", "launch", "-n", "2", "-s", "2"]
FIRST_STEP = """
import torch
from echelon import kvstore
kv = kvstore.create("dist_sync")
x = torch.ones(256)
kv.init("x", x)
kv.pushpull("x", x)
print("stepped", flush=True)
"""


def run(args: argparse.Namespace) -> int:
    """Measure all four costs, print them and write the result file."""
    check_numbers(args, starts=1, rounds=1, steps=1)
    shapes(args.model)  # report an unknown model before anything starts
    console = Console()
    starts = sorted(first_step_s() for _ in range(args.starts))
    console.print(f"first step    {statistics.median(starts):.2f} s  ({starts[0]:.2f} – {starts[-1]:.2f})")
    keys = []
    for row in key_costs(args.rounds, args.steps):
        keys.append(row)
        console.print(f"{row['keys']:>6} keys   {row['median_ms']:.3f} ms  ({row['p10_ms']:.3f} – {row['p90_ms']:.3f})")
    memory = memory_mb(args.model)
    for who, figures in memory.items():
        console.print(f"{who:<12}  {figures}")
    if args.json is not None:
        write_result(args.json, {"first_step_s": starts, "keys_of_1_kb": keys, "memory_mb": memory})
    return 0


def first_step_s() -> float:
    """Return the seconds from the start of `echelon launch` until a worker reports its first step."""
    began = time.perf_counter()
    arrived = [at for at, line in job_lines("-c", FIRST_STEP) if "stepped" in line]
    if not arrived:
        raise JobError("the job that measures the start has ended without a step")
    return arrived[0] - began


def job_lines(*words: str) -> list[tuple[float, str]]:
    """Run a Python program as every worker of a job. Return the lines of its output and when each arrived."""
    argv = [*LAUNCH, sys.executable, *words]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        lines = [(time.perf_counter(), line) for line in process.stdout]
    if process.returncode:
        last = "".join(line for _, line in lines[-12:])
        raise JobError(f"a job of `echelon bench costs` ended with status {process.returncode}:\n{last}")
    return lines


def key_costs(rounds: int, steps: int) -> Iterator[dict[str, Any]]:
    """Yield the time of a step for each number of keys, measured with the contender of `bench pushpull`."""
    for count in NUM_KEYS:
        with tempfile.TemporaryDirectory(prefix="echelon-costs-") as folder:
            contender = echelon(PushPullPlan(model=f"keys:{count}:256", work_dir=Path(folder)))
            (case,) = measure([contender], rounds, steps, WARMUP_STEPS)
        yield {"keys": count, "median_ms": case.median_ms, "p10_ms": case.p10_ms, "p90_ms": case.p90_ms}


def memory_mb(model: str) -> dict[str, dict[str, float]]:
    """Return the memory that each process uses for a model, and the size of the model itself."""
    found: dict[str, dict[str, float]] = {}
    for _, line in job_lines("-m", "echelon.bench.costs_worker", model):
        start = line.find("{")
        if start >= 0:
            facts = json.loads(line[start:])
            who = facts.pop("who")
            found[who] = {name: round(value / MEGABYTE, 1) for name, value in facts.items()}
    found["model"] = {"bytes": round(num_elements(shapes(model)) * 4 / MEGABYTE, 1)}
    return found
