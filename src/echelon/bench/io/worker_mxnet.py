"""The process of the MXNet peer of `echelon bench io`: ImageRecordIter with the same crop, mirror, shuffle and mean.

It runs under MXNet's Python, which has neither Echelon nor torch installed. MXNet limits its decoding threads to half
the processors.

MXNet decodes 17 batches ahead, which takes seconds after the last batch was taken. A turn ends only when that is done.
Otherwise the decoding would use a core during the next contender's turn, and its batches would not be timed.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import mxnet as mx

sys.path.append(str(Path(__file__).resolve().parents[3]))  # last, so that it shadows nothing of MXNet's Python
from echelon.bench.harness.protocol import serve, timed


class Batches:
    """The batches of one iterator, epoch after epoch."""

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
        """Wait for the next batch."""
        try:
            batch = self._batches.next()
        except StopIteration:
            self._batches.reset()
            batch = self._batches.next()
        batch.data[0].wait_to_read()


def main() -> None:
    """Run rounds until the harness sends `quit`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rec", required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--step-batches", type=int, required=True)
    args = parser.parse_args()
    batches = Batches(args)

    def step() -> None:
        for _ in range(args.step_batches):
            batches.take()

    def run_round(num_steps: int) -> list[float]:
        step_s = [timed(step) for _ in range(num_steps)]
        wait_until_idle()
        return step_s

    wait_until_idle()
    serve(run_round)


def wait_until_idle(interval_s: float = 0.2, limit_s: float = 60.0) -> None:
    """Wait until this process uses no CPU time."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        before = time.process_time()
        time.sleep(interval_s)
        if time.process_time() - before < 0.05 * interval_s:
            return


if __name__ == "__main__":
    main()
