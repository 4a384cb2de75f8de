"""The Trainer of `nccl`: each rank updates its shard of the weights, and has the optimizer's state of that shard only.

Backward starts a reduce-scatter for each bucket, so a rank gets the mean of its shard only, in `step`. The whole mean
exists nowhere, so a loop cannot change gradients, and a change is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from echelon.errors import UsageError
from echelon.train.trainer.optimizer_state import ShardedOptimizer, check_elementwise
from echelon.train.trainer.step_times import Phase
from echelon.train.trainer.workers.bucket_reductions import BucketReductions
from echelon.train.trainer.workers.collective import CollectiveTrainer
from echelon.train.trainer.workers.mean_gradients import StepTotals

_INSTEAD = "use nccl_allreduce, whose gradients are the mean over the workers when backward() returns"


class ShardedTrainer(CollectiveTrainer, sharded_of=CollectiveTrainer):
    """Keeps the models of a group equal, with an optimizer that is divided among the ranks."""

    def _start(self) -> None:
        check_elementwise(self.optimizer)
        super()._start()
        if self._group.size > 1 and self._tables.parameters:
            name = next(iter(self._tables.parameters))
            raise UsageError(f"{name!r} has sparse gradients, which nccl cannot divide among ranks: use nccl_allreduce")

    def _join(self) -> None:
        self._updates_here = False  # this process has a part of the state, and the optimizer's own step does not run
        self._sharded = ShardedOptimizer(self._group, self.optimizer, self._buckets)
        self._sharded.load(self._share_state(super().optimizer_state(), 0))
        self._check_unchanged_types()
        self._reductions = BucketReductions(self._buckets, self._group.reduce_scatter)
        self.kvstore.on_retire = self._retire
        self.kvstore.before_barrier = self._take_part_without_data
        for name, parameter in self._parameters.items():
            self._hooks.append(parameter.register_post_accumulate_grad_hook(self._make_grad_hook(name)))

    def zero_grad(self) -> None:
        """Discard gradients that were not sent yet."""
        super().zero_grad()
        if self._buckets:
            for name in self._names:
                self._reductions.discard(name)

    def optimizer_state(self) -> dict[str, Tensor]:
        """Return the optimizer's state as whole tensors on the CPU. All workers call it."""
        return super().optimizer_state() if self._group.size == 1 else self._sharded.state()

    def load_optimizer_state(self, state: Mapping[str, Tensor]) -> None:
        """Load a state. All workers call it with the same state."""
        if self._group.size == 1:
            super().load_optimizer_state(state)
        else:
            self._sharded.load(state)

    # --- backward

    def _make_grad_hook(self, name: str) -> Any:
        def ready(parameter: Tensor) -> None:
            self._check_gradient(name, parameter.grad)
            if self._accumulating or self._overlap is False or self._samples_seen is None:
                return
            if self._reductions.has_arrived(name):
                raise UsageError(
                    f"worker {self.kvstore.rank}: a second backward pass before step(), but nccl sends gradients "
                    f"during backward; use 'with trainer.accumulate():' for batches in parts, or {_INSTEAD}"
                )
            self._reductions.arrive(name, self._samples_seen)

        return ready

    # --- step

    @property
    def _gradients_sent(self) -> bool:
        return self._group.size > 1 and self._reductions.num_started > 0

    def _step(self, samples: int) -> None:
        if self._group.size == 1:
            super()._step(samples)
            return
        if late := self._late_parameters():
            raise UsageError(
                f"the optimizer got {', '.join(late)} after the Trainer was created, but nccl has divided its state "
                "among the ranks: close this Trainer and create another one, or use nccl_allreduce"
            )
        self._check_unchanged_types()
        self._sharded.adopt()
        if (name := self._reductions.changed()) is not None:
            raise UsageError(
                f"the gradient of {name!r} was changed after nccl had sent it during backward; to clip, pass "
                f"Trainer(max_grad_norm=…), or {_INSTEAD}"
            )
        for name, parameter in self._parameters.items():
            if not self._reductions.has_arrived(name):
                self._check_gradient(name, parameter.grad)
        self._take_part(samples, active=True)

    def _take_part(self, samples: int, *, active: bool) -> StepTotals:
        """Do what all ranks do in a step."""
        self._reductions.start_rest(samples)
        given = self._reductions.given
        pending = self._reduce_step_vector(samples, active, (name in given for name in self._names))
        with self.times.during(Phase.WAIT):
            sums = self._reductions.results()
            totals = StepTotals.of(pending.result(), self._group.size)
        used = {name for name, count in zip(self._names, totals.used.tolist(), strict=True) if count}
        self.grad_norm = self._sharded.update(sums, totals.samples.clamp_min(1), used, self.max_grad_norm)
        self._reductions.clear()
        self._receive(totals)
        return totals

    def _take_part_without_data(self) -> None:
        """Make steps without samples until all ranks are here. A rank's shard is needed to the end."""
        self._clear_gradients()
        self._clock_at_barrier = self.clock
        while not self._are_all_here(self._take_part(0, active=False)):
            pass
