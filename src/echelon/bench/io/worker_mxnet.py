"""The process of the MXNet peer of `echelon bench io`: ImageRecordIter with the same crop, mirror, shuffle and mean.

It runs under MXNet's Python, which has neither Echelon nor torch installed. MXNet limits its decoding threads to half
the processors. It decodes 17 batches ahead, which takes seconds after the last batch was taken.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import mxnet as mx

sys.path.append(str(Path(__file__).resolve().parents[3]))  # last, so that it shadows nothing of MXNet's Python
from echelon.bench.io.worker import read_flags, serve_batches


class Batches:
    """The batches of one iterator, epoch after epoch."""

    def __init__(self, rec: str, batch_size: int, threads: int) -> None:
        idx = Path(rec).with_suffix(".idx")
        self._batches: Any = mx.io.ImageRecordIter(
            path_imgrec=rec,
            path_imgidx=str(idx) if idx.is_file() else "",
            data_shape=(3, 224, 224),
            batch_size=batch_size,
            rand_crop=True,
            rand_mirror=True,
            shuffle=True,
            mean_r=123.68,
            mean_g=116.779,
            mean_b=103.939,
            preprocess_threads=threads,
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
    args = read_flags()
    batches = Batches(args.rec, args.batch_size, args.threads)
    wait_until_idle()
    serve_batches(batches.take, args.step_batches, wait_until_idle)


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
