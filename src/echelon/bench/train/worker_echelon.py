"""One process of the Echelon contender of `echelon bench train`: a plain loop around `echelon.Trainer`.

In the role of a server or scheduler, the process serves the job.
"""

from __future__ import annotations

import argparse

import torch

from echelon import Trainer, kvstore
from echelon.bench.harness.protocol import serve
from echelon.bench.train.networks import make_batch, make_model, make_optimizer, make_step
from echelon.bench.train.workloads import WORKLOADS, Loop
from echelon.schemes import store_kind
from echelon.schemes.stores import Use

STALENESS = 3


def main() -> None:
    """Join the job and run rounds until the harness sends `quit`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=WORKLOADS, required=True)
    parser.add_argument("--batch-size", type=int, required=True, help="samples per step of this worker")
    parser.add_argument("--threads", type=int, required=True, help="threads of this worker")
    parser.add_argument("--kv-store", default="dist_sync")
    parser.add_argument("--push-factors", type=int, default=1, help="as in the training scripts")
    parser.add_argument("--lazy-pull", type=int, default=0, help="as in the training scripts")
    parser.add_argument("--max-grad-norm", type=float, help="clip by the global norm")
    args = parser.parse_args()
    staleness = STALENESS if store_kind(args.kv_store).staleness is Use.REQUIRED else None
    store = kvstore.create(args.kv_store, staleness=staleness)
    torch.set_num_threads(args.threads)
    model = make_model(args.model)
    optimizer = make_optimizer(args.model, model)
    options = {
        "push_factors": bool(args.push_factors),
        "lazy_pull": bool(args.lazy_pull),
        "max_grad_norm": args.max_grad_norm,
    }
    with Trainer(model, optimizer, store, **options) as trainer:
        step = make_step(model, make_batch(args.model, args.batch_size, store.rank), trainer.step)
        serve(Loop(step, store.barrier, trainer.sync).run_round)


if __name__ == "__main__":
    main()
