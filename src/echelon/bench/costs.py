"""`echelon bench costs`: what a job costs besides its bytes: starting it, a tiny step, many keys, memory.

- first step: from starting `echelon launch` to a worker's first finished push-pull, 2 workers and 2 servers;
- latency: a push-pull of one key of 1 kB;
- keys: a step of N keys of 1 kB each, N from 1 to 10,000;
- memory: of a server and a worker with a model in the store, beyond the same process with an empty one.
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

NUM_KEYS = (1, 10, 100, 1000, 10_000)
MEGABYTE = 1e6


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `costs` to the benchmarks."""
    parser = subparsers.add_parser("costs", help="time to the first step, latency, cost of keys, memory")
    parser.add_argument("--starts", type=int, default=5, help="jobs to start for the time to the first step")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--model", default="resnet50", help="whose memory to measure")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure all four and write them down."""
    from rich.console import Console

    from echelon.bench.harness.results import write_body

    console = Console()
    with tempfile.TemporaryDirectory(prefix="echelon-costs-") as folder:
        starts = sorted(first_step_s() for _ in range(args.starts))
        console.print(f"first step    {statistics.median(starts):.2f} s  ({starts[0]:.2f} – {starts[-1]:.2f})")
        keys = []
        for row in key_costs(Path(folder), args.rounds, args.steps):
            keys.append(row)
            console.print(
                f"{row['keys']:>6} keys   {row['median_ms']:.3f} ms  ({row['p10_ms']:.3f} – {row['p90_ms']:.3f})"
            )
        memory = memory_mb(Path(folder), args.model)
        for who, figures in memory.items():
            console.print(f"{who:<12}  {figures}")
    if args.json is not None:
        body: dict[str, Any] = {"first_step_s": starts, "keys_of_1_kb": keys, "memory_mb": memory}
        write_body(args.json, body)
    return 0


def first_step_s() -> float:
    """Seconds from `echelon launch` to the first worker's line that its first step is done."""
    program = (
        "import torch, echelon.kvstore as k; kv = k.create('dist_sync'); x = torch.ones(256); kv.init('x', x);"
        " kv.pushpull('x', x); print('stepped', flush=True)"
    )
    arguments = [
        sys.executable,
        "-m",
        "echelon.cli.main",
        "launch",
        "-n",
        "2",
        "-s",
        "2",
        sys.executable,
        "-c",
        program,
    ]
    began = time.perf_counter()
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        seconds = next((time.perf_counter() - began for line in process.stdout if "stepped" in line), float("nan"))
        process.stdout.read()
    return seconds


def key_costs(folder: Path, rounds: int, steps: int) -> Iterator[dict[str, Any]]:
    """A step of N keys, through the same contender as `bench pushpull`."""
    from echelon.bench.harness.alternate import alternate, summarise
    from echelon.bench.pushpull.contenders import Plan, echelon
    from echelon.bench.pushpull.shapes import shapes, write_shapes

    for count in NUM_KEYS:
        work = folder / f"keys-{count}"
        work.mkdir()
        file = work / "shapes.json"
        write_shapes(file, shapes(f"keys:{count}:256"))
        with echelon(Plan(file, work)) as contender:
            (case,) = summarise(alternate([contender], rounds, steps, 3))
        yield {"keys": count, "median_ms": case.median_ms, "p10_ms": case.p10_ms, "p90_ms": case.p90_ms}


def memory_mb(folder: Path, model: str) -> dict[str, dict[str, float]]:
    """Private memory of each role after steps with a model, and what a role's own data would take at least."""
    from echelon.bench.pushpull.shapes import num_elements, shapes, write_shapes

    file = folder / "memory.json"
    write_shapes(file, shapes(model))
    program = Path(__file__).with_name("worker_memory.py")
    arguments = [sys.executable, "-m", "echelon.cli.main", "launch", "-n", "2", "-s", "2"]
    done = subprocess.run(
        [*arguments, sys.executable, str(program), str(file)], capture_output=True, text=True, check=True
    )
    found: dict[str, dict[str, float]] = {}
    for line in done.stdout.splitlines():
        start = line.find("{")
        if start >= 0:
            facts = json.loads(line[start:])
            who = facts.pop("who")
            found[who] = {name: round(value / MEGABYTE, 1) for name, value in facts.items()}
    found["model"] = {"bytes": round(num_elements(shapes(model)) * 4 / MEGABYTE, 1)}
    return found
