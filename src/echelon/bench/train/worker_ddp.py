"""One rank of the DDP peer: torch's DistributedDataParallel over Gloo, with its fastest settings on a CPU.

Gradients are views of the buckets, each rank keeps its own buffers (as with Echelon), and SGD is fused.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from echelon.bench.harness.protocol import serve
from echelon.bench.train.networks import make_batch, make_model, make_optimizer, make_step
from echelon.bench.train.workloads import WORKLOADS, Loop


def main() -> None:
    """Join the process group and run rounds until the harness sends `quit`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=WORKLOADS, required=True)
    parser.add_argument("--batch-size", type=int, required=True, help="samples per step of this rank")
    parser.add_argument("--threads", type=int, required=True, help="threads of this rank")
    parser.add_argument("--process-group", required=True, help="URL of the rendezvous, with rank and world size")
    parser.add_argument("--max-grad-norm", type=float, help="clip by the global norm")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    dist.init_process_group("gloo", args.process_group)
    model = DistributedDataParallel(
        make_model(args.model), gradient_as_bucket_view=True, static_graph=True, broadcast_buffers=False
    )
    optimizer = make_optimizer(args.model, model, fused=True)

    def update() -> None:
        if args.max_grad_norm is not None:
            clip_grad_norm_(model.parameters(), args.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()

    try:
        step = make_step(model, make_batch(args.model, args.batch_size, dist.get_rank()), update)
        serve(Loop(step, dist.barrier, lambda: None).run_round)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
