"""One rank of the DDP peer: torch's DistributedDataParallel over Gloo, at its best on a CPU.

Gradients are views of the buckets, buffers are left to each rank (as Echelon leaves them), and SGD is fused.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from echelon.bench.harness.protocol import serve
from echelon.bench.train.workloads import WORKLOADS, Loop, make_batch, make_model, make_optimizer


def main() -> None:
    """Join the group, then serve rounds until told to quit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=WORKLOADS, required=True)
    parser.add_argument("--batch-size", type=int, required=True, help="of this rank")
    parser.add_argument("--threads", type=int, required=True, help="of this rank")
    parser.add_argument("--store", type=Path, required=True, help="file through which the ranks find each other")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world-size", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    dist.init_process_group("gloo", f"file://{args.store}", rank=args.rank, world_size=args.world_size)
    model = DistributedDataParallel(
        make_model(args.model), gradient_as_bucket_view=True, static_graph=True, broadcast_buffers=False
    )
    optimizer = make_optimizer(args.model, model, fused=True)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    try:
        batch = make_batch(args.model, args.batch_size, args.rank)
        serve(Loop(model, batch, dist.barrier, update, lambda: None).run_round)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
