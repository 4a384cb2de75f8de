"""The Trainer: five changed lines turn a plain PyTorch loop into a distributed one.

Importing this package registers every kind of Trainer for its kind of store, so that `Trainer(…)` can choose.

Read `base` (what all kinds share, and a process that trains alone), then the kind for the store: `server` (parameter
servers) with `server_buckets`; `mean_gradients` (gradients that are the mean over the workers when backward returns)
with `local_update` (servers that only sum) and `collective` (a process group); `sharded` with `optimizer_state` (its
optimizer divided among the ranks); `group`, `flat_buckets` and `bucket_reductions` (what these share);
`multi_device` (a worker with several devices in front of servers). `buckets` and `regions` divide the parameters,
`factors` has the smaller pushes of large linear layers, `guards` the checks of changes that would have no effect.
"""

from echelon.train.trainer.base import Trainer
from echelon.train.trainer.collective import CollectiveTrainer
from echelon.train.trainer.local_update import LocalUpdateTrainer
from echelon.train.trainer.multi_device import MultiDeviceTrainer
from echelon.train.trainer.server import ServerTrainer
from echelon.train.trainer.sharded import ShardedTrainer

__all__ = [
    "CollectiveTrainer",
    "LocalUpdateTrainer",
    "MultiDeviceTrainer",
    "ServerTrainer",
    "ShardedTrainer",
    "Trainer",
]
