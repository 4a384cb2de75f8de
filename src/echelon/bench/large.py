"""`echelon bench large`: a large model and many keys, with each store and transport: rates and peak memory.

Every case is a job of processes. A step pushes and pulls the whole model. The rate counts the bytes that one worker
pushes and pulls; the memory is the largest resident memory of each process.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from typing import Any

from rich.console import Console

from echelon.bench.harness.checks import check_numbers
from echelon.bench.harness.results import write_result
from echelon.bench.pushpull.shapes import shapes
from echelon.errors import JobError

ITEM_BYTES = 4


def run(args: argparse.Namespace) -> int:
    """Run every case, print its rate and memory, and write the result file."""
    check_numbers(args, num_workers=1, num_servers=1, steps=2)
    console = Console()
    cases = []
    for model in args.model or ["keys:500:1048576", "keys:10000:1000"]:
        for store in args.kv_store or ["dist_sync", "dist_async"]:
            for transport in ("shm", "tcp"):
                case = measure(model, store, transport, args)
                cases.append(case)
                console.print(
                    f"{model} ({case['model_mb']:,.0f} MB)  {store}  {transport}: {case['step_s']:.3f} s per step, "
                    f"{case['mb_per_s']:,.0f} MB/s per worker; peak memory in MB: "
                    + ", ".join(f"{who} {size:,.0f}" for who, size in case["peak_mb"].items()),
                    soft_wrap=True,
                )
    if args.json is not None:
        write_result(args.json, {"cases": cases})
    return 0


def measure(model: str, store: str, transport: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run one job and return what its workers measured."""
    command = [sys.executable, "-m", "echelon", "launch", "-n", str(args.num_workers), "-s", str(args.num_servers)]
    worker = [sys.executable, "-m", "echelon.bench.large_worker", store, model, str(args.steps)]
    done = subprocess.run(
        [*command, "--transport", transport, "--", *worker], capture_output=True, text=True, env=os.environ
    )
    if done.returncode:
        last = done.stderr[-500:]
        raise JobError(f"{model} with {store} over {transport} ended with status {done.returncode}: {last}")
    lines = [line[line.index("{") :] for line in done.stdout.splitlines() if '{"seconds"' in line]
    results = [json.loads(line) for line in lines]
    peaks = {who: size / 1e6 for result in results for who, size in result["peaks"].items()}
    step_s = statistics.median(seconds for result in results for seconds in result["seconds"][1:])
    num_bytes = sum(ITEM_BYTES * math.prod(shape) for shape in shapes(model))
    return {
        "model": model,
        "store": store,
        "transport": transport,
        "model_mb": num_bytes / 1e6,
        "step_s": step_s,
        "mb_per_s": 2 * num_bytes / 1e6 / step_s,
        "peak_mb": dict(sorted(peaks.items())),
    }
