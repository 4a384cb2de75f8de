"""One process of the Echelon contender: a worker whose gradients are where a Trainer has them.

Gradients and weights are in the store's own memory, as in training (`KVStore.views`). An untimed copy writes the
gradients in place of a backward pass, as for the peers. `--copy` measures the plain API instead: gradients and weights
are the caller's tensors, and each step copies them in and out.

In the role of a server or scheduler, the process serves the job.
"""

from __future__ import annotations

import argparse

import torch

from echelon import kvstore
from echelon.bench.harness.protocol import serve, timed
from echelon.bench.pushpull.shapes import Shape, shapes
from echelon.cluster.messages import PushHeader
from echelon.kvstore.servers.store import ServerStore
from echelon.schemes import store_kind
from echelon.schemes.stores import Use

STALENESS = 3
SETTINGS = {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4}


class Model:
    """The tensors of a model in a store."""

    def __init__(self, store: ServerStore, tensors: list[Shape], copy: bool) -> None:
        self._store = store
        self._copy = copy
        generator = torch.Generator().manual_seed(store.rank)
        self._fresh = [torch.randn(shape, generator=generator).mul_(1e-3) for shape in tensors]
        self._names = [str(index) for index in range(len(tensors))]
        self._weights = [torch.ones(shape) for shape in tensors]
        store.init(self._names, self._weights)
        store.set_optimizer("sgd", style="torch", **SETTINGS)
        self._slots = store.slots(self._names)
        self._gradients = self._fresh if copy else [store.views(name)[1] for name in self._names]
        if not copy:
            self._weights = []

    def step(self) -> None:
        """Push all gradients and wait for all weights."""
        if self._copy:
            self._store.pushpull(self._names, self._gradients, self._weights)
        else:
            self._store.wait(self._store.push_bucket(self._slots, PushHeader(1.0)))

    def timed_step(self) -> float:
        """Write new gradients, do a step and return the seconds of the step."""
        if not self._copy:
            for place, fresh in zip(self._gradients, self._fresh, strict=True):
                place.copy_(fresh)
        return timed(self.step)


def main() -> None:
    """Join the job and run rounds until the harness sends `quit`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="the tensors to move, as in `echelon bench pushpull`")
    parser.add_argument("--kv-store", default="dist_sync")
    parser.add_argument("--copy", action="store_true", help="measure the plain API with the caller's tensors")
    args = parser.parse_args()
    torch.set_num_threads(1)
    staleness = STALENESS if store_kind(args.kv_store).staleness is Use.REQUIRED else None
    with kvstore.create(args.kv_store, staleness=staleness) as store:
        assert isinstance(store, ServerStore)
        model = Model(store, shapes(args.model), args.copy)

        def run_round(num_steps: int) -> list[float]:
            store.barrier()
            return [model.timed_step() for _ in range(num_steps)]

        serve(run_round)


if __name__ == "__main__":
    main()
