"""The process of the MXNet peer in `echelon bench io`: ImageRecordIter, with the same crop, mirror, shuffle and mean.

Runs under MXNet's own environment, so it imports nothing of Echelon; the lines on stdin and stdout are those of
`echelon.bench.harness.protocol`, written again here in a few lines.
MXNet itself caps its decoding threads at half the processors.

It decodes 17 batches ahead, for seconds after it was last asked for one. A turn therefore ends only when that is over:
it would otherwise take a core from the other contender's turn, and get those batches for nothing in its own.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import mxnet as mx


class Batches:
    """Epoch after epoch of one iterator."""

    def __init__(self, args: argparse.Namespace) -> None:
        idx = Path(args.rec).with_suffix(".idx")
        self._batches: Any = mx.io.ImageRecordIter(
            path_imgrec=args.rec,
            path_imgidx=str(idx) if idx.is_file() else "",
            data_shape=(3, 224, 224),
            batch_size=args.batch_size,
            rand_crop=True,
            rand_mirror=True,
            shuffle=True,
            mean_r=123.68,
            mean_g=116.779,
            mean_b=103.939,
            preprocess_threads=args.threads,
        )

    def take(self) -> None:
        """Wait for a batch to be there."""
        try:
            batch = self._batches.next()
        except StopIteration:
            self._batches.reset()
            batch = self._batches.next()
        batch.data[0].wait_to_read()


def main() -> None:
    """Serve rounds until told to quit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rec", required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--step-batches", type=int, required=True)
    args = parser.parse_args()
    batches = Batches(args)
    settle()
    say(ready=True)
    for line in iter(sys.stdin.readline, "quit\n"):
        if not line:
            return
        step_s = []
        for _ in range(int(line.removeprefix("run "))):
            start = time.perf_counter()
            for _ in range(args.step_batches):
                batches.take()
            step_s.append(time.perf_counter() - start)
        settle()
        say(step_s=step_s)


def settle(interval_s: float = 0.2, limit_s: float = 60.0) -> None:
    """Wait until this process does nothing any more."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        before = time.process_time()
        time.sleep(interval_s)
        if time.process_time() - before < 0.05 * interval_s:
            return


def say(**answer: object) -> None:
    """Print an answer for the harness at once."""
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
