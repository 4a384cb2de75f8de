"""The Trainer: five changed lines turn a plain PyTorch loop into a distributed one.

Importing this package registers every kind of Trainer for its kind of store, so that `Trainer(…)` can choose.

Read `base` (what all kinds share, and a process that trains alone) with `attached` (the optimizer of a Trainer), then
the kind for the store: `servers` (servers run the optimizer), `workers` (each worker runs it, on mean gradients), or
`multi_device` (a worker with several devices in front of servers). `group` is what Trainers of a process group share,
`optimizer_state` names an optimizer's state, `buckets` and `regions` divide the parameters, `start_equal`, `ownership`
and `model_hook` are the start of a Trainer, and `clipping` clips by the global norm. `leased` and `lease_sampler` say
which samples a step uses.
"""

from echelon.train.trainer.base import Trainer
from echelon.train.trainer.lease_sampler import LeaseSampler
from echelon.train.trainer.multi_device import MultiDeviceTrainer
from echelon.train.trainer.servers.trainer import ServerTrainer
from echelon.train.trainer.workers.collective import CollectiveTrainer
from echelon.train.trainer.workers.local_update import LocalUpdateTrainer
from echelon.train.trainer.workers.sharded import ShardedTrainer

__all__ = [
    "CollectiveTrainer",
    "LeaseSampler",
    "LocalUpdateTrainer",
    "MultiDeviceTrainer",
    "ServerTrainer",
    "ShardedTrainer",
    "Trainer",
]
