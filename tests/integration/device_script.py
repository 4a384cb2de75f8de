"""What tests run as the process of a device: it does as its first argument says."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from echelon.environment import Job


def say(text: str) -> None:
    """In one write: under torchrun all processes have one output."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def meet(how: str, store: str) -> None:
    """Sum with the others; the last may die or leave when all have said what came out."""
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
    kv.barrier()  # and no close: a script may end as it likes


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
            Path(what).write_text("a device has its reasons")  # a pipe: the other ends when it has read this
        time.sleep(60)  # until a signal comes
    else:
        meet(how, what)


if __name__ == "__main__":
    main()
