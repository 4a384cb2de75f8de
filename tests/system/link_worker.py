"""A worker of jobs over bad links. The final weights show how often each push was applied: -1 once, 0 never, -2 twice.

Push number c of worker r is 1 at [c, r] and 0 elsewhere, in a key on one server and in one that all servers share.
Plain SGD with learning rate 1 subtracts it. Each clock is a line with its time in the file `clocks-RANK`.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from echelon import kvstore
from echelon.kvstore.servers.store import ServerStore
from echelon.transport.admission.channel import PlainChannel
from plain_sgd import PLAIN_SGD


@dataclass(frozen=True, slots=True)
class Work:
    """What a worker does. It takes `pace_s` per clock beside the exchange."""

    store: str
    clocks: int
    max_clocks: int  # of the worker that has most
    num_workers: int
    pace_s: float = 0.02
    wide: int = 256  # elements per clock and worker in the key that the servers share
    long_at: int = -1  # the clock that takes `long_s` instead
    long_s: float = 0.0
    read_bytes_per_s: float = float("inf")


def read_slowly(bytes_per_s: float) -> None:
    """Limit how many bytes per second each unencrypted channel of this process receives."""
    recv_into = PlainChannel.recv_into

    def slow(channel: PlainChannel, view: memoryview) -> int:
        count = recv_into(channel, view[: int(bytes_per_s / 20)])
        time.sleep(count / bytes_per_s)
        return count

    PlainChannel.recv_into = slow  # type: ignore[assignment, method-assign]


def main() -> None:
    work = Work(**json.loads(sys.argv[1]))
    folder = Path(sys.argv[2])
    if work.read_bytes_per_s < float("inf"):
        read_slowly(work.read_bytes_per_s)
    torch.set_num_threads(1)
    kv = kvstore.create(work.store)
    assert isinstance(kv, ServerStore)
    shape = (work.max_clocks, work.num_workers)
    weights = {"narrow": torch.zeros(shape), "wide": torch.zeros(*shape, work.wide)}
    kv.init(list(weights), list(weights.values()))
    kv.use_optimizer(PLAIN_SGD)
    with (folder / f"clocks-{kv.rank}").open("w", buffering=1) as progress:
        for clock in range(work.clocks):
            print(time.time(), file=progress)
            time.sleep(work.long_s if clock == work.long_at else work.pace_s)  # computes
            gradients = [torch.zeros_like(weight) for weight in weights.values()]
            for gradient in gradients:
                gradient[clock, kv.rank] = 1
            kv.push(list(weights), gradients)
            kv.pull(list(weights), list(weights.values()))
    kv.barrier()
    kv.pull(list(weights), list(weights.values()))
    assert bool((weights["wide"] == weights["narrow"].unsqueeze(2)).all()), "both keys have the same updates"
    (folder / f"table-{kv.rank}").write_text(json.dumps(weights["narrow"].T.tolist()))
    kv.close()


if __name__ == "__main__":
    main()
