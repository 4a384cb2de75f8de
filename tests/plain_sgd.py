"""What set_optimizer(torch.optim.SGD(..., lr=1.0)) sends. Creating torch's own optimizer takes 2 s per process."""

from __future__ import annotations

from echelon.cluster.messages import OptimizerSpec

PLAIN_SGD = OptimizerSpec(
    "sgd",
    [
        {
            "lr": 1.0,
            "momentum": 0,
            "dampening": 0,
            "weight_decay": 0,
            "nesterov": False,
            "maximize": False,
            "fused": None,
        }
    ],
)
