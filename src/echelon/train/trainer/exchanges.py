"""A model's parameters on servers: the places of each in the store's memory, and the buckets that are under way.

A bucket is pushed as one message a server, and comes back as new weights. When its gradients are complete, and who
waits for its weights, is the trainer's matter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from echelon.kvstore.optimizer_spec import learning_rates
from echelon.kvstore.servers.client import Ticket
from echelon.kvstore.servers.store import ServerStore
from echelon.train.trainer.buckets import limit_on_gpu, make_buckets
from echelon.train.trainer.regions import region_of


class Exchanges:
    """Puts parameters into the store, with rank 0's values, and moves them by the bucket."""

    def __init__(
        self,
        store: ServerStore,
        optimizer: Optimizer,
        parameters: Mapping[str, Tensor],
        buckets: Sequence[Sequence[str]],
    ) -> None:
        """`parameters` are in the order of the buckets."""
        self._store = store
        self._optimizer = optimizer
        self._parameters = parameters
        self.buckets = buckets
        self.bucket_of = {name: index for index, bucket in enumerate(buckets) for name in bucket}
        self._flying: dict[int, list[Ticket]] = {}
        names = list(parameters)
        store.init(names, [parameter.detach() for parameter in parameters.values()])
        views = {name: store.views(name) for name in names}
        self._weights = {name: weights for name, (weights, _) in views.items()}
        self.gradients = {name: gradients for name, (_, gradients) in views.items()}
        self._keys = {name: store.key_number(name) for name in names}

    # --- out

    def push(self, names: Sequence[str], samples: int, *, factor_rank: int = 0, more: bool = False) -> list[Ticket]:
        """Push parameters of one bucket; of 0 samples: to say that they have no gradient.

        `factor_rank`: of the factors in a gradient's place. `more`: other buckets of the step follow soon.
        """
        keys = [self._keys[name] for name in names]
        return self._store.exchange(keys, float(samples), learning_rates(self._optimizer), factor_rank, more=more)

    def fly(self, index: int, tickets: list[Ticket]) -> None:
        """A bucket of a step that is over is under way."""
        self._flying[index] = tickets

    # --- in

    @property
    def flying(self) -> list[int]:
        """The buckets whose new weights have not been waited for."""
        return list(self._flying)

    def is_flying(self, index: int) -> bool:
        """Whether a bucket is one of them."""
        return index in self._flying

    def has_come(self, index: int) -> bool:
        """Whether a bucket's new weights are in the store's memory by now."""
        return index not in self._flying or self._store.is_answered(self._flying[index])

    def land(self, index: int) -> list[Ticket]:
        """Wait until a bucket's new weights are in the store's memory; returns the answers."""
        tickets = self._flying.pop(index)
        self._store.wait(tickets)
        return tickets

    def pull(self) -> None:
        """Bring all weights as they are on the servers now."""
        names = list(self._parameters)
        self._store.pull(names, [self._weights[name] for name in names])
        self.take_weights(names)

    def take_weights(self, names: Sequence[str]) -> None:
        """Copy weights from the store's memory to the device; on the CPU a parameter is that memory."""
        for name in names:
            parameter = self._parameters[name]
            if parameter.device.type != "cpu":
                parameter.data.copy_(self._weights[name], non_blocking=True)

    def adopt(self) -> None:
        """Let the parameters on the CPU be the very memory that weights arrive in."""
        for name, parameter in self._parameters.items():
            if parameter.device.type == "cpu":
                parameter.data = self._weights[name]


def bucketed(model: nn.Module, parameters: Mapping[str, Tensor], optimizer: Optimizer) -> list[list[str]]:
    """Cut parameters, which are about in backward's order, into buckets of names.

    Inside a bucket, parameters of one optimizer group lie together: servers treat neighbours alike in one run. Weights
    that decay and biases that do not, in turn, would be a run each, and a step several times as long.
    """
    names = list(parameters)
    sizes = [parameter.numel() * parameter.element_size() for parameter in parameters.values()]
    if next(iter(parameters.values())).device.type == "cpu":
        buckets = make_buckets(sizes)
    else:
        parts = region_of(model)
        limit = limit_on_gpu(sum(sizes))
        buckets = make_buckets(sizes, limit, limit, [parts[name] for name in names])
    groups = enumerate(optimizer.param_groups)
    group_of = {id(parameter): index for index, group in groups for parameter in group["params"]}
    return [
        sorted((names[i] for i in bucket.members), key=lambda name: group_of[id(parameters[name])])
        for bucket in buckets
    ]
