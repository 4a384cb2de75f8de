"""`python -m benchmarks.kills`: kill one process of each system's job, and print and save what happens."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from benchmarks.kills.cases import Case, ddp, echelon, mxnet
from benchmarks.kills.observe import Observation, observe
from echelon.atomic_file import write_json

OBSERVE_S = 60.0
_CASES: dict[str, list[Callable[[Path], Case]]] = {
    "mxnet": [partial(mxnet, victim) for victim in ("worker 2", "server 1", "scheduler 0")],
    "ddp": [partial(ddp, victim, restarts) for restarts in (0, 3) for victim in ("worker 2", "agent 0")],
    "echelon": [
        partial(echelon, victim, replicas)
        for victim, replicas in (("worker 2", 0), ("server 1", 0), ("server 1", 1), ("scheduler 0", 0))
    ],
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the chosen cases one after the other."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kills", description=__doc__)
    parser.add_argument("--only", choices=sorted(_CASES), action="append", help="a system; may be repeated")
    parser.add_argument("--observe-s", type=float, default=OBSERVE_S, help="seconds after the kill; default: 60")
    parser.add_argument("--out", type=Path, help="write the observations to this JSON file")
    options = parser.parse_args(arguments)
    found: list[Observation] = []
    for system in options.only or _CASES:
        for make in _CASES[system]:
            with tempfile.TemporaryDirectory(prefix="kills-") as folder:
                found.append(observe(make(Path(folder)), options.observe_s))
            print(found[-1], flush=True)
    if options.out:
        write_json(options.out, [asdict(one) for one in found])
    return 0


if __name__ == "__main__":
    sys.exit(main())
