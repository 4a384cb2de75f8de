"""The Trainer with `update_on_kvstore=False`: servers average the gradients, and every worker runs its own optimizer.

The optimizer may be of any class, because only gradients are sent. All workers start with rank 0's weights and apply
the same mean gradients, so their weights stay equal. The keys on the servers hold rank 0's weights at the start and
then the mean gradients of the last backward pass. Gradients are sent when backward ends (`mean_gradients`).

With the gradients every worker pushes its step vector, which the servers sum. A parameter to which no worker has a
gradient is not updated, as in a process alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from echelon.cluster.messages import PushHeader
from echelon.errors import UsageError
from echelon.kvstore.servers.client import Ticket
from echelon.kvstore.servers.store import ServerStore
from echelon.train.trainer.clipping import check_same_limit
from echelon.train.trainer.servers.newcomers import average_over_workers
from echelon.train.trainer.servers.sparse_rows import as_dense, find_tables
from echelon.train.trainer.servers.trainer import ServerTrainer
from echelon.train.trainer.start_equal import copy_from_first_worker, untrained_tensors
from echelon.train.trainer.step_times import Phase
from echelon.train.trainer.workers.mean_gradients import MeanGradientTrainer, StepTotals, step_vector

_FLAGS = "flags of the step"  # the first words of the key of the step vectors


class LocalUpdateTrainer(MeanGradientTrainer, local_update_of=ServerTrainer):
    """Keeps the models of all workers equal, with servers that only sum."""

    kvstore: ServerStore
    _is_needed_to_the_end = False
    _lacks_steps = False  # whether other workers made steps while this one waited for them

    def _start(self) -> None:
        super()._start()
        self._refuse_lbfgs()
        if self.kvstore.is_late:
            raise UsageError(
                f"worker {self.kvstore.rank}: with update_on_kvstore=False a worker cannot join a job that is running, "
                "because the servers do not have the state of the optimizer; leave it out, or start the job again"
            )
        self._densified: set[str] = set()  # parameters whose sparse gradients are sent as dense ones
        if self.kvstore.optimizer_spec is not None:
            raise UsageError(
                f"update_on_kvstore=False, but the store updates with {self.kvstore.optimizer_spec.name}; do not call "
                "set_optimizer on the store of this Trainer"
            )
        self.kvstore.init(self._names, [parameter.detach() for parameter in self._parameters.values()])
        if tables := find_tables(self.model, self._parameters, self.optimizer):
            raise UsageError(
                f"{tables[0]!r} has sparse gradients, which update_on_kvstore=False cannot average: leave it out, so "
                "that servers update the rows, or use a store without servers"
            )
        num_workers = 1 + max(self.kvstore.workers)
        self._make_flags_key(len(self._names), num_workers)
        check_same_limit(self.kvstore, self.max_grad_norm)
        self._pull_weights()
        self._start_reducing(num_workers)

    def close(self) -> None:
        """Close as all Trainers do. The servers have only gradients, so this worker says if weights are not finite."""
        if not self.kvstore.is_closed and (defect := self.not_finite()) is not None:
            self.kvstore.report_defect(defect)
        super().close()

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Load weights and buffers into the model; those of rank 0 count. All workers call it."""
        super().load_weights(weights)
        self._publish_weights()

    def _begin_edit(self) -> None:
        self.kvstore.barrier()

    def _publish_weights(self) -> None:
        if self.kvstore.is_first:
            self.kvstore.overwrite(self._names, [parameter.detach() for parameter in self._parameters.values()])
        self._pull_weights()

    def _copy_untrained_from_first(self) -> None:
        copy_from_first_worker(self.kvstore, untrained_tensors(self.model, self._parameters.values()))

    def average_buffers(self) -> None:
        """Set floating-point buffers (BatchNorm's statistics) to their mean over the workers. All must call it."""
        if self._buffers:
            average_over_workers(self.kvstore, self._buffers)

    def _pull_weights(self) -> None:
        """Copy rank 0's weights, which the servers have at this point, into the model."""
        self.kvstore.barrier()
        self.kvstore.pull(self._names, [parameter.detach() for parameter in self._parameters.values()])
        self.kvstore.barrier()  # before anybody replaces them by gradients

    def _make_flags_key(self, num_parameters: int, num_workers: int) -> None:
        """Create a key for the step vectors, whose length depends on the number of parameters."""
        vector = step_vector(0, 0, 0, [False] * num_parameters, rank=0, size=num_workers, active=True)
        key = f"{_FLAGS} of {num_parameters} parameters"
        self.kvstore.init(key, torch.zeros(len(vector), device="cpu"))  # may reduce, with the old key
        self._flags_key = key

    def _add_to_store(self, parameters: Mapping[str, nn.Parameter]) -> None:
        names, values = list(parameters), [parameter.detach() for parameter in parameters.values()]
        self.kvstore.broadcast(names, values, values)
        self._make_flags_key(len(self._names) + len(names), self._num_workers)

    @property
    def _has_sent_early(self) -> bool:
        return False

    def _send_early(self, name: str, samples: int) -> None:
        pass  # all is sent at the end of backward

    def _reduce(self, samples: int, *, active: bool) -> StepTotals:
        gradients = {name: p.grad for name, p in self._parameters.items() if samples and p.grad is not None}
        for name, gradient in gradients.items():
            if gradient.is_sparse:
                gradient = self._parameters[name].grad = as_dense(name, gradient, self._densified)
            self.kvstore.views(name)[1].copy_(gradient.detach())
        tickets = self._push(list(gradients), samples)
        tickets += self._push([name for name in self._names if name not in gradients], 0, absent=samples)
        used = [name in gradients for name in self._names]
        rank, size = self.kvstore.rank, self._num_workers
        clock = self.clock - self._clock_at_barrier
        vector = step_vector(samples, 0.0, clock, used, rank=rank, size=size, active=active)
        flags = torch.tensor(vector, device="cpu")
        with self.times.during(Phase.WAIT):
            self.kvstore.pushpull(self._flags_key, flags)
            self.kvstore.wait(tickets)
        totals = StepTotals.of(flags, size)
        for name, count in zip(self._names, totals.used.tolist(), strict=True):
            if count:
                _set_gradient(self._parameters[name], self.kvstore.views(name)[0])
        return totals

    def _step(self, samples: int) -> None:
        if self._lacks_steps:
            raise UsageError(
                f"worker {self.kvstore.rank} waited in a barrier while others made steps, which its optimizer lacks; "
                "give all workers the same number of batches between barriers, or leave out update_on_kvstore=False"
            )
        super()._step(samples)

    def _receive(self, totals: StepTotals) -> None:
        if not totals.clocks_are_equal:  # a request to stop comes with the servers' answers
            raise self._clocks_error()

    def _make_equal(self, sources: Sequence[int]) -> None:
        """Copy the weights of a worker that made more steps. The state of the optimizer stays old, and is refused."""
        if self.kvstore.rank == sources[0]:
            self.kvstore.overwrite(self._names, [parameter.detach() for parameter in self._parameters.values()])
        elif self.kvstore.rank not in sources:
            why = f"worker {self.kvstore.rank} ran out of data before others, so its optimizer lacks the last steps; "
            refuse = _make_refusal(f"{why}save the optimizer of worker {sources[0]}")
            self._hooks.append(self.optimizer.register_state_dict_pre_hook(refuse))
            self._lacks_steps = True
        self._pull_weights()

    def _push(self, names: list[str], samples: int, absent: int = 0) -> list[Ticket]:
        """Push gradients that are in the store's memory, or tell the servers that `absent` samples give none."""
        slots = self.kvstore.slots(names)
        return self.kvstore.push_bucket(slots, PushHeader(float(samples), absent=float(absent))) if names else []


def _set_gradient(parameter: nn.Parameter, mean: Tensor) -> None:
    """Copy a mean into the gradient. The tensor that is the gradient now stays the gradient."""
    if parameter.grad is None:
        parameter.grad = mean.to(parameter.device, parameter.dtype, copy=True)
    else:
        parameter.grad.detach().copy_(mean)


def _make_refusal(why: str) -> Callable[[Optimizer], None]:
    def refuse(_: Optimizer) -> None:
        raise UsageError(why)

    return refuse
