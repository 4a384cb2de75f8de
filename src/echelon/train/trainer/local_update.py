"""The Trainer with `update_on_kvstore=False`: servers average the gradients, and every worker runs its own optimizer.

The optimizer may be of any class, because only gradients are sent. All workers start with rank 0's weights and apply
the same mean gradients, so their weights stay equal. The keys on the servers hold rank 0's weights at the start and
then the mean gradients of the last step. Nothing is sent during backward, so gradients may be changed before `step`.

With the gradients every worker pushes one short vector: whether it still has data, and which parameters have
gradients. The servers sum it. A parameter to which no worker has a gradient is not updated, as in a process alone.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.optim import LBFGS

from echelon.errors import UsageError
from echelon.kvstore.servers.client import Ticket
from echelon.kvstore.servers.store import ServerStore
from echelon.train.trainer.base import Trainer, flatten, unflatten
from echelon.train.trainer.server import BUFFERS, ServerTrainer

_FLAGS = "flags of the step"  # the key of the short vector


class LocalUpdateTrainer(Trainer, local_update_of=ServerTrainer):
    """Keeps the models of all workers equal, with servers that only sum."""

    kvstore: ServerStore

    def _start(self) -> None:
        if isinstance(self.optimizer, LBFGS):
            raise UsageError("LBFGS needs a closure that computes the loss again; a Trainer does not have one")
        if self.kvstore.optimizer_spec is not None:
            raise UsageError(
                f"update_on_kvstore=False, but the store updates with {self.kvstore.optimizer_spec.name}; do not call "
                "set_optimizer on the store of this Trainer"
            )
        self.kvstore.init(self._names, [parameter.detach() for parameter in self._parameters.values()])
        self.kvstore.init(_FLAGS, torch.zeros(1 + len(self._names)))
        if self._buffers:
            self.kvstore.make_vectors(BUFFERS, sum(buffer.numel() for buffer in self._buffers))
        self._pull_weights()
        self.kvstore.on_retire = self._take_part_without_data

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Load weights and buffers into the model; those of rank 0 count. All workers call it."""
        super().load_weights(weights)
        if self.kvstore.rank == self.kvstore.workers[0]:
            self.kvstore.overwrite(self._names, [parameter.detach() for parameter in self._parameters.values()])
        self._pull_weights()

    def average_buffers(self) -> None:
        """Set floating-point buffers (BatchNorm's statistics) to their mean over the workers. All must call it."""
        if self._buffers:
            unflatten(self.kvstore.gather_vectors(BUFFERS, flatten(self._buffers).cpu()).mean(0), self._buffers)

    def _pull_weights(self) -> None:
        """Copy rank 0's weights, which the servers have at this point, into the model."""
        self.kvstore.barrier()
        self.kvstore.pull(self._names, [parameter.detach() for parameter in self._parameters.values()])
        self.kvstore.barrier()  # before anybody replaces them by gradients

    def _step(self, samples: int) -> None:
        self._check_frozen()
        for name, parameter in self._parameters.items():
            self._check_gradient(name, parameter.grad)
            if parameter.grad is not None and parameter.grad.is_sparse:
                raise UsageError(f"the gradient of {name!r} is sparse, which servers do not support; use sparse=False")
        self._take_part(samples, active=True)

    def _take_part(self, samples: int, *, active: bool) -> bool:
        """Do what all workers do in a step. Return whether any worker still has data."""
        gradients = {name: p.grad for name, p in self._parameters.items() if samples and p.grad is not None}
        for name, gradient in gradients.items():
            self.kvstore.views(name)[1].copy_(gradient)
        tickets = self._push(list(gradients), samples)
        tickets += self._push([name for name in self._names if name not in gradients], 0, absent=samples)
        flags = torch.tensor([float(active), *(float(name in gradients) for name in self._names)])
        began = time.perf_counter()
        self.kvstore.pushpull(_FLAGS, flags)
        self.kvstore.wait(tickets)
        self.wait_s += time.perf_counter() - began
        for name, count in zip(self._names, flags[1:].tolist(), strict=True):
            parameter = self._parameters[name]
            parameter.grad = self.kvstore.views(name)[0].to(parameter.device) if count else None
        self._guarded_optimizer.step()
        self._clear_gradients()
        return bool(flags[0])

    def _push(self, names: list[str], samples: int, absent: int = 0) -> list[Ticket]:
        """Push gradients that are in the store's memory, or tell the servers that `absent` samples give none."""
        slots = self.kvstore.slots(names)
        return self.kvstore.push_bucket(slots, float(samples), [], absent=float(absent)) if names else []

    def _take_part_without_data(self) -> None:
        """Make steps without samples until no worker has data."""
        while self._take_part(0, active=False):
            pass
