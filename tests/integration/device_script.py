"""The program that tests run as the process of a device. Its first argument says what it does."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from echelon.environment import Job


def say(text: str) -> None:
    """Print a line in one write, because under torchrun all processes share one output."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def sum_with_others(how: str, store: str) -> None:
    """Sum with the other devices. Then the last rank may kill itself (die) or exit (leave)."""
    import torch

    from echelon import kvstore

    kv = kvstore.create(store)
    kv.init("w", torch.zeros(2))
    kv.pushpull("w", torch.full((2,), kv.rank + 1.0), out := torch.empty(2))
    say(f"rank {kv.rank} of {kv.num_workers}: {out.tolist()}")
    kv.barrier()
    if how == "die" and kv.rank == kv.num_workers - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "leave" and kv.rank == kv.num_workers - 1:
        sys.exit("enough of this")
    kv.barrier()  # without close(): a script may end without it


def main() -> None:
    how, what = sys.argv[1:]
    job = Job.from_environment()
    say(f"device {job.device_index} of {job.num_devices}")
    if how == "fail" and job.device_index:
        sys.exit(Path(what).read_text())
    elif how in ("fail", "wait"):
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
        if how == "wait":
            Path(what, f"at work {job.device_index}").touch()
        else:
            Path(what).write_text("a device has its reasons")  # a pipe: the other device exits when it has read this
        time.sleep(60)  # until a signal arrives
    else:
        sum_with_others(how, what)


if __name__ == "__main__":
    main()
